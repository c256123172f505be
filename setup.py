"""What pyproject.toml cannot say, as it depends on where the project is kept: its address, and the README for an index page.

An index shows the README away from the repository, where relative links lead nowhere and pictures do not show. So

    STROBE_REPOSITORY=https://github.com/owner/name python -m build

gives the metadata that repository's address, and makes links and pictures absolute, to the version's tag. The release workflow
does so. Without it no address is known: links become plain text and pictures are left out.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)\n*")
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:)([^)\s]+)\)")


def version() -> str:
    found = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def for_an_index(text: str, repository: str, tag: str) -> str:
    """The README as it stands alone: with absolute links to a tag of a repository or, where that is "", with none."""
    text = COMMENT.sub("", text)
    if not repository:
        return LINK.sub(r"\1", PICTURE.sub("", text))
    text = PICTURE.sub(lambda found: found[0].replace(f"({found[2]})", f"({repository}/raw/{tag}/{found[2]})"), text)
    return LINK.sub(lambda found: f"[{found[1]}]({_absolute(found[2], repository, tag)})", text)


def _absolute(link: str, repository: str, tag: str) -> str:
    return f"{repository}{link}" if link.startswith("#") else f"{repository}/blob/{tag}/{link}"


def urls(repository: str, tag: str) -> dict[str, str]:
    if not repository:
        return {}
    pages = {"Documentation": "docs/quickstart.md", "Changelog": "CHANGELOG.md", "Measurements": "docs/bench.md"}
    links = {name: _absolute(page, repository, tag) for name, page in pages.items()}
    return {"Homepage": repository, **links, "Issues": f"{repository}/issues"}


if __name__ == "__main__":
    where, at = os.environ.get("STROBE_REPOSITORY", "").rstrip("/"), f"v{version()}"
    setup(
        long_description=for_an_index((ROOT / "README.md").read_text(), where, at),
        long_description_content_type="text/markdown",
        project_urls=urls(where, at),
    )
