"""What flash-attn's functions over a cache say and `decode` has no word for, in words that it has."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from strobe.arguments import integer
from strobe.call.contents import are_checked, check_rule
from strobe.checks import check_device, check_tensor
from strobe.flash_arguments import HINTS, NO_WINDOW
from strobe.masks import Mask
from strobe.serving.arguments import OF_8_BITS, check_cache, check_cu
from strobe.serving.cache import Cache, Names


class FlashCache(Cache):
    """A cache whose tensors have flash-attn's names where an error speaks of them."""

    names = Names(
        "k_cache", "v_cache", "cache_seqlens", "block_table (or page_table)", "cache_batch_idx", "cache_leftpad", "k_descale",
        "v_descale", "cu_seqlens_k_new", "rotary_cos", "rotary_sin",
    )  # fmt: skip


def lengths_of(cache_seqlens, k_cache, table, batch: int, appends: bool) -> torch.Tensor:
    """The lengths as a tensor of their own, from a tensor of one, an int for all, or None for all that there is room for."""
    if isinstance(cache_seqlens, torch.Tensor) and cache_seqlens.dtype == torch.int32:
        return cache_seqlens.repeat(batch)
    if cache_seqlens is None:
        if appends:
            raise ValueError("cache_seqlens must say where k and v are appended, got None")
        cache_seqlens = k_cache.shape[1] * (1 if table is None else table.shape[1])
    length = integer("cache_seqlens must be an int32 tensor or an int", cache_seqlens)
    return torch.full((batch,), length, dtype=torch.int32, device=k_cache.device)


def lengths_between(cu_seqlens_k, k: torch.Tensor) -> torch.Tensor:
    """The lengths of sequences whose bounds are given, a new tensor."""
    check_tensor("k", k)
    check_tensor("cu_seqlens_k", cu_seqlens_k)
    check_cu("cu_seqlens_k", cu_seqlens_k, k, max(cu_seqlens_k.numel() - 1, 0))
    return cu_seqlens_k.diff()


# ---- queries of 8 bits, and of values


def descales_of_8_bits(q, k_cache, q_descale, k_descale, v_descale) -> tuple:
    """The descales of what has 8 bits, and None in place of the others."""
    of_q, of_cache = (getattr(x, "dtype", None) in OF_8_BITS for x in (q, k_cache))
    return q_descale if of_q else None, k_descale if of_cache else None, v_descale if of_cache else None


def of_8_bits(
    q: torch.Tensor, q_descale: torch.Tensor | None, cache: Cache, out: torch.Tensor | None
) -> tuple[torch.Tensor, Cache]:
    """q of 8 bits in 16, which hold it exactly, and a cache whose keys are multiplied by q's scale, too."""
    if q.dtype not in OF_8_BITS:
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


def of_latent(name: str, q: torch.Tensor, qv: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, Cache]:
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


# ---- masks of positions


def spread_tree(
    lengths: torch.Tensor, cu_seqlens_q: torch.Tensor, total: torch.Tensor, max_q: int, world: int, rank: int
) -> torch.Tensor:
    """What a causal mask leaves of a GPU's own keys, as a tree [batch, max_q, max_q], where key t of `rank` is number
    t * world + rank of its sequence. lengths: int32 [batch], keys of this GPU; total: of all GPUs.

    The last n of a GPU's keys are the only ones that one of n queries may not see: those before them stand ahead of all."""
    queries = cu_seqlens_q.diff()[:, None]
    i = torch.arange(max_q, device=lengths.device)
    of_queries = total[:, None] - queries + i
    of_keys = (lengths[:, None] - queries + i) * world + rank
    return of_keys[:, None, :] <= of_queries[:, :, None]


class Rows(NamedTuple):
    """Each query as a request of its own: row r is one of request `request[r]`, and stands at key `position[r]` of it. there:
    whether a request has the row."""

    request: torch.Tensor
    position: torch.Tensor
    there: torch.Tensor


def rows_of(q: torch.Tensor, lengths: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> Rows:
    """The rows of dense q [batch, n, heads, head_dim], or of packed q."""
    batch = lengths.shape[0]
    if cu_seqlens_q is None:
        n = q.shape[1]
        request = torch.arange(batch, device=q.device).repeat_interleave(n)
        back = n - torch.arange(n, device=q.device).repeat(batch)
        return Rows(request, lengths[request] - back, torch.ones_like(request, dtype=torch.bool))
    row = torch.arange(q.shape[0], device=q.device)
    found = torch.searchsorted(cu_seqlens_q[1:].long(), row, right=True)
    request = found.clamp(max=batch - 1)
    return Rows(request, lengths[request] - cu_seqlens_q[1:][request] + row, found < batch)


def chunks(cache: Cache, rows: Rows, chunk: int, mask: Mask) -> Cache:
    """The cache of each row's own chunk: keys are cut into chunks of so many, from the first one that counts on, and a row sees
    those of the chunk in which it stands that the mask shows."""
    first = torch.zeros_like(rows.position) if cache.leftpad is None else cache.leftpad[rows.request]
    chunk_begin = first + torch.div(rows.position - first, chunk, rounding_mode="floor") * chunk
    begin, end = torch.maximum(chunk_begin, first), torch.minimum(chunk_begin + chunk, cache.lengths[rows.request])
    if mask.left is not None:
        begin = torch.maximum(begin, rows.position - mask.left)
    if mask.right is not None:
        end = torch.minimum(end, rows.position + mask.right + 1)
    end, index = torch.where(rows.there, end, 0).clamp(min=0), cache.index
    if index is None and cache.page_table is None:
        index = torch.arange(len(cache.lengths), dtype=torch.int32, device=rows.request.device)

    def of_rows(x: torch.Tensor | None, dims: int = 1) -> torch.Tensor | None:
        return x[rows.request] if x is not None and x.dim() == dims else x

    return replace(
        cache, lengths=end.int(), leftpad=torch.minimum(begin.clamp(min=0), end).int(), index=of_rows(index),
        page_table=of_rows(cache.page_table, 2), k_scale=of_rows(cache.k_scale, 2), v_scale=of_rows(cache.v_scale, 2),
    )  # fmt: skip


# ---- what is refused


def check_spread(cp_world_size, cp_rank, max_seqlen_q, window_size, of_place: dict) -> None:
    """ValueError for what cannot be computed of a GPU's own keys, without knowing what the others have. of_place: such
    arguments, which must be None."""
    world = integer("cp_world_size must be an int", cp_world_size)
    if world < 1 or not 0 <= integer("cp_rank must be an int", cp_rank) < world:
        raise ValueError(f"cp_rank must be from 0 to cp_world_size - 1, got {cp_rank} of {cp_world_size}")
    if integer("max_seqlen_q must be an int with cp_world_size", max_seqlen_q) < 1:
        raise ValueError(f"max_seqlen_q must be at least 1 with cp_world_size={world}, got {max_seqlen_q}")
    if any(side is not None and side >= 0 for side in window_size or NO_WINDOW):
        raise ValueError(f"window_size is not taken with cp_world_size={world}, got {window_size}")
    for name, x in of_place.items():
        if x is not None:
            raise ValueError(f"{name} is not taken with cp_world_size={world}, got {short(x)}")


def check_totals(lengths: torch.Tensor, total: torch.Tensor, world: int, rank: int) -> None:
    """Check, where numbers are checked, that a GPU of rank `rank` has its share of all keys."""
    if are_checked(total):
        share = (total - rank + world - 1).div(world, rounding_mode="floor").clamp(min=0)
        rule = f"be so many that {world} GPUs have them in turn and seqused_k are those of number {rank}"
        check_rule("cp_tot_seqused_k", total, (share == lengths).all(), rule)


def check_chunk(chunk, alibi_slopes) -> None:
    """TypeError or ValueError for keys that cannot be cut so. (Slopes count from a request's last key, which a chunk may end
    before.)"""
    if integer("attention_chunk must be an int", chunk) < 1:
        raise ValueError(f"attention_chunk must be 0 (no chunks) or more, got {chunk}")
    if alibi_slopes is not None:
        raise ValueError("alibi_slopes are not taken with attention_chunk, got both")


def one_of(name: str, x, other_name: str, other):
    """The one that is given of two arguments that mean the same."""
    if x is not None and other is not None:
        raise ValueError(f"{name} and {other_name} are one argument, got both")
    return other if x is None else x


def sink_without_pages(
    q, learnable_sink, s_aux=None, num_splits=0, q_descale=None, k_descale=None, v_descale=None, cp_world_size=1, cp_rank=0,
    **others,
):  # fmt: skip
    """The sinks of a call of flash_attn_varlen_func without pages, with vLLM's keywords; ValueError if these ask for anything
    else."""
    if getattr(q, "dtype", None) in OF_8_BITS:
        others |= {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if cp_world_size != 1:
        others["cp_world_size"] = cp_world_size
    asked = [name for name, value in others.items() if value is not None and name not in HINTS]
    if asked:
        raise ValueError(f"{', '.join(asked)} must be left out without a block_table")
    return one_of("s_aux", s_aux, "learnable_sink", learnable_sink)


def refuse(**arguments) -> None:
    """ValueError for the first argument that is given: none of these is taken."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} is not taken over a cache, got {short(value)}: leave it out")


def short(value) -> str:
    """A value in an error's sentence."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
