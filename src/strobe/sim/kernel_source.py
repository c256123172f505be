"""A kernel's own source, for messages that a person can read: which line runs, and what its variables call a buffer."""

from __future__ import annotations

import linecache
import os
import re
import sys
from pathlib import Path
from types import FrameType

import triton

_SIMULATOR = str(Path(__file__).parent)
_NOT_THE_KERNEL = (_SIMULATOR, str(Path(triton.__file__).parent))
_ASSIGNED = re.compile(r"\s*([A-Za-z_]\w*)\s*(?::[^=]+)?=[^=]")


def where() -> str:
    """The line of the kernel that runs now: "file.py:12 in function"."""
    frame = kernel_frame()
    if frame is None:
        return "the launch"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


def kernel_frame() -> FrameType | None:
    """The frame of the kernel that runs now; None outside of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_KERNEL):
        frame = frame.f_back
    return frame


def assigned_name() -> str:
    """The name of an allocation that is under way: "q_full", or "k.full" where `k = make_channel(...)` assigns `full = ...`.

    A variable of a helper function stands behind that of its caller; what the innermost helper calls it is left out, as it
    says the least ("buffers", "barriers").
    """
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_SIMULATOR):
            match = _ASSIGNED.match(linecache.getline(code.co_filename, frame.f_lineno))
            if match:
                names.insert(0, match.group(1))
        frame = frame.f_back
    return ".".join(names[:-1] if len(names) > 1 else names) or "unnamed"
