"""Merges attention over parts of the keys into attention over all of them. Plain Triton, for any GPU.

Of each part we know O, normalised, and LSE = log(sum of exp(score)). The weight of a part is its share of the whole sum:

    LSE = log(sum over parts of exp(LSE_s))      O = sum over parts of exp(LSE_s - LSE) O_s

computed against the running maximum, so that nothing overflows. The law is associative, an empty part (LSE_s = -inf)
changes nothing, whatever its O holds, and all parts empty give 0 and -inf. (Milakov & Gimelshein 2018, "Online normalizer
calculation for softmax".)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strobe.kernels.common.call import Call
from strobe.kernels.common.device_function import device_function
from strobe.kernels.portable import interpreter
from strobe.kernels.portable.arguments import matrix, vector
from strobe.kernels.portable.config import padded
from strobe.kernels.portable.primitives import Matrix, load_tile, load_vector, store_tile, store_vector, stream, vector_stream

interpreter.mend()

TILE_ROWS = 16


@device_function
def _merged(state, o, lse):
    """The state (O unnormalised, row_max, row_sum) with one more part."""
    acc, row_max, row_sum = state
    new_max = tl.maximum(row_max, lse)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
    rescale, weight = tl.exp(row_max - shift), tl.exp(lse - shift)
    o = tl.where((lse == float("-inf"))[:, None], 0.0, o)  # which nobody need have written
    return acc * rescale[:, None] + weight[:, None] * o, new_max, row_sum * rescale + weight


@triton.jit(do_not_specialize=["splits", "batch", "heads", "n"])
def _combine(out_parts, lse_parts, out, lse, splits, batch, heads, n,
             DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """A program merges TILE rows of one head. The parts of batch entry b are the entries b, b + batch, ... of *_parts."""
    tiles = tl.cdiv(n, TILE)
    pid = tl.program_id(0)
    first, head, b = pid % tiles * TILE, pid // tiles % heads, pid // tiles // heads
    remaining = n - first
    acc = tl.zeros([TILE, PADDED], tl.float32)
    row_max = tl.full([TILE], float("-inf"), tl.float32)
    state = (acc, row_max, tl.zeros([TILE], tl.float32))
    for split in range(splits):
        o = load_tile(stream(out_parts, split * batch + b, first, head, TILE, PADDED), 0, remaining, DIM)
        part_lse = load_vector(vector_stream(lse_parts, split * batch + b, first, head, TILE), 0, remaining)
        state = _merged(state, o, part_lse)
    acc, row_max, row_sum = state
    nothing = row_sum == 0.0
    row_sum = tl.where(nothing, 1.0, row_sum)
    o = tl.where(nothing[:, None], 0.0, acc / row_sum[:, None])
    total = tl.where(nothing, float("-inf"), row_max + tl.log(row_sum))
    store_tile(stream(out, b, first, head, TILE, PADDED), 0, remaining, o, DIM)
    store_vector(vector_stream(lse, b, first, head, TILE), 0, remaining, total)


def combine(out_partial: torch.Tensor, lse_partial: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write out and lse, the merge of all parts.

    out_partial: float32 [splits, batch, n, heads, D], lse_partial: float32 [splits, batch, heads, n], contiguous.
    out: [batch, n, heads, D] of any dtype, lse: float32 [batch, heads, n]. A packed problem leaves out `batch`
    everywhere. The O of a part whose LSE is -inf may hold anything.
    """
    if out.numel():
        with torch.cuda.device_of(out):
            combine_call(out_partial, lse_partial, out, lse).launch()


def combine_call(out_partial: torch.Tensor, lse_partial: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Call:
    """The launch of `combine`."""
    splits, (*batch, n, heads, head_dim) = out_partial.shape[0], out.shape
    entries, entry = (batch[0], 1) if batch else (1, 0)  # the dim whose stride leads from entry to entry, then to the next part
    return Call(_combine, (triton.cdiv(n, TILE_ROWS) * heads * entries,), (), dict(
        out_parts=Matrix(out_partial, out_partial.stride(entry), *out_partial.stride()[-3:-1]),
        lse_parts=Matrix(lse_partial, lse_partial.stride(entry), lse_partial.stride(-1), lse_partial.stride(-2)),
        out=matrix(out), lse=vector(lse), splits=splits, batch=entries, heads=heads, n=n,
        DIM=head_dim, PADDED=padded(head_dim), TILE=TILE_ROWS, enable_fp_fusion=True,  # Triton 3.10 turns it off
    ))  # fmt: skip


@triton.jit(do_not_specialize=["heads", "n"])
def _merge(out, lse, part, part_lse, heads, n, DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):
    """A program merges a part of TILE rows of one head into out and lse."""
    tiles = tl.cdiv(n, TILE)
    pid = tl.program_id(0)
    first, head, b = pid % tiles * TILE, pid // tiles % heads, pid // tiles // heads
    remaining = n - first
    outs, lses = stream(out, b, first, head, TILE, PADDED), vector_stream(lse, b, first, head, TILE)
    state = (tl.zeros([TILE, PADDED], tl.float32), tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.float32))
    state = _merged(state, load_tile(outs, 0, remaining, DIM), load_vector(lses, 0, remaining))
    parts, part_lses = stream(part, b, first, head, TILE, PADDED), vector_stream(part_lse, b, first, head, TILE)
    acc, row_max, row_sum = _merged(state, load_tile(parts, 0, remaining, DIM), load_vector(part_lses, 0, remaining))
    nothing = row_sum == 0.0
    row_sum = tl.where(nothing, 1.0, row_sum)
    tl.debug_barrier()  # each warp has read every row's LSE, of which one warp writes the new one
    store_tile(outs, 0, remaining, tl.where(nothing[:, None], 0.0, acc / row_sum[:, None]), DIM)
    store_vector(lses, 0, remaining, tl.where(nothing, float("-inf"), row_max + tl.log(row_sum)))


def merge_call(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> Call:
    """The launch that merges a part into out and lse, in place: float32, [batch, n, heads, D] and [batch, heads, n], of any
    strides but for a contiguous last dim of out; a packed problem leaves out `batch`."""
    *batch, n, heads, head_dim = out.shape
    return Call(_merge, (triton.cdiv(n, TILE_ROWS) * heads * (batch[0] if batch else 1),), (), dict(
        out=matrix(out), lse=vector(lse), part=matrix(part), part_lse=vector(part_lse), heads=heads, n=n,
        DIM=head_dim, PADDED=padded(head_dim), TILE=TILE_ROWS, enable_fp_fusion=True,
    ))  # fmt: skip
