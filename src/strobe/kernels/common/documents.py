"""Which keys of a document mask some rows may see, and which rows some keys: blocks beyond are never loaded, and blocks of one
document are not compared pair by pair.

Each SPAN rows know the least and the greatest of their documents; what they may see lies between the first and the last key
whose document is in that range. If they have one document, and so have all keys in between, they see them all. Where sequences
are packed one after the other, as they nearly always are, this leaves out all that is not seen, and compares no more, but for
the ends of documents; where documents lie in any order it leaves out less, and is right.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strobe.kernels.common.call import Buffer, Call, Tensors
from strobe.kernels.common.dependent_launch import take_program_turn
from strobe.problem import AttentionProblem

SPAN = tl.constexpr(64)
"""Rows, or keys, whose documents are looked at together."""

CHUNK = 2048
"""Documents that a program looks at together."""


@triton.jit(do_not_specialize=("n", "n_others", "ids_batch", "ids_row", "others_batch", "others_row"))
def spans_kernel(
    ids, ids_batch, ids_row, n, others, others_batch, others_row, n_others, spans,
    SPAN: tl.constexpr, CHUNK: tl.constexpr, IN_TURN: tl.constexpr,
):  # fmt: skip
    """Stores for each SPAN rows (or keys) their span: the range [begin, end) of keys (or rows) outside of which they see none,
    and 1 if each of them sees all of that range, else 0."""
    if IN_TURN:
        take_program_turn()
    number = (n + SPAN - 1) // SPAN
    batch = tl.program_id(0) // number
    row = tl.program_id(0) % number * SPAN + tl.arange(0, SPAN)
    own = tl.load(ids + batch.to(tl.int64) * ids_batch + tl.minimum(row, n - 1).to(tl.int64) * ids_row)
    least, most = tl.min(own, 0), tl.max(own, 0)
    begin, end, number_seen = n_others, 0, 0
    for first in tl.range(0, n_others, CHUNK):
        other = first + tl.arange(0, CHUNK)
        at = others + batch.to(tl.int64) * others_batch + other.to(tl.int64) * others_row
        of_other = tl.load(at, mask=other < n_others, other=0)
        seen = (other < n_others) & (of_other >= least) & (of_other <= most)
        begin = tl.minimum(begin, tl.min(tl.where(seen, other, n_others), 0))
        end = tl.maximum(end, tl.max(tl.where(seen, other + 1, 0), 0))
        number_seen += tl.sum(seen.to(tl.int32), 0)
    tl.store(spans + 3 * tl.program_id(0), begin)
    tl.store(spans + 3 * tl.program_id(0) + 1, end)
    tl.store(spans + 3 * tl.program_id(0) + 2, ((least == most) & (number_seen == end - begin)).to(tl.int32))


def span_buffers(problem: AttentionProblem, *names: str) -> dict[str, Buffer]:
    """Room for "row_spans" or "key_spans", where there are documents: int32 [batch, ceil(n / 64), 3]."""
    if problem.mask.documents is None:
        return {}
    lengths = problem.lengths
    numbers = {"row_spans": lengths.seqlen_q, "key_spans": lengths.seqlen_kv}
    return {name: Buffer((lengths.batch, triton.cdiv(numbers[name], SPAN.value), 3), torch.int32) for name in names}


def span_calls(tensors: Tensors, in_turn: bool = True) -> list[Call]:
    """The launches that fill the spans that there are. in_turn: see `common.dependent_launch`, which GPUs before Hopper
    cannot."""
    ids, others = tensors.document_q, tensors.document_kv
    wanted = (others, ids, tensors.key_spans), (ids, others, tensors.row_spans)
    return [_spans_call(*each, in_turn) for each in wanted if each[-1] is not None]


def _spans_call(ids: torch.Tensor, others: torch.Tensor, spans: torch.Tensor, in_turn: bool) -> Call:
    """The launch that fills spans. ids, others: int32 [batch, n], of any strides."""
    return Call(spans_kernel, (spans.shape[0] * spans.shape[1],), (), dict(
        ids=ids, ids_batch=ids.stride(0), ids_row=ids.stride(1), n=ids.shape[1],
        others=others, others_batch=others.stride(0), others_row=others.stride(1), n_others=others.shape[1],
        spans=spans, SPAN=SPAN.value, CHUNK=CHUNK, IN_TURN=in_turn, enable_fp_fusion=True,
        **({"launch_pdl": True} if in_turn else {}),
    ))  # fmt: skip
