"""The documents as a site: what MkDocs has to know of files that lie outside `docs/` (`mkdocs.yml` names this file as a hook).

README and the other pages of the repository's root become pages of the site, and so do the sources that documents link to; JSON
and pictures are copied. Links are changed to where their files are on the site, so that the same text works in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[4]

PAGES = {
    "README.md": "index.md",
    "DESIGN.md": "design.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
}
"""Pages of the root -> their names on the site."""

_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def place_of(path: str) -> str | None:
    """Where a file of the repository is on the site, or None if it is not there. Sources are shown on pages of their own."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if not (ROOT / path).is_file():
        return None
    return f"source/{path}.md" if path.endswith(".py") else f"source/{path}"


def targets(text: str, page: str) -> list[str]:
    """The files of the repository, by their paths from its root, that the text of a page of it links to."""
    found = (_file_of(link, page) for _, link, _ in _LINK.findall(text))
    return [path for path in found if path is not None]


def changed_links(text: str, page: str) -> str:
    """A page of the repository as one of the site: links lead to places of the site, those to folders to its first page."""
    here = posixpath.dirname(place_of(page) or "")

    def change(found: re.Match) -> str:
        path = _file_of(found[2], page)
        if path is None:
            return found[0]
        place, anchor = place_of(path), found[2].partition("#")[2]
        if place is None and (ROOT / path).is_dir():
            place = "index.md"
        if place is None:
            return found[0]  # which MkDocs finds to lead nowhere
        target = posixpath.relpath(place, here or ".")
        return f"]({target}{'#' + anchor if anchor else ''})"

    return _LINK.sub(change, text)


def _file_of(link: str, page: str) -> str | None:
    """The path from the root of what a page links to; None for other sites and for places on the page itself."""
    name = link.partition("#")[0]
    if not name or re.match(r"\w+:", name):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), name))


# ---- what MkDocs calls


def on_files(files, config):
    """Add the pages and files that lie outside `docs/`."""
    from mkdocs.structure.files import File

    texts = {page: (ROOT / page).read_text() for page in PAGES}
    for page, place in PAGES.items():
        files.append(File.generated(config, place, content=texts[page]))
    texts |= {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages() if file.abs_src_path}
    for path in sorted({target for page, text in texts.items() for target in targets(text, page)}):
        at = place_of(path)
        if at is not None and at.startswith("source/"):
            if path.endswith(".py"):
                source = (ROOT / path).read_text()
                files.append(File.generated(config, at, content=f"# {Path(path).name}\n\n`````python\n{source}`````\n"))
            else:
                files.append(File.generated(config, at, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Change the links of a page to the places on the site."""
    place = page.file.src_uri
    of_root = {place: name for name, place in PAGES.items()}
    if place.startswith("source/"):
        return markdown
    return changed_links(markdown, of_root.get(place, f"docs/{place}"))
