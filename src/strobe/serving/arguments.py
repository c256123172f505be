"""Checks of what users give to `decode` and `append`: before anything is launched, one sentence each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strobe.arguments import check_scale, integer, wants_gradient
from strobe.call import dispatch
from strobe.checks import check_device, check_tensor
from strobe.masks import Causal, Mask
from strobe.scores import Score
from strobe.serving.cache import Cache, Rotary
from strobe.serving.problem import AppendOperands, AppendOptions, DecodeOperands, DecodeOptions

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
OF_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
MOST_COLUMNS = 576


def checked(
    q, cache, mask=None, score=None, scale=None, cu_seqlens_q=None, max_seqlen_q=None, tree=None, out=None, return_lse=False,
    deterministic=False, backend=None,
) -> tuple[DecodeOperands, DecodeOptions]:  # fmt: skip
    """The checked operands and options of a call of `decode`."""
    mask, score = Causal() if mask is None else mask, Score() if score is None else score
    _check_vocabulary(cache, mask, score, deterministic)
    check_cache(cache)
    batch = cache.lengths.shape[0]
    check_rows(q, batch, cu_seqlens_q)
    _check_q(q, cache)
    max_q = _max_q(q, cu_seqlens_q, max_seqlen_q)
    score.check(q, cache.k, batch, cu_seqlens_q is not None)
    operands = DecodeOperands(
        q, cache.k, cache.k if cache.v is None else cache.v, cache.lengths, cache.page_table, cache.index, cache.leftpad,
        cu_seqlens_q, _checked_tree(tree, q, batch, max_q), score.alibi, score.sinks, per_request(cache.k_scale, cache),
        per_request(cache.v_scale, cache), out,
    )  # fmt: skip
    columns = values_columns(cache)
    options = DecodeOptions(
        max_q, columns, cache.v is None, check_scale(scale, q.shape[-1]), mask.left, mask.right, score.softcap,
        bool(return_lse), deterministic, _checked_backend(backend),
    )  # fmt: skip
    if out is not None:
        check_out(out, q, columns)
    return operands, options


def _checked_backend(backend: str | None) -> str | None:
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be one of {', '.join(dispatch.OF_CACHES)} or None, got {type(backend).__name__}")
    if backend is not None and backend not in dispatch.OF_CACHES:
        raise ValueError(f"backend must be one of {', '.join(dispatch.OF_CACHES)} or None, got {backend!r}")
    return backend


def _check_vocabulary(cache, mask, score, deterministic) -> None:
    if not isinstance(cache, Cache):
        raise TypeError(f"cache must be a strobe.Cache, got {type(cache).__name__}")
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a strobe mask such as Causal(), got {type(mask).__name__}")
    if mask.prefix is not None or mask.by_pair:
        raise ValueError(f"mask must be Full, Causal or Window over a cache (a tree beside it), got {mask}")
    if not isinstance(score, Score):
        raise TypeError(f"score must be a strobe.Score, got {type(score).__name__}")
    if score.bias is not None or score.function is not None:
        raise ValueError(f"score must be softcap, ALiBi and sinks over a cache, got {score}")
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be True or False, got {type(deterministic).__name__}")


def check_cache(cache: Cache) -> None:
    """TypeError or ValueError if the tensors of a cache do not fit each other."""
    k, names = cache.k, cache.names
    for name, x in ((names.k, k), (names.v, cache.v)):
        if x is None:
            continue
        check_tensor(name, x)
        if x.dim() != 4:
            layout = "[entries, size, heads, head_dim]" if cache.page_table is None else "[pages, page_size, heads, head_dim]"
            raise ValueError(f"{name} must have shape {layout}, got {list(x.shape)}")
        if x.dtype not in (*DTYPES, *OF_8_BITS):
            raise TypeError(f"{name} must be float16, bfloat16, float32, float64, float8_e4m3fn or float8_e5m2, got {x.dtype}")
        if x.dtype != k.dtype:
            raise TypeError(f"{name} must have {names.k}'s dtype {k.dtype}, got {x.dtype}")
        if x.shape[:3] != k.shape[:3]:
            raise ValueError(
                f"{name} must have {names.k}'s shape but for the head dim, got {list(x.shape)} for {list(k.shape)}"
            )
        if x.shape[3] % 8 or not 8 <= x.shape[3] <= MOST_COLUMNS:
            raise ValueError(f"{name}: head dim must be a multiple of 8 from 8 to {MOST_COLUMNS}, got {x.shape[3]}")
        if x.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dim (stride 1), got stride {x.stride(-1)}")
        check_device(name, x, k)
    if k.shape[2] < 1:
        raise ValueError(f"{names.k} must have at least one head, got {list(k.shape)}")
    check_ints(names.lengths, cache.lengths, k, None)
    batch = cache.lengths.shape[0]
    for name, x in ((names.index, cache.index), (names.leftpad, cache.leftpad)):
        if x is not None:
            check_ints(name, x, k, batch)
    table = cache.page_table
    if table is None:
        if k.shape[0] < batch and cache.index is None:
            raise ValueError(
                f"{names.k} must have an entry for each of {batch} requests, got {k.shape[0]}: or pass {names.index}"
            )
    else:
        _check_table(names.page_table, table, k, batch)
        if cache.index is not None:
            raise ValueError(f"{names.index} goes with a contiguous cache: with a page table, give that its rows in order")
        if k.shape[1] < 1:
            raise ValueError(f"{names.k} must have pages of at least one key, got {list(k.shape)}")
    for name, x in ((names.k_scale, cache.k_scale), (names.v_scale, cache.v_scale)):
        if x is not None:
            _check_scales(name, x, cache)
    if cache.v is not None and cache.head_dim_v is not None:
        raise ValueError("cache: head_dim_v says which columns of k are the values, so it goes with v=None")
    if cache.v is None:
        wanted = integer("cache: head_dim_v must be an int where v is None", cache.head_dim_v)
        if wanted % 8 or not 8 <= wanted <= k.shape[3]:
            raise ValueError(f"cache: head_dim_v must be a multiple of 8 from 8 to k's {k.shape[3]}, got {wanted}")


def values_columns(cache: Cache) -> int:
    """The head dim of the values of a cache that is checked."""
    return int(cache.head_dim_v or 0) if cache.v is None else cache.v.shape[3]


def check_ints(name: str, x, k: torch.Tensor, batch: int | None) -> None:
    """TypeError or ValueError if x is not int32 [batch], of any batch if it is None."""
    check_tensor(name, x)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {x.dtype}")
    if x.dim() != 1 or not x.is_contiguous() or (batch is not None and x.shape[0] != batch):
        raise ValueError(f"{name} must be contiguous with shape [{'batch' if batch is None else batch}], got {list(x.shape)}")
    check_device(name, x, k)


def _check_table(name: str, table, k: torch.Tensor, batch: int) -> None:
    check_tensor(name, table)
    if table.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {table.dtype}")
    if table.dim() != 2 or table.shape[0] != batch or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(f"{name} must have shape [{batch}, pages of a request] and contiguous rows, got {list(table.shape)}")
    check_device(name, table, k)


def _check_scales(name: str, x, cache: Cache) -> None:
    check_tensor(name, x)
    if x.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {x.dtype}")
    if cache.k.dtype not in OF_8_BITS:
        raise ValueError(f"{name} goes with a cache of 8 bits, got one of {cache.k.dtype}")
    heads, batch = cache.k.shape[2], cache.lengths.shape[0]
    allowed = [[], [1], [heads], [batch, heads], list(cache.k.shape[:3])]
    if list(x.shape) not in allowed:
        raise ValueError(f"{name} must have shape [], [{heads}], [{batch}, {heads}] or {allowed[-1]}, got {list(x.shape)}")
    check_device(name, x, cache.k)


def per_request(scale: torch.Tensor | None, cache: Cache) -> torch.Tensor | None:
    """Scales as [batch, heads_kv], a view, where there is not one for each key."""
    if scale is None or scale.dim() == 3:
        return scale
    return scale.expand(cache.lengths.shape[0], cache.k.shape[2])


def _check_q(q, cache: Cache) -> None:
    name = cache.names.k
    if q.dtype not in DTYPES:
        raise TypeError(f"q must be float16, bfloat16, float32 or float64, got {q.dtype}")
    if cache.k.dtype not in (q.dtype, *OF_8_BITS):
        raise TypeError(f"{name} must have q's dtype {q.dtype}, or 8 bits, got {cache.k.dtype}")
    if q.shape[-1] != cache.k.shape[3]:
        raise ValueError(f"{name} must have q's head dim {q.shape[-1]}, got {cache.k.shape[3]}")
    if q.stride(-1) != 1:
        raise ValueError(f"q must be contiguous in its last dim (stride 1), got stride {q.stride(-1)}")
    check_device(name, cache.k, q)
    if q.shape[-2] < 1 or q.shape[-2] % cache.k.shape[2]:
        raise ValueError(f"q's heads must be a multiple of {name}'s, got {q.shape[-2]} and {cache.k.shape[2]}")
    if wants_gradient(q, cache.k, cache.v):
        raise ValueError("q and the cache must not require a gradient, which decode has not: call it under torch.no_grad()")


def check_rows(q, batch: int, cu_seqlens_q) -> None:
    """TypeError or ValueError if q has not the rows of so many requests."""
    check_tensor("q", q)
    if cu_seqlens_q is None:
        if q.dim() != 4 or q.shape[0] != batch:
            raise ValueError(f"q must have shape [{batch}, seqlen, heads, head_dim], got {list(q.shape)}")
        return
    check_cu("cu_seqlens_q", cu_seqlens_q, q, batch)
    if q.dim() != 3:
        raise ValueError(f"q must have shape [total, heads, head_dim] with cu_seqlens_q, got {list(q.shape)}")


def _max_q(q, cu_seqlens_q, max_seqlen_q) -> int:
    """The most queries of a request."""
    if cu_seqlens_q is None:
        if max_seqlen_q is not None:
            raise ValueError("max_seqlen_q goes with cu_seqlens_q; for dense q leave it None")
        return q.shape[1]
    longest = q.shape[0] if max_seqlen_q is None else integer("max_seqlen_q must be an int", max_seqlen_q)
    if longest < 0:
        raise ValueError(f"max_seqlen_q must be 0 or more, got {longest}")
    return min(longest, q.shape[0])


def check_cu(name: str, cu, like: torch.Tensor, batch: int) -> None:
    """TypeError or ValueError if cu is not int32 [batch + 1]."""
    check_tensor(name, cu)
    if cu.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {cu.dtype}")
    if tuple(cu.shape) != (batch + 1,) or not cu.is_contiguous():
        raise ValueError(f"{name} must be contiguous with shape [{batch + 1}], got {list(cu.shape)}")
    check_device(name, cu, like)


def _checked_tree(tree, q, batch: int, most: int) -> torch.Tensor | None:
    """A tree mask as [batch, n, n], a view."""
    if tree is None:
        return None
    check_tensor("tree", tree)
    if tree.dtype != torch.bool:
        raise TypeError(f"tree must be bool, got {tree.dtype}")
    n = tree.shape[-1] if tree.dim() else 0
    if tree.dim() not in (2, 3) or tree.shape[-2] != n or n < most or (tree.dim() == 3 and tree.shape[0] != batch):
        raise ValueError(f"tree must have shape [n, n] or [{batch}, n, n], n at least {most}, got {list(tree.shape)}")
    check_device("tree", tree, q)
    return tree.expand(batch, n, n)


def check_out(out, q, columns: int) -> None:
    """TypeError or ValueError if `out` cannot hold the result of q and values of so many columns."""
    check_tensor("out", out)
    if out.dtype != q.dtype:
        raise TypeError(f"out must have q's dtype {q.dtype}, got {out.dtype}")
    if out.shape != (*q.shape[:-1], columns) or out.stride(-1) != 1:
        raise ValueError(f"out must have shape {[*q.shape[:-1], columns]} and a contiguous last dim, got {list(out.shape)}")
    check_device("out", out, q)


def checked_append(
    cache, k, v, q, rotary, cu_seqlens, cu_seqlens_q, positions, one_position
) -> tuple[AppendOperands, AppendOptions]:  # fmt: skip
    """The checked operands and options of a call of `append`."""
    if not isinstance(cache, Cache):
        raise TypeError(f"cache must be a strobe.Cache, got {type(cache).__name__}")
    check_cache(cache)
    batch = cache.lengths.shape[0]
    names = cache.names
    for name, cu in ((names.cu_seqlens, cu_seqlens), ("cu_seqlens_q", cu_seqlens_q)):
        if cu is not None:
            check_cu(name, cu, cache.k, batch)
    check_new("k", k, cache, cache.k.shape[3], cu_seqlens, None)
    if (v is None) != (cache.v is None):
        raise ValueError("v must be given exactly where the cache has values of its own")
    if v is not None:
        check_new("v", v, cache, values_columns(cache), cu_seqlens, k)
    if q is not None:
        check_new("q", q, cache, cache.k.shape[3], cu_seqlens_q, None)
    if rotary is None and (q is not None or positions is not None):
        raise ValueError("q and positions go with a rotary embedding, got none")
    if rotary is not None:
        check_rotary(rotary, cache)
    if positions is not None:
        check_ints("positions", positions, cache.k, batch)
    scales = per_request(cache.k_scale, cache), per_request(cache.v_scale, cache)
    if any(scale is not None and scale.dim() == 3 for scale in scales):
        raise ValueError(
            f"{names.k_scale} and {names.v_scale} must be one number for all keys of a head where keys are appended"
        )
    cos, sin, interleaved = (None, None, False) if rotary is None else rotary
    operands = AppendOperands(
        cache.k, cache.v, k, v, cache.lengths, cache.page_table, cache.index, cu_seqlens, q, cu_seqlens_q, cos, sin, positions,
        *scales,
    )  # fmt: skip
    return operands, AppendOptions(bool(interleaved), bool(one_position))


def checked_parts(outs, lses) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts to be merged, each stacked along a new first dim."""
    stacked = []
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (Sequence, torch.Tensor)):
            raise TypeError(f"{name} must be a sequence of tensors or a stacked one, got {type(parts).__name__}")
        parts = list(parts)
        if not parts:
            raise ValueError(f"{name} must have at least one part, got none")
        for x in parts:
            check_tensor(name, x)
            if x.shape != parts[0].shape or x.dtype != parts[0].dtype or x.device != parts[0].device:
                raise ValueError(f"{name} must have one shape, dtype and device, got {[list(one.shape) for one in parts]}")
        stacked.append(torch.stack(parts))
    out, lse = stacked
    wanted = [len(out), *out.shape[1:-3], out.shape[-2], out.shape[-3]] if out.dim() in (4, 5) else None
    if wanted is None or list(lse.shape) != wanted:
        raise ValueError(f"lses must have shape [batch, heads, n] or [heads, n] for outs of shape {list(out.shape[1:])}, "
                         f"got {list(lse.shape[1:])}")  # fmt: skip
    if out.dtype not in DTYPES or lse.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"outs must be float16, bfloat16 or float32 and lses float32, got {out.dtype} and {lse.dtype}")
    return out, lse


def check_new(name: str, x, cache: Cache, columns: int, cu, like: torch.Tensor | None) -> None:
    """TypeError or ValueError if x is not what may be appended to a cache, or q beside it."""
    check_tensor(name, x)
    batch, heads = cache.lengths.shape[0], cache.k.shape[2]
    if x.dim() != (4 if cu is None else 3) or (cu is None and x.shape[0] != batch):
        shape = f"[{batch}, seqlen, heads, head_dim]" if cu is None else "[total, heads, head_dim]"
        raise ValueError(f"{name} must have shape {shape}, got {list(x.shape)}")
    if name == "q":
        if x.shape[-2] % heads or x.shape[-1] != columns:
            raise ValueError(f"q must have a multiple of {heads} heads of {columns} columns, got {list(x.shape)}")
    elif x.shape[-2:] != (heads, columns):
        raise ValueError(f"{name} must have {heads} heads of {columns} columns, got {list(x.shape)}")
    if x.dtype not in DTYPES or cache.k.dtype not in (x.dtype, *OF_8_BITS):
        wanted = "16 or 32 bits for a cache of 8" if cache.k.dtype in OF_8_BITS else f"the cache's dtype {cache.k.dtype}"
        raise TypeError(f"{name} must have {wanted}, got {x.dtype}")
    if like is not None and (x.shape[:-2] != like.shape[:-2] or x.dtype != like.dtype):
        raise ValueError(
            f"{name} must have k's rows and dtype, got {list(x.shape)} {x.dtype} for {list(like.shape)} {like.dtype}"
        )
    if x.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dim (stride 1), got stride {x.stride(-1)}")
    check_device(name, x, cache.k)
    if wants_gradient(x):
        raise ValueError(f"{name} must not require a gradient, which append has not: call it under torch.no_grad()")


def check_rotary(rotary, cache: Cache) -> None:
    """TypeError or ValueError if a rotary embedding does not fit the keys of a cache."""
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be a strobe.Rotary, got {type(rotary).__name__}")
    cos, sin = rotary.cos, rotary.sin
    of_cos = cache.names.cos
    for name, x in ((of_cos, cos), (cache.names.sin, sin)):
        check_tensor(name, x)
        if x.dtype not in DTYPES or x.dtype != cos.dtype:
            raise TypeError(f"{name} must be float16, bfloat16 or float32, as {of_cos}, got {x.dtype}")
        if x.dim() != 2 or x.shape != cos.shape or x.stride(-1) != 1:
            raise ValueError(f"{name} must have shape [positions, rotary dim / 2], as {of_cos}, got {list(x.shape)}")
        if x.shape[0] < 1 or not 1 <= 2 * x.shape[1] <= cache.k.shape[3]:
            raise ValueError(f"{name} must have at most {cache.k.shape[3] // 2} columns and a row, got {list(x.shape)}")
        check_device(name, x, cache.k)
