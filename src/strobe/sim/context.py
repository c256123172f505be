"""The machine that runs now: what a simulated Gluon call acts on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import triton

if TYPE_CHECKING:
    from strobe.sim.machine import Machine

running: list[Machine] = []


def machine() -> Machine:
    """The Machine that runs now. RuntimeError outside a simulation."""
    if not running:
        raise RuntimeError("a simulated Gluon function was called outside a simulation")
    return running[-1]


_NOT_THE_KERNEL = (str(Path(__file__).parent), str(Path(triton.__file__).parent))


def where() -> str:
    """The line of the kernel that runs now: "file.py:12 in function"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_KERNEL):
        frame = frame.f_back
    if frame is None:
        return "the launch"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
