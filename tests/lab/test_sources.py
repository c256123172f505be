"""Which kernels a result was measured with: hashes of their meaning, and what changed since."""

import platform
from importlib.metadata import version

import pytest
import torch

from strobe.lab.bench import machine
from strobe.lab.pages import sources

PLAIN = "def f(x):\n    return x + 1\n"


@pytest.mark.parametrize(
    "text",
    [
        '"""A module."""\n# why\ndef f(x):\n    """Adds."""\n\n    return (x +\n            1)\n',
        PLAIN.replace("x + 1", "x+1  # one"),
    ],
    ids=["docstrings", "layout"],
)
def test_what_does_not_change_meaning_does_not_change_the_hash(text):
    assert sources.digest(".py", text) == sources.digest(".py", PLAIN)


@pytest.mark.parametrize(
    "text", [PLAIN.replace("1", "2"), PLAIN.replace("x", "y"), PLAIN.replace("+", "-"), PLAIN + "y = 'a'\n"]
)
def test_what_changes_meaning_changes_the_hash(text):
    assert sources.digest(".py", text) != sources.digest(".py", PLAIN)


def test_a_hash_is_the_same_on_every_python():
    """The words of the tree are ours: no field that a version of Python added and left empty."""
    assert sources.digest(".py", "@d\nclass A(B):\n    def f(self, *x: int, y=f'{1:.2f}') -> None: ...\n") == "83e7828a3517"


def test_tables_are_hashed_by_their_content():
    assert sources.digest(".json", '{"a": 1, "b": 2}') == sources.digest(".json", '{ "b": 2,\n"a": 1}')
    assert sources.digest(".json", '{"a": 1}') != sources.digest(".json", '{"a": 2}')


def test_a_kernel_is_the_files_that_it_begins_with_and_what_they_import():
    forward, backward = sources.files_of("sm90 forward"), sources.files_of("sm90 backward")
    shared = {"kernels/sm90/scores.py", "kernels/common/tile_scheduler.py", "kernels/portable/forward.py"}
    assert shared <= set(forward) and shared - {"kernels/portable/forward.py"} <= set(backward)
    assert {"kernels/sm90/forward.py", "kernels/sm90/config.py", "tuning/tables/sm90.json"} <= set(forward)
    assert "kernels/sm90/backward.py" in backward and "kernels/sm90/backward.py" not in forward
    assert not any("sm100" in file for file in forward + backward)
    for kernel in sources.KERNELS:
        assert set(sources.files_of(kernel)) <= set(sources.sources())


def test_what_changed_since_is_named():
    now = sources.sources()
    assert sources.changed(now, "sm90 forward") == []
    older = {file: digest for file, digest in now.items() if file != "kernels/sm90/tile_queue.py"}
    older |= {"kernels/sm90/forward.py": "0" * 12, "kernels/sm90/backward.py": "0" * 12}
    assert sources.changed(older, "sm90 forward") == ["kernels/sm90/forward.py", "kernels/sm90/tile_queue.py"]


def test_sources_of_a_commit_come_from_history():
    if (here := machine.commit()) is None:
        pytest.skip("no repository here")
    found = sources.sources_at(here.rstrip("+"))
    assert found.keys() == sources.sources().keys() or here.endswith("+")
    assert here.endswith("+") or found == sources.sources()
    assert sources.sources_at("0" * 40) is None


def test_every_result_begins_with_where_it_comes_from(monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks/x.py", "--length", "4096"])
    found = machine.provenance(torch.device("cpu"))
    assert found["command"] == "python benchmarks/x.py --length 4096" and found["date"][:2] == "20"
    assert found["device"]["name"] == "CPU" and found["device"]["packages"]["torch"] == version("torch")
    assert found["device"]["commit"] == machine.commit() and found["kernels"] == sources.sources()
    simulated = machine.provenance("simulated sm_90", "strobe timeline --simulate")
    assert simulated["command"] == "strobe timeline --simulate" and simulated["device"]["name"] == "simulated sm_90"
    assert simulated["device"]["python"] == platform.python_version()
