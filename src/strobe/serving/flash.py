"""flash-attn's functions over a cache, with the arguments of FlashAttention-2, FlashAttention-3 and vLLM, in terms of `decode`
and `append`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from strobe.call import cached_calls
from strobe.call.contents import check_contents
from strobe.checks import check_tensor
from strobe.flash_arguments import HINTS, NO_WINDOW, flash_mask, flash_score
from strobe.masks import Full, Mask
from strobe.scores import Score
from strobe.serving.api import append, decode
from strobe.serving.arguments import OF_8_BITS, check_cache, check_ints, check_rows, checked, checked_append
from strobe.serving.cache import Cache, Rotary
from strobe.serving.flash_terms import (
    FlashCache,
    check_chunk,
    check_spread,
    check_totals,
    chunks,
    descales_of_8_bits,
    lengths_between,
    lengths_of,
    of_8_bits,
    of_latent,
    one_of,
    refuse,
    rows_of,
    spread_tree,
)
from strobe.serving.problem import describe


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=NO_WINDOW, softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False, *, page_table=None, cu_seqlens_q=None,
    cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, qv=None, q_descale=None, k_descale=None, v_descale=None,
    attention_chunk=0, scheduler_metadata=None, pack_gqa=None, sm_margin=0, sinks=None, learnable_sink=None, s_aux=None,
    deterministic=False, out=None, ver=None, fa_version=None,
) -> Any:  # fmt: skip
    """flash-attn's function of this name, with the keywords of FlashAttention-3: attention over a cache, to which k and v are
    appended first, in place, turned by the rotary embedding (and q with them).

    q [batch, seqlen_q, heads_q, D], or [total_q, heads_q, D] with cu_seqlens_q. k_cache, v_cache [entries, size, heads_kv, D],
    or with a block_table (page_table is the same) pages of any size, [pages, page_size, heads_kv, D]. k, v: [batch, seqlen_new,
    heads_kv, D], or packed with cu_seqlens_k_new. cache_seqlens: int32 [batch], or an int for all, the lengths before k and v;
    None: the whole cache. causal=True with a rotary embedding gives each query the position after the one before, otherwise all
    have that of the first, as in flash-attn. sinks, learnable_sink and s_aux are one: [heads_q]. k_descale, v_descale: float32,
    of a cache of 8 bits, of any shape that `strobe.Cache` takes.

    qv: [..., heads_q, D of v], whose products with the values are added to the scores, as in multi-head latent attention:
    v_cache and k_cache are then the first and the other columns of one tensor. Without a softmax_scale it is 1 / sqrt of both
    head dims together.

    q may have 8 bits, with q_descale, float32 [batch, heads_kv], beside a cache of 8 bits: the result is bfloat16, or as `out`.
    k and v of 8 bits are written as they are, those of 16 divided by k_descale and v_descale.

    attention_chunk: keys are cut into chunks of so many, from the first one that counts on, and a query sees those of its own
    chunk alone. Each query is a request of its own then, so the keys of a chunk are read once for each query in it.

    num_splits=1 asks for bits that do not depend on the batch, as `deterministic=True` does, for which a block_table must be
    about as wide in each call (see `strobe.decode`); other numbers, scheduler_metadata, pack_gqa, sm_margin, ver and fa_version
    change nothing, as work is dealt out on the device. Nor do, as in FlashAttention-3, descales of what has 16 bits,
    cu_seqlens_k_new without k, and max_seqlen_q without cu_seqlens_q, which servers give.
    Returns out, or (out, softmax_lse), softmax_lse [batch, heads_q, seqlen_q] or [heads_q, total_q].
    """
    table = block_table if page_table is None else one_of("block_table", block_table, "page_table", page_table)
    sink = one_of("sinks", one_of("sinks", sinks, "learnable_sink", learnable_sink), "s_aux", s_aux)
    deterministic, return_lse = bool(deterministic) or num_splits == 1, bool(return_softmax_lse)
    if q_descale is not None or k_descale is not None or v_descale is not None:
        q_descale, k_descale, v_descale = descales_of_8_bits(q, k_cache, q_descale, k_descale, v_descale)
    if k is None:
        cu_seqlens_k_new = None
    if cu_seqlens_q is None:
        max_seqlen_q = None
    if not isinstance(cache_seqlens, torch.Tensor) or not cache_seqlens.dim():
        batch = _checked_batch(q, k_cache, v_cache, cu_seqlens_q)
        cache_seqlens = lengths_of(cache_seqlens, k_cache, table, batch, k is not None)
    tensors = (
        q, k_cache, v_cache, cache_seqlens, table, cache_batch_idx, cache_leftpad, cu_seqlens_q, alibi_slopes, sink, k_descale,
        v_descale, k, v, rotary_cos, rotary_sin, cu_seqlens_k_new, rotary_seqlens, out,
    )  # fmt: skip
    numbers = softmax_scale, bool(causal), softcap, max_seqlen_q, deterministic, return_lse, bool(rotary_interleaved)
    if q_descale is None and qv is None and not attention_chunk and not torch.compiler.is_compiling():
        found = cached_calls.attention(tensors, _key(numbers, window_size), _prepared, (tensors, numbers, window_size))
        if found is not None:
            return found if return_lse else found[0]
    of_append, of_decode = _own_terms(tensors, numbers, window_size, q_descale)
    q, cache, mask, score, *_ = of_decode
    if attention_chunk:
        check_chunk(attention_chunk, alibi_slopes)
    if of_append is not None:
        checked(*(of_decode[:2] if qv is None else of_latent("qv", q, qv, cache)), *of_decode[2:])  # ahead of what is written
        appended, k, v, q_to_turn, rotary, cu_new, cu_q, positions, one_position = of_append
        longer, turned = append(
            appended, k, v, q=q_to_turn, rotary=rotary, cu_seqlens=cu_new, cu_seqlens_q=cu_q, positions=positions,
            one_position=one_position,
        )  # fmt: skip
        q, cache = q if turned is None else turned, cache._with_lengths(longer.lengths)
    if qv is not None:
        q, cache = of_latent("qv", q, qv, cache)
    if attention_chunk:
        return _over_chunks(
            q, cache, attention_chunk, mask, cu_seqlens_q, max_seqlen_q, out, return_lse, score=score, scale=softmax_scale,
            deterministic=deterministic,
        )  # fmt: skip
    return decode(
        q, cache, mask=mask, score=score, scale=softmax_scale, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, out=out,
        return_lse=return_lse, deterministic=deterministic,
    )  # fmt: skip


_GIVEN = (
    "q", "k_cache", "v_cache", "lengths", "page_table", "entries", "leftpad", "cu_seqlens_q", "alibi", "sinks", "k_scale",
    "v_scale", "k", "v", "cos", "sin", "cu_seqlens", "positions", "out",
)  # fmt: skip
"""The tensors of `flash_attn_with_kvcache`, by the names of `cached_calls.prepared`."""

_FULL = Full()


def _key(numbers: tuple, window_size) -> tuple:
    """What calls with equal numbers and windows have in common, and no others. (1 and True are equal, and their types are
    not.)"""
    if window_size is None or window_size is NO_WINDOW:
        return *numbers, *map(type, numbers)
    of_window = (*window_size, *map(type, window_size)) if isinstance(window_size, (tuple, list)) else (window_size,)
    return *numbers, *map(type, numbers), *of_window


def _prepared(tensors: tuple, numbers: tuple, window_size) -> cached_calls.Known | None:
    of_append, of_decode = _own_terms(tensors, numbers, window_size)
    given = dict(zip(_GIVEN, tensors, strict=True))
    if of_append is None:
        return cached_calls.prepared(given, checked, of_decode)
    return cached_calls.prepared(given, checked, of_decode, checked_append, of_append)


def _own_terms(tensors: tuple, numbers: tuple, window_size, q_descale=None) -> tuple[tuple | None, tuple]:
    """The arguments of `checked_append`, None where nothing is appended, and those of `checked`, before the append."""
    (
        q, k_cache, v_cache, lengths, table, index, leftpad, cu_seqlens_q, alibi_slopes, sink, k_descale, v_descale, k, v,
        cos, sin, cu_seqlens_k_new, rotary_seqlens, out,
    ) = tensors  # fmt: skip
    softmax_scale, causal, softcap, max_seqlen_q, deterministic, return_lse, interleaved = numbers
    batch = _checked_batch(q, k_cache, v_cache, cu_seqlens_q)
    cache = FlashCache._of(k_cache, v_cache, lengths, table, index, leftpad, k_descale, v_descale)
    q, scaled = of_8_bits(q, q_descale, cache, out)
    mask, score = flash_mask(causal, window_size) or _FULL, flash_score(softcap, alibi_slopes, sink)
    if (k is None) != (v is None):
        raise ValueError("k and v go together, got one of them")
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin go together, got one of them")
    if k is None and not (cos is None and rotary_seqlens is None):
        raise ValueError("rotary_cos and rotary_seqlens go with k and v, which are appended, got none")
    if rotary_seqlens is not None:
        check_ints("rotary_seqlens", rotary_seqlens, k_cache, batch)
    of_append = None
    if k is not None:
        rotary = None if cos is None else Rotary(cos, sin, interleaved)
        for name, x in (("k", k), ("v", v)):
            check_tensor(name, x)
        if k.dtype in OF_8_BITS and v.dtype in OF_8_BITS:  # they have been divided by the scales already
            k, v, cache = k.to(torch.bfloat16), v.to(torch.bfloat16), replace(cache, k_scale=None, v_scale=None)
        one_position = mask.left is None and mask.right is None
        of_append = (
            cache, k, v, None if rotary is None else q, rotary, cu_seqlens_k_new, cu_seqlens_q, rotary_seqlens, one_position
        )  # fmt: skip
    return of_append, (
        q, scaled, mask, score, softmax_scale, cu_seqlens_q, max_seqlen_q, None, out, return_lse, deterministic
    )  # fmt: skip


def _checked_batch(q, k_cache, v_cache, cu_seqlens_q) -> int:
    """How many requests there are; TypeError if these are no tensors."""
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, x)
    if cu_seqlens_q is None:
        return q.shape[0]
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    return cu_seqlens_q.shape[0] - 1


def _over_chunks(
    q: torch.Tensor, cache: Cache, chunk: int, mask: Mask, cu_seqlens_q: torch.Tensor | None, max_seqlen_q: int | None,
    out: torch.Tensor | None, return_lse: bool, *, score: Score | None, scale, deterministic: bool,
):  # fmt: skip
    """`decode` of each query over its own chunk of the keys, and what it returns."""
    operands, options = checked(q, cache, None, score, scale, cu_seqlens_q, max_seqlen_q, None, out)
    check_contents(describe(operands, options), operands)  # of the lengths that its user gave
    rows = rows_of(q, cache.lengths, cu_seqlens_q)
    found, lse = decode(
        q.reshape(-1, 1, *q.shape[-2:]), chunks(cache, rows, chunk, mask), mask=_FULL, score=score, scale=scale,
        return_lse=True, deterministic=deterministic,
    )  # fmt: skip
    found = found.view(*q.shape[:-1], found.shape[-1])
    if out is not None:
        found = out.copy_(torch.where(rows.there.view(*q.shape[:-2], 1, 1), found, out))
    by_head = lse.view(q.shape[:-1]).transpose(-1, -2).contiguous()
    return (found, by_head) if return_lse else found


def varlen_over_pages(
    q, k, v, cu_seqlens_q, block_table, seqused_k, max_seqlen_q=None, *, softmax_scale=None, causal=False,
    window_size=NO_WINDOW, softcap=0.0, alibi_slopes=None, learnable_sink=None, s_aux=None, out=None, deterministic=False,
    return_softmax_lse=False, k_descale=None, v_descale=None, num_splits=0, cp_world_size=1, dropout_p=0.0, seqused_q=None,
    cu_seqlens_k=None, q_descale=None, q_v=None, output_scale=None, cp_rank=0, cp_tot_seqused_k=None, **hints,
):  # fmt: skip
    """flash_attn_varlen_func over pages, with vLLM's keywords: q [total_q, heads_q, D], k and v [pages, page_size, heads_kv,
    D].

    seqused_k: int32 [batch], how many keys each sequence has; without it, what lies between the bounds of cu_seqlens_k, int32
    [batch + 1], as flash-attn 2 is called. s_aux and learnable_sink are one: [heads_q]. num_splits=1 asks for bits that do not
    depend on the batch, for which a block_table must be about as wide in each call (see `strobe.decode`). scheduler_metadata,
    fa_version and the like change nothing, nor do descales of what has 16 bits. Dropout and an output of 8 bits are refused.
    q_v, and q of 8 bits: as `qv` and q of `flash_attn_with_kvcache`.

    cp_world_size > 1: the keys of a sequence are spread over so many GPUs, in turn; k, v and seqused_k are this GPU's, and with
    return_softmax_lse=True the results of all of them are joined by `strobe.merge`. cp_tot_seqused_k: int32 [batch], how many
    keys each sequence has on all GPUs: with several queries and causal=True it and cp_rank say which of this GPU's last keys a
    query sees.
    """
    sink, return_lse = one_of("s_aux", s_aux, "learnable_sink", learnable_sink), bool(return_softmax_lse)
    deterministic = bool(deterministic) or num_splits == 1
    if q_descale is not None or k_descale is not None or v_descale is not None:
        q_descale, k_descale, v_descale = descales_of_8_bits(q, k, q_descale, k_descale, v_descale)
    if seqused_k is None and cu_seqlens_k is not None:
        seqused_k = lengths_between(cu_seqlens_k, k)
    if (
        seqused_q is None and q_descale is None and q_v is None and output_scale is None
        and not dropout_p and cp_world_size == 1 and HINTS.issuperset(hints) and not torch.compiler.is_compiling()
    ):  # fmt: skip
        tensors = (q, k, v, seqused_k, block_table, cu_seqlens_q, alibi_slopes, sink, k_descale, v_descale, out)
        numbers = softmax_scale, bool(causal), softcap, max_seqlen_q, deterministic, return_lse
        found = cached_calls.attention(tensors, _key(numbers, window_size), _prepared_packed, (tensors, numbers, window_size))
        if found is not None:
            return found if return_lse else found[0]
    refuse(
        output_scale=output_scale, seqused_q=seqused_q, dropout_p=dropout_p or None,
        **{name: value for name, value in hints.items() if name not in HINTS},
    )  # fmt: skip
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("seqused_k", seqused_k)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be an int32 tensor with a block_table, got {type(x).__name__}")
    if cp_world_size != 1:
        of_place = {"alibi_slopes": alibi_slopes, "s_aux": s_aux, "learnable_sink": learnable_sink}
        check_spread(cp_world_size, cp_rank, max_seqlen_q, window_size, of_place)
    check_tensor("q", q)
    cache = FlashCache._of(k, v, seqused_k, block_table, k_scale=k_descale, v_scale=v_descale)
    q, cache = of_8_bits(q, q_descale, cache, out)
    if q_v is not None:
        q, cache = of_latent("q_v", q, q_v, cache)
    mask, tree = flash_mask(causal, window_size) or _FULL, None
    if cp_world_size != 1 and causal and max_seqlen_q > 1:
        check_cache(cache)
        check_rows(q, cache.lengths.shape[0], cu_seqlens_q)
        check_ints("cp_tot_seqused_k", cp_tot_seqused_k, k, cache.lengths.shape[0])
        check_totals(cache.lengths, cp_tot_seqused_k, cp_world_size, cp_rank)
        tree = spread_tree(seqused_k, cu_seqlens_q, cp_tot_seqused_k, max_seqlen_q, cp_world_size, cp_rank)
        mask = _FULL
    return decode(
        q, cache, mask=mask, score=flash_score(softcap, alibi_slopes, sink), scale=softmax_scale, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, tree=tree, out=out, return_lse=return_lse, deterministic=deterministic,
    )  # fmt: skip


_GIVEN_PACKED = (
    "q", "k_cache", "v_cache", "lengths", "page_table", "cu_seqlens_q", "alibi", "sinks", "k_scale", "v_scale", "out"
)  # fmt: skip


def _prepared_packed(tensors: tuple, numbers: tuple, window_size) -> cached_calls.Known | None:
    q, k, v, lengths, table, cu_seqlens_q, alibi_slopes, sink, k_descale, v_descale, out = tensors
    softmax_scale, causal, softcap, max_seqlen_q, deterministic, return_lse = numbers
    if cu_seqlens_q is None or lengths is None or q.dtype in OF_8_BITS:
        return None
    cache = FlashCache._of(k, v, lengths, table, k_scale=k_descale, v_scale=v_descale)
    mask, score = flash_mask(causal, window_size) or _FULL, flash_score(softcap, alibi_slopes, sink)
    of_decode = (q, cache, mask, score, softmax_scale, cu_seqlens_q, max_seqlen_q, None, out, return_lse, deterministic)
    return cached_calls.prepared(dict(zip(_GIVEN_PACKED, tensors, strict=True)), checked, of_decode)
