"""What is around the code: the package's files and metadata, and the workflows."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml

import strobe

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="not in the repository")


def project() -> str:
    return (ROOT / "pyproject.toml").read_text()


def pythons() -> list[str]:
    return re.findall(r"Python :: (3\.\d+)\"", project())


def test_one_version():
    assert f'\nversion = "{strobe.__version__}"\n' in project()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == strobe.__version__
    assert f"## {strobe.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_ask_for_no_more_than_they_need(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "@" in step.get("uses", "@")
            assert "${{ inputs" not in step.get("run", ""), "what a user types goes through env, not into a script"


def test_the_matrix_is_what_the_metadata_says():
    tests = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["tests"]
    matrix = tests["strategy"]["matrix"]
    assert matrix["python"] == pythons() and f'requires-python = ">={pythons()[0]}"' in project()
    assert f"triton>={matrix['triton'][0]}" in project() and matrix["triton"][1:] == ["newest"]


def test_targets_of_workflows_and_hooks_exist():
    makefile = (ROOT / "Makefile").read_text()
    for path in WORKFLOWS:
        for line in re.findall(r"run: make (.*)", path.read_text()):
            for target in line.split():
                assert f"{target}:" in makefile or re.match(r"\.venv/triton-3\.\d", target), (path.name, target)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    for word in " ".join(hook["entry"] for hook in hooks).split():
        assert not word.startswith("tests/") or (ROOT / word).exists()


def test_issue_forms_ask_for_the_doctor():
    for name in ("bug", "feature"):
        form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
        assert any("strobe doctor" in item["attributes"]["label"] for item in form["body"])


BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # which the builds change
build_meta.build_wheel(out)
build_meta.build_sdist(out)
"""


DEMO = """
import sys, strobe
from strobe_cli.app import app
print("it is", strobe.__file__)
app(["demo"])
"""


def check_the_demo(wheel: Path, site: Path) -> None:
    """`strobe demo` runs from the wheel alone, beside what this environment has of others, and asks no network."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(site)}
    left_out = ("TRITON_INTERPRET", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | offline
    done = subprocess.run([sys.executable, "-c", DEMO], cwd=site, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"it is {site}" in done.stdout and "What ran in" in done.stdout and "The Hopper kernel, compiled here" in done.stdout


METADATA = """
import sys
from setuptools import build_meta
print(build_meta.prepare_metadata_for_build_wheel(sys.argv[1]))
"""


def metadata_of(tmp_path: Path, repository: str):
    """The metadata of a wheel built where the project's address is this."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("src/strobe", "out"):
        (tmp_path / folder).mkdir(parents=True)
    environment = os.environ | {"STROBE_REPOSITORY": repository}
    command = [sys.executable, "-c", METADATA, str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return message_from_string((tmp_path / "out" / done.stdout.splitlines()[-1] / "METADATA").read_text())


def test_an_index_page_stands_alone(tmp_path):
    """Links and pictures lead to files of the repository that are there; nothing is left of what a page hides."""
    metadata = metadata_of(tmp_path, "https://github.com/owner/name/")
    text, base = metadata.get_payload(), "https://github.com/owner/name"
    assert metadata["Description-Content-Type"] == "text/markdown" and text.startswith("# Strobe") and "<!--" not in text
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert urls["Homepage"] == base and urls["Issues"] == f"{base}/issues"
    pictures, links = (re.findall(rf"{mark}\[[^\]]*\]\(([^)\s]+)\)", text) for mark in ("!", "(?<!!)"))
    assert len(pictures) >= 2 and len(links) > 20
    ways = {"raw": pictures, "blob": [*links, *(urls[name] for name in ("Documentation", "Changelog", "Measurements"))]}
    for way, found in ways.items():
        for link in found:
            start = f"{base}/{way}/v{strobe.__version__}/"
            assert link.startswith(start) and (ROOT / link.removeprefix(start).partition("#")[0]).exists(), link


def test_without_an_address_nothing_leads_nowhere(tmp_path):
    metadata = metadata_of(tmp_path, "")
    assert metadata.get_all("Project-URL") is None
    assert "](" not in metadata.get_payload() and "doors" in metadata.get_payload()


@pytest.mark.exhaustive
def test_wheel_and_source_distribution(tmp_path):
    tree, out = tmp_path / "tree", tmp_path / "out"
    left_out = shutil.ignore_patterns(".venv", ".git", "__pycache__", "*.egg-info", ".*_cache", "build", "dist")
    shutil.copytree(ROOT, tree, ignore=left_out)
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=tree, check=True, capture_output=True)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        metadata = message_from_string(archive.read(next(x for x in inside if x.endswith("/METADATA"))).decode())
        entries = archive.read(next(x for x in inside if x.endswith("/entry_points.txt"))).decode()
    source = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert source | {"strobe/py.typed", "strobe/tuning/tables/sm90.json", "strobe/lab/pages/report.html.jinja"} <= inside
    assert not [name for name in inside if name.startswith("tests/")]
    assert "strobe_for_torch.py" in inside and "[torch.backends]\nstrobe = strobe_for_torch:register" in entries
    assert "[console_scripts]\nstrobe = strobe_cli.app:main" in entries
    assert "[vllm.general_plugins]\nstrobe = strobe.integrations.vllm:register" in entries
    assert metadata["Version"] == strobe.__version__ and metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier") and metadata.get_payload().startswith("# Strobe")
    check_the_demo(wheel, tmp_path / "site")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [
        "CHANGELOG.md",
        "setup.py",
        "tests/conftest.py",
        "docs/doors.md",
        "Makefile",
        "LICENSE",
        "tests/lab/profiles/l4-details.csv",
    ]
    assert set(wanted) | {f"src/{name}" for name in source} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith(".venv")]
