"""Arguments of our forwards in Gluon that follow from the problem alone."""

from strobe.problem import AttentionProblem, Varlen

MOST_HEADS, MOST_LAST = 16, 64
"""Key heads of a bundle, and of the last one, at most. The first tiles of a bundle read K and V from memory,
the others find them in the L2 cache: in large bundles all CTAs read at once, and then none, in small ones some read while
others compute. Forward, S = 512, causal, head dims 64, 96, 128, 256, as many as fit / 16: 134 / 128, 131 / 118, 116 / 104,
111 / 101 us."""


def bundles_of_heads(problem: AttentionProblem, cache_bytes: int, tile_heads: int = 1) -> tuple[int, int]:
    """`bundles` of query heads that have K and V of about so many bytes of the L2 cache. tile_heads: how many share a tile, and
    count as one."""
    lengths, group = problem.lengths, -(-problem.group // tile_heads)
    kv_bytes = max(1, lengths.seqlen_kv) * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return bundles(lengths.batch * problem.heads_kv * group, group * cache_bytes // kv_bytes, group)


def bundles(heads: int, fitting: int, group: int = 1, least: int = 1) -> tuple[int, int]:
    """How many heads come in a bundle (see `work.locate`), of which about `fitting` fit the L2 cache, and the head from which
    on all are in the last one. group: heads that share K and V; least: heads of the last bundle, whether they fit or not.

    Powers of two, as causal heads of 2^n tiles leave little over on 132 multiprocessors: by arithmetic these are busy for 98 %
    of the time with 5 heads, for all of it with 4 (forward, head dims (192, 128), S = 8k; backward, 4k: 96 %, more than 99).
    The last bundle has what is left over, and may be larger, since its short tiles fill the end, when no others are left to
    begin: 93 % with 16 heads in it, 97 % with 64 (forward, head dim 256, causal, S = 512)."""
    fitting = 1 << max(0, (fitting * 5 // 4).bit_length() - 1)
    at_once = min(heads, fitting, group * MOST_HEADS)
    last = max(min(fitting, group * MOST_LAST), least)
    return at_once, max(0, heads - last) // at_once * at_once


def totals(problem: AttentionProblem) -> tuple[int, int] | tuple[None, None]:
    """Rows of q, and of k and v, that packed sequences have together; None where nothing is packed."""
    lengths = problem.lengths
    return (lengths.total_q, lengths.total_kv) if isinstance(lengths, Varlen) else (None, None)
