"""Asks the compiler, which needs no GPU for it, whether a change of layout moves anything."""

from __future__ import annotations

import functools

from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import DistributedLayout

from strobe.sim.dtypes import Inferred


def same_place(a, b, shape) -> bool:
    """Whether every thread holds the same elements under both layouts, in whatever registers. A layout that the
    compiler would infer from views (Inferred) is taken to keep them in place; AutoLayout and None are taken not to."""
    if a is b or a == b or isinstance(a, Inferred):
        return True
    return _known(a) and _known(b) and _trivial(a, b, tuple(shape))


def _known(layout) -> bool:
    while isinstance(layout, (gl.SliceLayout, gl.DotOperandLayout)):
        layout = layout.parent
    return isinstance(layout, DistributedLayout) and not isinstance(layout, (Inferred, gl.AutoLayout, gl.CoalescedLayout))


@functools.lru_cache(maxsize=1024)
def _trivial(a, b, shape: tuple[int, ...]) -> bool:
    """Whether the compiler finds the conversion of a tensor from layout a to b trivial: asked for the argument of an empty
    function."""
    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    before, after = (
        builder.get_distributed_ty(builder.get_int32_ty(), list(shape), layout._to_ir(builder)) for layout in (a, b)
    )
    module = builder.create_module()
    function = builder.get_or_insert_function(module, "convert", builder.get_function_ty([before], []), "public", False)
    module.push_back(function)
    return builder.is_convert_layout_trivial(after, function.add_entry_block().arg(0))
