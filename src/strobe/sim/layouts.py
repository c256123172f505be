"""Whether a change of layout moves anything: Triton's own linear layouts, computed without a GPU."""

from __future__ import annotations

import functools

from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import DistributedLayout

from strobe.sim.dtypes import Inferred


def same_place(a, b, shape) -> bool:
    """Whether every thread holds the same elements under both layouts, in whatever registers. Layouts that nobody knows
    (Inferred, AutoLayout, None) are the same only if they are equal."""
    if a is b or a == b:
        return True
    unknown = (Inferred, gl.AutoLayout, gl.CoalescedLayout)
    if not all(isinstance(layout, DistributedLayout) and not isinstance(_root(layout), unknown) for layout in (a, b)):
        return False
    return _places(a, tuple(shape)) == _places(b, tuple(shape))


def _root(layout):
    while isinstance(layout, (gl.SliceLayout, gl.DotOperandLayout)):
        layout = layout.parent
    return layout


@functools.lru_cache(maxsize=1024)
def _places(layout, shape: tuple[int, ...]):
    context = ir.context()  # not kept: what lives until the interpreter ends is reported as leaked
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    linear = builder.to_linear_layout(layout._to_ir(builder), list(shape))
    registers = sorted(tuple(basis) for basis in linear.reg_bases if any(basis))
    return registers, linear.lane_bases, linear.warp_bases, linear.block_bases
