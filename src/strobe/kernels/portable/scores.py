"""The score terms of the portable kernels: what the host hands over, and what the kernels make of it.

Scores are kept in units of log2: the softmax takes exp2, which the hardware has, and log2(e) is folded into the scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl

from strobe.dropout import threshold
from strobe.kernels.common import triton_math
from strobe.kernels.common.call import Tensors
from strobe.kernels.common.device_function import device_function
from strobe.kernels.common.scores import LOG2E, with_bias, with_function
from strobe.kernels.portable.primitives import Blocks, Matrix, address
from strobe.problem import AttentionProblem, bias_shape


class Bias(NamedTuple):
    """A tensor with a number for every pair; strides in elements, 0 where it is repeated."""

    pointer: Any
    batch: Any
    head: Any
    row: Any
    key: Any


class BiasGradient(NamedTuple):
    """Where the gradient of a bias goes, pointer None where nobody wants it; strides in elements, None where it is repeated.

    Always a tuple, for Triton 3.6 cannot ask whether one that holds None is None."""

    pointer: Any
    batch: Any
    head: Any
    row: Any
    key: Any


class Dropout(NamedTuple):
    """A pointer to the seed; `strobe.dropout.threshold`; what kept weights are multiplied by."""

    seed: Any
    threshold: Any
    scale: Any


class Score(NamedTuple):
    """The factors of `strobe.scores.score_and_factor`; slopes and sinks (a Matrix each, by head), bias; a user's functions of
    scores, its derivative, and that of masks, compiled, and the blocks of masks (these are no fields of Mask, for a tuple that
    a kernel makes cannot hold one); dropout, of the weights. Each is None where there is none."""

    inner: Any
    outer: Any
    slopes: Any
    bias: Any
    sinks: Any
    function: Any
    gradient: Any
    visible: Any
    blocks: Any
    dropout: Any


# ---- on the host


def score(problem: AttentionProblem, tensors: Tensors) -> Score:
    """The problem's score with log2(e) folded into its factors."""
    softcap, slopes, bias, sinks, seed = problem.score.softcap, tensors.alibi, tensors.bias, tensors.sinks, tensors.seed
    inner, outer = problem.scale * LOG2E.value, None
    if softcap:
        inner, outer = problem.scale / softcap, softcap * LOG2E.value
    return Score(
        inner,
        outer,
        None if slopes is None else Matrix(slopes, slopes.stride(0) if slopes.dim() == 2 else 0, 0, slopes.stride(-1)),
        None if bias is None else _bias(bias),
        None if sinks is None else Matrix(sinks, 0, 0, sinks.stride(0)),
        triton_math.of_user(problem.score.function),
        triton_math.of_user(problem.score.function_gradient) if problem.phase == "backward" else None,
        triton_math.of_user(problem.mask.function),
        None if tensors.block_kinds is None else _blocks(tensors.block_kinds, tensors.block_pairs),
        None if seed is None else Dropout(seed, threshold(problem.dropout), 1.0 / (1.0 - problem.dropout)),
    )


def _bias(x: torch.Tensor) -> Bias:
    """[batch or 1, heads or 1, rows or 1, keys or 1]: what there is one of is repeated by a stride of 0."""
    return Bias(x, *(stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)))


def _blocks(kinds: torch.Tensor, pairs: torch.Tensor) -> Blocks:
    batch, head = (stride if size > 1 else 0 for size, stride in zip(kinds.shape[:2], kinds.stride()[:2], strict=True))
    return Blocks(kinds, batch, head, kinds.shape[3], pairs, *pairs.shape[1:])


def bias_gradient(problem: AttentionProblem, dbias: torch.Tensor | None) -> BiasGradient:
    """Where dbias (see `common.call.gradients`) is written; None: nowhere."""
    if dbias is None:
        return BiasGradient(None, None, None, None, None)
    dims = zip(dbias.shape, bias_shape(problem), dbias.stride(), strict=True)
    return BiasGradient(dbias, *(stride if size == whole else None for size, whole, stride in dims))


# ---- in a kernel


@device_function
def slope_of(score, batch, head):
    """The ALiBi slope of a head, in units of log2, or None."""
    slope = None
    if score.slopes is not None:
        slope = tl.load(address(score.slopes, batch, 0, head)) * LOG2E
    return slope


@device_function
def sink_of(score, head):
    """The sink of a head, in units of log2; -inf where there is none."""
    sink = float("-inf")
    if score.sinks is not None:
        sink = tl.load(address(score.sinks, 0, 0, head)).to(tl.float32) * LOG2E
    return sink


@device_function
def biased(s, i, j, n_q, n_kv, score, batch, head):
    """Scores of rows i and keys j, which broadcast to the tile, with the bias."""
    if score.bias is not None:
        bias = score.bias
        at = tl.cast(batch, tl.int64) * bias.batch + tl.cast(head, tl.int64) * bias.head
        at += i.to(tl.int64) * bias.row + j.to(tl.int64) * bias.key
        s = with_bias(s, tl.load(bias.pointer + at, mask=(i < n_q) & (j < n_kv), other=0.0).to(tl.float32))
    return s


@device_function
def through_function(s, i, j, score, batch, head):
    """Scores of rows i and keys j through the user's function."""
    if score.function is not None:
        s = tl.zeros_like(s) + with_function(s, score.function, batch, head, i, j)
    return s


@device_function
def add_to_bias(dbias, ds, i, j, batch, head, n_q, n_kv):
    """Give a bias's gradient the tile ds of rows i, [rows, 1], and keys j, [1, keys]: a pair has a place of its own, or shares
    it where the bias is repeated, and what shares a place is added up."""
    REPEATED: tl.constexpr = dbias.batch is None or dbias.head is None or dbias.row is None or dbias.key is None
    rows = i.to(tl.int64)
    keys = j.to(tl.int64)
    in_rows = i < n_q
    in_keys = j < n_kv
    ds = tl.where(in_rows & in_keys, ds, 0.0)
    if dbias.row is None:
        ds = tl.sum(ds, 0)[None, :]
        rows = tl.zeros((1, 1), tl.int64)
        in_rows = rows == 0
    else:
        rows = rows * dbias.row
    if dbias.key is None:
        ds = tl.sum(ds, 1)[:, None]
        keys = tl.zeros((1, 1), tl.int64)
        in_keys = keys == 0
    else:
        keys = keys * dbias.key
    at = dbias.pointer
    if dbias.batch is not None:
        at += tl.cast(batch, tl.int64) * dbias.batch
    if dbias.head is not None:
        at += tl.cast(head, tl.int64) * dbias.head
    if REPEATED:
        tl.atomic_add(at + rows + keys, ds, mask=in_rows & in_keys, sem="relaxed")
    else:
        tl.store(at + rows + keys, ds.to(dbias.pointer.dtype.element_ty), mask=in_rows & in_keys)
