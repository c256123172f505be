"""Arguments of our forwards in Gluon that follow from the problem alone."""

import torch

from strobe.problem import AttentionProblem, Operands, Varlen

LOG2_E = 1.4426950408889634


def heads_at_once(problem: AttentionProblem, cache_bytes: int) -> int:
    """How many query heads come in a bundle (see `locate`): about as many as have K and V that fit in so much of the L2."""
    lengths = problem.lengths
    kv_bytes = max(1, lengths.seqlen_kv) * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return even_bundles(lengths.batch * problem.heads_q, problem.group * cache_bytes // kv_bytes)


def even_bundles(heads: int, fitting: int) -> int:
    """The size of bundles of about `fitting` heads that are as equal as can be.

    A last bundle of few heads begins its longest tiles when nothing else is left to do beside them: with 3, 3, 3, 3, 3 and 1 of
    16 heads (forward, head dim 256, causal, 8k) the multiprocessors are busy for 86 % of the time, with 2 a bundle for 99.6
    %."""
    fitting = max(1, min(heads, fitting))
    most = min(heads, fitting * 5 // 4)
    return min(range((fitting + 1) // 2, most + 1), key=lambda size: (-heads % size, -size), default=1)


def meta_operands(problem: AttentionProblem) -> Operands:
    """Operands without data, to compile for."""
    lengths = problem.lengths
    cu = None
    if isinstance(lengths, Varlen):
        rows_q, rows_kv = [lengths.total_q], [lengths.total_kv]
        cu = meta(lengths.batch + 1, dtype=torch.int32)
    else:
        rows_q, rows_kv = [lengths.batch, lengths.seqlen_q], [lengths.batch, lengths.seqlen_kv]
    return Operands(
        meta(*rows_q, problem.heads_q, problem.head_dim, dtype=problem.dtype),
        meta(*rows_kv, problem.heads_kv, problem.head_dim, dtype=problem.dtype),
        meta(*rows_kv, problem.heads_kv, problem.head_dim_v, dtype=problem.dtype),
        cu,
        cu,
        seed=meta(1, dtype=torch.int64) if problem.dropout else None,
    )


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
