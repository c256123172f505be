"""flash-attn's functions over a cache, with the arguments of FlashAttention-2, FlashAttention-3 and vLLM, in terms of `decode`
and `append`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from strobe.arguments import integer
from strobe.checks import check_device, check_tensor
from strobe.flash_arguments import NO_WINDOW, flash_mask, flash_score
from strobe.masks import Full
from strobe.serving.api import append, decode
from strobe.serving.arguments import OF_8_BITS, check_cache, check_ints
from strobe.serving.cache import Cache, Rotary

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

    num_splits=1 asks for bits that do not depend on the batch, as `deterministic=True` does; other numbers, scheduler_metadata,
    pack_gqa and sm_margin change nothing, as work is dealt out on the device.
    Returns out, or (out, softmax_lse), softmax_lse [batch, heads_q, seqlen_q] or [heads_q, total_q].
    """
    _refuse(attention_chunk=attention_chunk or None)
    table = _one("block_table", block_table, "page_table", page_table)
    sink = _one("sinks", _one("sinks", sinks, "learnable_sink", learnable_sink), "s_aux", s_aux)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, x)
    if cu_seqlens_q is not None:
        check_tensor("cu_seqlens_q", cu_seqlens_q)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    lengths = _lengths(cache_seqlens, k_cache, table, batch, k is not None)
    cache = Cache._of(k_cache, v_cache, lengths, table, cache_batch_idx, cache_leftpad, k_descale, v_descale)
    q, scaled = _of_8_bits(q, q_descale, cache, out)
    mask = flash_mask(causal, window_size)
    if (k is None) != (v is None):
        raise ValueError("k and v go together, got one of them")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin go together, got one of them")
    if k is None and any(x is not None for x in (rotary_cos, cu_seqlens_k_new, rotary_seqlens)):
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
        q, scaled = _of_latent("qv", q, qv, scaled)
    return decode(
        q, scaled, mask=Full() if mask is None else mask, score=flash_score(softcap, alibi_slopes, sink), scale=softmax_scale,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, out=out, return_lse=bool(return_softmax_lse),
        deterministic=bool(deterministic) or num_splits == 1,
    )  # fmt: skip


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
    return_softmax_lse=True the results of all of them are joined by `strobe.merge`. It takes one query of each sequence, which
    sees all keys, so cp_rank and cp_tot_seqused_k change nothing.
    """
    _refuse(
        output_scale=output_scale, seqused_q=seqused_q, dropout_p=dropout_p or None,
        cu_seqlens_k=cu_seqlens_k, **{name: value for name, value in hints.items() if name not in _HINTS},
    )  # fmt: skip
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("seqused_k", seqused_k)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be an int32 tensor with a block_table, got {type(x).__name__}")
    if cp_world_size != 1:
        of_place = {"alibi_slopes": alibi_slopes, "s_aux": s_aux, "learnable_sink": learnable_sink}
        _check_spread(cp_world_size, cp_rank, max_seqlen_q, window_size, of_place)
    check_tensor("q", q)
    cache = Cache._of(k, v, seqused_k, block_table, k_scale=k_descale, v_scale=v_descale)
    q, cache = _of_8_bits(q, q_descale, cache, out)
    if q_v is not None:
        q, cache = _of_latent("q_v", q, q_v, cache)
    mask, sink = flash_mask(causal, window_size), _one("s_aux", s_aux, "learnable_sink", learnable_sink)
    return decode(
        q, cache, mask=Full() if mask is None else mask, score=flash_score(softcap, alibi_slopes, sink), scale=softmax_scale,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, out=out, return_lse=bool(return_softmax_lse),
        deterministic=bool(deterministic) or num_splits == 1,
    )  # fmt: skip


def _check_spread(cp_world_size, cp_rank, max_seqlen_q, window_size, of_place: dict) -> None:
    """ValueError for what cannot be computed of a GPU's own keys, without knowing where they stand or what the others have.
    of_place: such arguments, which must be None."""
    world = integer("cp_world_size must be an int", cp_world_size)
    if world < 1 or not 0 <= integer("cp_rank must be an int", cp_rank) < world:
        raise ValueError(f"cp_rank must be from 0 to cp_world_size - 1, got {cp_rank} of {cp_world_size}")
    if max_seqlen_q != 1:
        raise ValueError(f"max_seqlen_q must be 1 with cp_world_size={world}, got {max_seqlen_q}")
    if any(side is not None and side >= 0 for side in window_size or NO_WINDOW):
        raise ValueError(f"window_size is not taken with cp_world_size={world}, got {window_size}")
    for name, x in of_place.items():
        if x is not None:
            raise ValueError(f"{name} is not taken with cp_world_size={world}, got {_short(x)}")


def _of_8_bits(
    q: torch.Tensor, q_descale: torch.Tensor | None, cache: Cache, out: torch.Tensor | None
) -> tuple[torch.Tensor, Cache]:
    """q of 8 bits in 16, which hold it exactly, and a cache whose keys are multiplied by q's scale, too."""
    if q.dtype not in OF_8_BITS:
        if q_descale is not None:
            raise ValueError(f"q_descale goes with q of 8 bits, got one of {q.dtype}")
        return q, cache
    check_cache(cache)
    if cache.k.dtype not in OF_8_BITS:
        raise TypeError(f"q of 8 bits goes with a cache of 8 bits, got one of {cache.k.dtype}")
    q = q.to(torch.bfloat16 if out is None else out.dtype)
    if q_descale is None:
        return q, cache
    check_tensor("q_descale", q_descale)
    wanted = [cache.lengths.shape[0], cache.k.shape[2]]
    if q_descale.dtype != torch.float32 or list(q_descale.shape) != wanted:
        raise ValueError(f"q_descale must be float32 {wanted}, got {q_descale.dtype} {list(q_descale.shape)}")
    check_device("q_descale", q_descale, q)
    if cache.k_scale is None:
        return q, replace(cache, k_scale=q_descale)
    if cache.k_scale.dim() == 3:
        raise ValueError("q_descale goes with a k_descale of one number for all keys of a head, got one for each key")
    return q, replace(cache, k_scale=cache.k_scale * q_descale)


def _of_latent(name: str, q: torch.Tensor, qv: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, Cache]:
    """q and a cache of which v is the first columns of k, for queries qv of the values beside q of the keys: both lie in one
    tensor, whose first columns are the values."""
    check_tensor("q", q)
    check_tensor(name, qv)
    k, v = cache.k, cache.v
    assert v is not None
    if qv.shape != (*q.shape[:-1], v.shape[-1]) or qv.dtype != q.dtype:
        wanted = [*q.shape[:-1], v.shape[-1]]
        raise ValueError(f"{name} must have shape {wanted} and q's {q.dtype}, got {list(qv.shape)}, {qv.dtype}")
    if cache.k_scale is not None or cache.v_scale is not None:
        raise ValueError(f"k_descale and v_descale are not taken with {name}: leave them out")
    if not _are_neighbours(v, k):
        raise ValueError(f"{name} goes with v_cache and k_cache that are first and other columns of one tensor, got two")
    columns = v.shape[-1] + k.shape[-1]
    strides = [columns if size == 1 else stride for size, stride in zip(v.shape[:-1], v.stride()[:-1], strict=True)]
    latent = v.as_strided((*v.shape[:-1], columns), (*strides, 1))
    return torch.cat((qv, q), -1), replace(cache, k=latent, v=None, head_dim_v=v.shape[-1])


def _are_neighbours(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the columns of `right` follow those of `left` in memory."""
    if left.shape[:-1] != right.shape[:-1] or left.dtype != right.dtype or left.stride(-1) != 1 or right.stride(-1) != 1:
        return False
    if left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
        return False
    columns, sizes = left.shape[-1] + right.shape[-1], left.shape[:-1]
    strides = zip(sizes, left.stride(), right.stride(), strict=False)
    apart = all(size == 1 or (of_left == of_right and of_left >= columns) for size, of_left, of_right in strides)
    return apart and right.storage_offset() == left.storage_offset() + left.shape[-1]


def _one(name: str, x, other_name: str, other):
    """The one that is given of two arguments that mean the same."""
    if x is not None and other is not None:
        raise ValueError(f"{name} and {other_name} are one argument, got both")
    return other if x is None else x


def _refuse(**arguments) -> None:
    """ValueError for the first argument that is given: none of these is taken."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} is not taken over a cache, got {_short(value)}: leave it out")


def _short(value) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _lengths(cache_seqlens, k_cache, table, batch: int, appends: bool) -> torch.Tensor:
    """The lengths as a tensor, from one, an int for all, or None for all that there is room for."""
    if isinstance(cache_seqlens, torch.Tensor) and cache_seqlens.dim() > 0:
        return cache_seqlens
    if isinstance(cache_seqlens, torch.Tensor) and cache_seqlens.dtype == torch.int32:
        return cache_seqlens.repeat(batch)
    if cache_seqlens is None:
        if appends:
            raise ValueError("cache_seqlens must say where k and v are appended, got None")
        cache_seqlens = k_cache.shape[1] * (1 if table is None else table.shape[1])
    length = integer("cache_seqlens must be an int32 tensor or an int", cache_seqlens)
    return torch.full((batch,), length, dtype=torch.int32, device=k_cache.device)
