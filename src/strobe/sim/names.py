"""How a kernel calls its buffers: the variables to which allocations are assigned, for messages that a person can read."""

from __future__ import annotations

import linecache
import re
import sys
from pathlib import Path
from types import FrameType

_HERE = str(Path(__file__).parent)
_ASSIGNED = re.compile(r"\s*([A-Za-z_]\w*)\s*(?::[^=]+)?=[^=]")


def assigned_name() -> str:
    """Of an allocation that is under way: "q_full", or "k.full" where `k = make_channel(...)` assigns `full = ...`.

    A variable of a helper function stands behind that of its caller; what the innermost helper calls it is left out, as it
    says the least ("buffers", "barriers").
    """
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_HERE):
            match = _ASSIGNED.match(linecache.getline(code.co_filename, frame.f_lineno))
            if match:
                names.insert(0, match.group(1))
        frame = frame.f_back
    return ".".join(names[:-1] if len(names) > 1 else names) or "unnamed"
