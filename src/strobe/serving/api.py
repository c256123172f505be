"""Attention over a cache in Strobe's own vocabulary: `decode`, `append`, `merge`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch

from strobe.call import cached_calls
from strobe.masks import Mask
from strobe.scores import Score
from strobe.serving.arguments import checked, checked_append, checked_parts
from strobe.serving.cache import Cache, Rotary


@overload
def decode(
    q: torch.Tensor, cache: Cache, *, mask: Mask | None = None, score: Score | None = None, scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, tree: torch.Tensor | None = None,
    out: torch.Tensor | None = None, return_lse: Literal[False] = False, deterministic: bool = False,
    backend: str | None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def decode(
    q: torch.Tensor, cache: Cache, *, mask: Mask | None = None, score: Score | None = None, scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, tree: torch.Tensor | None = None,
    out: torch.Tensor | None = None, return_lse: Literal[True], deterministic: bool = False, backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def decode(
    q: torch.Tensor, cache: Cache, *, mask: Mask | None = None, score: Score | None = None, scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None, max_seqlen_q: int | None = None, tree: torch.Tensor | None = None,
    out: torch.Tensor | None = None, return_lse: bool, deterministic: bool = False, backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def decode(
    q: torch.Tensor,
    cache: Cache,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    tree: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of the newest queries of each request over the keys that a cache holds for it, without a gradient.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim], or [total_q, heads_q, head_dim] with cu_seqlens_q. float16, bfloat16, float32
            (float64 on a CPU). Its last query stands on the last key of its request.
        cache: keys, values, lengths, pages (see `strobe.Cache`); heads_q is a multiple of its heads.
        mask: Causal() (the default), Full(), Window(...), or two of them joined by `&`.
        score: Score(softcap=..., alibi=..., sinks=...).
        scale: default 1 / sqrt(head_dim).
        cu_seqlens_q: int32 [batch + 1]: the bounds of each request's queries, where they are packed.
        max_seqlen_q: the most queries of a request, with cu_seqlens_q; default: total_q.
        tree: bool [n, n] or [batch, n, n], n at least the most queries: whether query i sees the key of query j, beside what
            the mask says. All keys ahead of the queries' own are seen.
        out: where to write the result, [..., heads_q, head_dim of v] of q's dtype. Packed rows of no request stay as they are.
        return_lse: also return log(sum(exp(scores))), float32, [batch, heads_q, seqlen_q] or [heads_q, total_q].
        deterministic: a request's bits do not depend on what else is in the batch, nor on how many queries come at once. On a
            GPU they depend on the room that the cache has for a request, as the power of two that holds it: in each call the
            page_table has to be about as wide, and not cut to the longest request at hand.
        backend: "sm90_cache", "decode" or "cached_cpu", to run that one or fail; None lets Strobe choose (see
            `strobe.explain`).

    Returns:
        out, or (out, lse). A row that sees no key gives 0 and an LSE of -inf, or of its sink.

    Raises:
        ValueError, TypeError: naming the argument, before any launch. On a CPU also for lengths and page numbers that cannot
            be; a GPU does that with STROBE_DEBUG=1, and otherwise takes a length as at most what there is room for, and a page
            that is not there as one without keys.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"cache must be a strobe.Cache, got {type(cache).__name__}")
    of_mask, of_score, alibi, sinks = _numbers_of(mask, score)
    tensors = (
        q, cache.k, cache.v, cache.lengths, cache.page_table, cache.index, cache.leftpad, cu_seqlens_q, tree, alibi, sinks,
        cache.k_scale, cache.v_scale, out,
    )  # fmt: skip
    numbers = (
        of_mask, of_score, scale, type(scale), max_seqlen_q, type(max_seqlen_q), return_lse, deterministic, type(deterministic),
        backend, cache.head_dim_v,
    )  # fmt: skip
    call = (q, cache, mask, score, scale, cu_seqlens_q, max_seqlen_q, tree, out, return_lse, deterministic, backend)
    found, lse = cached_calls.decode(tensors, numbers, checked, call)
    return (found, lse) if return_lse and lse is not None else found


def _numbers_of(mask, score) -> tuple[object, object, torch.Tensor | None, torch.Tensor | None]:
    """What calls with equal masks and scores have in common, and the score's tensors. Whatever is no mask and no score is
    refused by name later."""
    of_mask: object = mask
    if isinstance(mask, Mask):
        of_mask = mask.left, mask.right, mask.prefix, mask.by_pair
    if isinstance(score, Score):
        return of_mask, (score.softcap, score.bias is None, score.function), score.alibi, score.sinks
    return of_mask, score, None, None


def append(
    cache: Cache,
    k: torch.Tensor,
    v: torch.Tensor | None = None,
    *,
    q: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    one_position: bool = False,
) -> tuple[Cache, torch.Tensor | None]:
    """Write new keys and values behind those of each request, in place, turned by a rotary embedding if one is given.

    Args:
        cache: the tensors are written to, the lengths stay as they are. Its scales are one number for all keys of a head.
        k, v: [batch, n, heads_kv, head_dim], or [total, heads_kv, head_dim] with cu_seqlens, of the cache's dtype (16 or 32
            bits for a cache of 8). v=None where the values are columns of k.
        q: queries to turn as well, [batch, seqlen_q, heads_q, head_dim] or packed with cu_seqlens_q; with a rotary embedding.
        rotary: turns keys (and q) by their positions. Key i of request b has position positions[b] + i.
        positions: int32 [batch]; default: the cache's lengths.
        one_position: all queries of a request have the position of the first.

    Returns:
        The cache with its new lengths, a new tensor, and q turned, a new tensor, or None.

    Raises:
        ValueError, TypeError: naming the argument, before anything is written. On a CPU also for keys that have no place (no
            room, a page that is not there) and positions beyond the embedding; a GPU says so with STROBE_DEBUG=1, and otherwise
            writes no such key, ends lengths where there is no more room, and takes such a position as the last.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"cache must be a strobe.Cache, got {type(cache).__name__}")
    cos, sin, interleaved = rotary if isinstance(rotary, Rotary) else (None, None, False)  # anything else is refused by name
    leftpad = cache.leftpad  # of which nothing but its check depends
    of_leftpad = None if leftpad is None else (type(leftpad), getattr(leftpad, "shape", None), getattr(leftpad, "dtype", None))
    tensors = (
        cache.k, cache.v, k, v, cache.lengths, cache.page_table, cache.index, cu_seqlens, q, cu_seqlens_q, cos, sin, positions,
        cache.k_scale, cache.v_scale,
    )  # fmt: skip
    numbers = type(rotary), bool(interleaved), bool(one_position), cache.head_dim_v, of_leftpad
    call = (cache, k, v, q, rotary, cu_seqlens, cu_seqlens_q, positions, one_position)
    lengths, turned = cached_calls.append(tensors, numbers, checked_append, call)
    return cache._with_lengths(lengths), turned


def merge(
    outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys, from attention over parts of them: of a shared prefix and the rest, say, or of the keys on
    several GPUs.

    Args:
        outs: for each part its out, [batch, n, heads, head_dim] or [total, heads, head_dim], as a sequence or a stacked tensor.
        lses: for each part its LSE, [batch, heads, n] or [heads, total], float32.

    Returns:
        (out, lse), shaped as those of a part, out in its dtype. A part with an LSE of -inf counts for nothing, whatever its out
        holds; with nothing but such parts a row gives 0 and -inf.

    Raises:
        ValueError, TypeError: for parts that do not fit each other.
    """
    return cached_calls.merge(*checked_parts(outs, lses))
