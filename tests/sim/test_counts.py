"""The documents say how many mistakes the simulator finds: as many as there are."""

import importlib
import re
from pathlib import Path

from broken import Bug
from test_broken_gemms import BUGS as IN_GEMMS

from strobe.kernels import triton_version

ROOT = Path(__file__).parent.parent.parent
FILES = {
    "the Hopper forward": ["test_broken_hopper"],
    "its fp8 forward": ["test_fp8_kernel"],
    "the Hopper backwards": ["test_broken_backward", "test_split_backward", "test_few_keys_backward"],
    "the Blackwell forward": ["test_broken_blackwell"],
    "only a pair of CTAs": ["test_broken_clusters"],
}


def mistakes(module: str) -> int:
    """How many `Bug`s stand in the lists of a module, and by themselves."""
    values = vars(importlib.import_module(module)).values()
    found = [bug for value in values for bug in (value if isinstance(value, list) else [value]) if isinstance(bug, Bug)]
    return len({id(bug) for bug in found})


def test_the_documented_mistakes_are_counted():
    if triton_version() < (3, 8):
        return  # of Blackwell there is nothing
    text = " ".join((ROOT / "docs" / "simulator.md").read_text().split())
    counts = {what: sum(map(mistakes, modules)) for what, modules in FILES.items()} | {"three GEMMs": len(IN_GEMMS)}
    said = {what: re.search(rf"(\d+) (?:in|that) {what}", text) for what in counts}
    assert {what: int(match[1]) if match else None for what, match in said.items()} == counts
    total = re.search(r"(\d+) mistakes of a line or so", text)
    assert total and int(total[1]) == sum(counts.values())
