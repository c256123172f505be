"""Arguments of our forwards in Gluon that follow from the problem alone."""

import torch

from strobe.problem import AttentionProblem, Operands, Varlen

LOG2_E = 1.4426950408889634


def heads_at_once(problem: AttentionProblem, cache_bytes: int) -> int:
    """How many query heads' K and V fit in so much of the L2 together (see `locate`)."""
    lengths = problem.lengths
    kv_bytes = max(1, lengths.seqlen_kv) * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return max(1, min(lengths.batch * problem.heads_q, problem.group * cache_bytes // kv_bytes))


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
    )


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
