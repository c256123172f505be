"""Barriers (mbarrier) whose memory Triton may give to others while the GPU takes it for a barrier (docs/upstream.md)."""

from __future__ import annotations

import re

_ALLOCATED = re.compile(r"^\s*(%\S+) = ttg\.local_alloc\b.*!ttg\.memdesc<(?:\d+x)+i64\b", re.MULTILINE)
_VIEW = re.compile(r"^\s*(%\S+) = ttg\.memdesc_\w+ ")
_NAME = re.compile(r"%[\w.$-]+")
_ROLE = re.compile(r"^\s*partition\d+\(.*?^\s*ttg\.warp_return\b", re.MULTILINE | re.DOTALL)


def lost_barriers(ttgir: str) -> tuple[str, ...]:
    """A sentence for each array of barriers of a kernel's TTGIR that is neither handed to its roles nor invalidated."""
    outside = _ROLE.sub("", ttgir)  # what roles do has names of its own
    lost = [name for name in _ALLOCATED.findall(outside) if _is_lost(_uses(name, outside))]
    return tuple(f"wrong code: barrier {name} is not invalidated: others may get its memory while it is one" for name in lost)


def _is_lost(uses: list[str]) -> bool:
    kept = any("warp_specialize(" in line or "inval_barrier" in line for line in uses)
    return any("init_barrier" in line for line in uses) and not kept


def _uses(name: str, text: str) -> list[str]:
    """The lines of a function that name something in shared memory, or a view of it, from the one that makes it on."""
    names, uses = {name}, []
    for line in text[text.index(f"{name} = ") :].partition("tt.func")[0].splitlines():
        if not names.isdisjoint(_NAME.findall(line)):
            uses.append(line)
            if view := _VIEW.match(line):
                names.add(view[1])
    return uses
