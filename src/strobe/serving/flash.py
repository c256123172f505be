"""flash-attn's functions over a cache, with the arguments of FlashAttention-2, FlashAttention-3 and vLLM, in terms of `decode`
and `append`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from strobe.call.cached_calls import check_contents
from strobe.checks import check_tensor
from strobe.flash_arguments import NO_WINDOW, flash_mask, flash_score
from strobe.masks import Full, Mask
from strobe.scores import Score
from strobe.serving.api import append, decode
from strobe.serving.arguments import OF_8_BITS, check_cache, check_ints, check_rows, checked
from strobe.serving.cache import Cache, Rotary
from strobe.serving.flash_terms import (
    FlashCache,
    check_chunk,
    check_spread,
    check_totals,
    chunks,
    lengths_of,
    of_8_bits,
    of_latent,
    one_of,
    refuse,
    rows_of,
    spread_tree,
)
from strobe.serving.problem import describe

_HINTS = ("scheduler_metadata", "pack_gqa", "sm_margin", "fa_version")
"""Arguments of others that say how to schedule, which happens on the device here: they change nothing."""


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=NO_WINDOW, softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False, *, page_table=None, cu_seqlens_q=None,
    cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, qv=None, q_descale=None, k_descale=None, v_descale=None,
    attention_chunk=0, scheduler_metadata=None, pack_gqa=None, sm_margin=0, sinks=None, learnable_sink=None, s_aux=None,
    deterministic=False, out=None,
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

    num_splits=1 asks for bits that do not depend on the batch, as `deterministic=True` does; other numbers, scheduler_metadata,
    pack_gqa and sm_margin change nothing, as work is dealt out on the device.
    Returns out, or (out, softmax_lse), softmax_lse [batch, heads_q, seqlen_q] or [heads_q, total_q].
    """
    table = block_table if page_table is None else one_of("block_table", block_table, "page_table", page_table)
    sink = one_of("sinks", one_of("sinks", sinks, "learnable_sink", learnable_sink), "s_aux", s_aux)
    if not (type(q) is type(k_cache) is type(v_cache) is torch.Tensor) or q.is_nested or k_cache.is_nested or v_cache.is_nested:
        for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):  # which takes a microsecond
            check_tensor(name, x)
    if cu_seqlens_q is not None:
        check_tensor("cu_seqlens_q", cu_seqlens_q)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    lengths = lengths_of(cache_seqlens, k_cache, table, batch, k is not None)
    cache = FlashCache._of(k_cache, v_cache, lengths, table, cache_batch_idx, cache_leftpad, k_descale, v_descale)
    q, scaled = of_8_bits(q, q_descale, cache, out)
    mask, score = flash_mask(causal, window_size), flash_score(softcap, alibi_slopes, sink)
    if attention_chunk:
        check_chunk(attention_chunk, alibi_slopes)
    if (k is None) != (v is None):
        raise ValueError("k and v go together, got one of them")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin go together, got one of them")
    if k is None and not (rotary_cos is None and cu_seqlens_k_new is None and rotary_seqlens is None):
        raise ValueError("rotary_cos, cu_seqlens_k_new and rotary_seqlens go with k and v, which are appended, got none")
    if rotary_seqlens is not None:
        check_ints("rotary_seqlens", rotary_seqlens, k_cache, batch)
    if k is not None:
        rotary = None if rotary_cos is None else Rotary(rotary_cos, rotary_sin, bool(rotary_interleaved))
        own = mask is not None and (mask.left is not None or mask.right is not None)
        for name, x in (("k", k), ("v", v)):
            check_tensor(name, x)
        if k.dtype in OF_8_BITS and v.dtype in OF_8_BITS:  # they have been divided by the scales already
            k, v, cache = k.to(torch.bfloat16), v.to(torch.bfloat16), replace(cache, k_scale=None, v_scale=None)
        cache, turned = append(
            cache, k, v, q=None if rotary is None else q, rotary=rotary, cu_seqlens=cu_seqlens_k_new, cu_seqlens_q=cu_seqlens_q,
            positions=rotary_seqlens, one_position=not own,
        )  # fmt: skip
        q, scaled = q if turned is None else turned, scaled._with_lengths(cache.lengths)
    if qv is not None:
        q, scaled = of_latent("qv", q, qv, scaled)
    if attention_chunk:
        return _over_chunks(
            q, scaled, attention_chunk, mask, cu_seqlens_q, max_seqlen_q, out, bool(return_softmax_lse), score=score,
            scale=softmax_scale, deterministic=bool(deterministic) or num_splits == 1,
        )  # fmt: skip
    return decode(
        q, scaled, mask=Full() if mask is None else mask, score=score, scale=softmax_scale, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, out=out, return_lse=bool(return_softmax_lse),
        deterministic=bool(deterministic) or num_splits == 1,
    )  # fmt: skip


def _over_chunks(
    q: torch.Tensor, cache: Cache, chunk: int, mask: Mask | None, cu_seqlens_q: torch.Tensor | None, max_seqlen_q: int | None,
    out: torch.Tensor | None, return_lse: bool, *, score: Score | None, scale, deterministic: bool,
):  # fmt: skip
    """`decode` of each query over its own chunk of the keys, and what it returns."""
    operands, options = checked(q, cache, None, score, scale, cu_seqlens_q, max_seqlen_q, None, out)
    check_contents(describe(operands, options), operands)  # of the lengths that its user gave
    rows = rows_of(q, cache.lengths, cu_seqlens_q)
    found, lse = decode(
        q.reshape(-1, 1, *q.shape[-2:]), chunks(cache, rows, chunk, mask or Full()), mask=Full(), score=score, scale=scale,
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

    seqused_k: int32 [batch], how many keys each sequence has. s_aux and learnable_sink are one: [heads_q]. num_splits=1 asks
    for bits that do not depend on the batch. scheduler_metadata, fa_version and the like change nothing. Dropout and an output
    of 8 bits are refused. q_v, and q of 8 bits: as `qv` and q of `flash_attn_with_kvcache`.

    cp_world_size > 1: the keys of a sequence are spread over so many GPUs, in turn; k, v and seqused_k are this GPU's, and with
    return_softmax_lse=True the results of all of them are joined by `strobe.merge`. cp_tot_seqused_k: int32 [batch], how many
    keys each sequence has on all GPUs: with several queries and causal=True it and cp_rank say which of this GPU's last keys a
    query sees.
    """
    refuse(
        output_scale=output_scale, seqused_q=seqused_q, dropout_p=dropout_p or None,
        cu_seqlens_k=cu_seqlens_k, **{name: value for name, value in hints.items() if name not in _HINTS},
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
    mask, sink = flash_mask(causal, window_size), one_of("s_aux", s_aux, "learnable_sink", learnable_sink)
    tree = None
    if cp_world_size != 1 and causal and max_seqlen_q > 1:
        check_cache(cache)
        check_rows(q, cache.lengths.shape[0], cu_seqlens_q)
        check_ints("cp_tot_seqused_k", cp_tot_seqused_k, k, cache.lengths.shape[0])
        check_totals(cache.lengths, cp_tot_seqused_k, cp_world_size, cp_rank)
        tree = spread_tree(seqused_k, cu_seqlens_q, cp_tot_seqused_k, max_seqlen_q, cp_world_size, cp_rank)
        mask = None
    return decode(
        q, cache, mask=Full() if mask is None else mask, score=flash_score(softcap, alibi_slopes, sink), scale=softmax_scale,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, tree=tree, out=out, return_lse=bool(return_softmax_lse),
        deterministic=bool(deterministic) or num_splits == 1,
    )  # fmt: skip
