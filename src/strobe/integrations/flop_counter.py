"""FLOPs for torch.utils.flop_counter: FlopCounterMode counts Strobe's forward and backward, on visible pairs only.

That module imports Triton, which `import strobe` does not: so the formulas are handed over when a program imports it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import Any

import torch

from strobe.call.options import NAMES, Options, describe, operands_of
from strobe.masks import Blocks, Mask
from strobe.problem import AttentionProblem, Operands, with_tensors

_MODULE = "torch.utils.flop_counter"


def register() -> None:
    """Hand the formulas to torch.utils.flop_counter, now or as soon as it is imported."""
    if _MODULE in sys.modules:
        _hand_over(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder):
    """Watches for the import of torch.utils.flop_counter, once, and finds it as the others do."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_hand_over(module) -> None:
                run(module)
                _hand_over(module)

            spec.loader.exec_module = run_and_hand_over  # type: ignore[method-assign]
        return spec


def _hand_over(module: Any) -> None:
    ops = torch.ops.strobe
    formulas = {ops.forward: forward_flops, ops.backward: backward_flops}
    formulas |= {ops.forward_band: forward_flops, ops.backward_band: backward_flops}
    for operator, formula in formulas.items():
        if operator not in module.flop_registry:
            module.register_flop_formula(operator, get_raw=True)(formula)


def forward_flops(q, k, v, *options, out_val=None) -> int:
    """FLOPs of strobe::forward: QK^T and PV on the visible pairs; a multiply-add counts as two."""
    return _flops(q, k, v, options, 2 * (q.shape[-1] + v.shape[-1]))


def backward_flops(dout, dlse, q, k, v, out, lse, *options, out_val=None) -> int:
    """FLOPs of strobe::backward: QK^T, dP, dV, dQ and dK on the visible pairs; a multiply-add counts as two."""
    return _flops(q, k, v, options[: len(NAMES)], 2 * (3 * q.shape[-1] + 2 * v.shape[-1]))


def _flops(q, k, v, options, flops_per_pair: int) -> int:
    opts = Options(*options)
    operands = operands_of(q, k, v, opts)
    problem = describe(operands, opts)
    mask, _ = with_tensors(problem, operands)
    return problem.heads_q * _pairs(problem, mask, operands) * flops_per_pair


def _pairs(problem: AttentionProblem, mask: Mask, operands: Operands) -> int:
    """How many (query, key) pairs of one head are visible, over the batch. It waits for a GPU where lengths or documents are
    there; of tensors without values, all sequences count as the longest one."""
    lengths = problem.lengths
    if isinstance(mask.blocks, Blocks):
        if type(mask.blocks.kinds) is not torch.Tensor or mask.blocks.kinds.is_meta:
            return lengths.batch * _count(Mask(*mask.band), lengths.seqlen_q, lengths.seqlen_kv)
        return lengths.batch * mask.count(lengths.seqlen_q, lengths.seqlen_kv, lengths.batch, problem.heads_q)
    if not problem.varlen and not problem.seqused and mask.documents is None:
        return lengths.batch * _count(mask, lengths.seqlen_q, lengths.seqlen_kv)
    sides = (
        (operands.cu_seqlens_q, operands.seqused_q, lengths.seqlen_q, operands.document_q),
        (operands.cu_seqlens_kv, operands.seqused_kv, lengths.seqlen_kv, operands.document_kv),
    )
    given = [x for side in sides for x in (side[0], side[1], side[3]) if x is not None]
    if any(x.is_meta or type(x) is not torch.Tensor for x in given):
        return lengths.batch * _count(Mask(*mask.band), lengths.seqlen_q, lengths.seqlen_kv)
    rows, keys = (_lengths(cu, used, lengths.batch, longest) for cu, used, longest, _ in sides)
    return sum(_count(mask.of_batch(b), *pair) for b, pair in enumerate(zip(rows, keys, strict=True)))


def _lengths(cu: torch.Tensor | None, used: torch.Tensor | None, batch: int, longest: int) -> list[int]:
    if used is not None:
        return used.tolist()
    return [longest] * batch if cu is None else cu.diff().clamp(0, longest).tolist()


def _count(mask: Mask, n_q: int, n_kv: int) -> int:
    return mask.count(n_q, n_kv) if mask.documents is not None else _count_of_band(mask, n_q, n_kv)


_count_of_band = functools.lru_cache(maxsize=256)(Mask.count)
"""`Mask.count`, kept: the layers of a model ask the same."""
