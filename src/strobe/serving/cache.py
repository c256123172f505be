"""The description of a cache of keys and values, and of a rotary embedding: what users give to `decode` and `append`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch


@dataclass(frozen=True)
class Names:
    """What an error calls the tensors of a cache, and those of an append."""

    k: str = "cache.k"
    v: str = "cache.v"
    lengths: str = "cache.lengths"
    page_table: str = "cache.page_table"
    index: str = "cache.index"
    leftpad: str = "cache.leftpad"
    k_scale: str = "cache.k_scale"
    v_scale: str = "cache.v_scale"
    cu_seqlens: str = "cu_seqlens"
    cos: str = "rotary.cos"
    sin: str = "rotary.sin"


@dataclass(frozen=True, eq=False)
class Cache:
    """Keys and values of requests that generate, and how many each of them has. It holds tensors and copies none.

    k, v: contiguous [entries, size, heads_kv, head_dim], or with a page_table pages [pages, page_size, heads_kv, head_dim]; any
        strides with a contiguous last dim. float16, bfloat16, float32 or float8 (e4m3fn, e5m2). v=None: the values are the
        first `head_dim_v` columns of k, as in multi-head latent attention.
    lengths: int32 [batch]: how many keys each request has, its leftpad included.
    page_table: int32 [batch, n]: keys i * page_size ... of request b are page page_table[b, i]. What lies beyond a request's
        length is not looked at.
    index: int32 [batch]: the entry of each request in a contiguous cache; default: its own number.
    leftpad: int32 [batch]: the first key that counts.
    k_scale, v_scale: float32, by which keys and values of 8 bits are multiplied: of shape [], [heads_kv], [batch, heads_kv], or
        [entries or pages, size, heads_kv], one for each key and head.
    """

    k: torch.Tensor
    v: torch.Tensor | None
    lengths: torch.Tensor
    page_table: torch.Tensor | None = None
    index: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    head_dim_v: int | None = None
    """Columns of k that are the values, where v is None."""
    names: ClassVar[Names] = Names()

    @classmethod
    def _of(cls, k, v, lengths, page_table=None, index=None, leftpad=None, k_scale=None, v_scale=None) -> Cache:
        """A cache of these. (To call a frozen class takes 2 us more.)"""
        made = object.__new__(cls)
        vars(made).update(k=k, v=v, lengths=lengths, page_table=page_table, index=index, leftpad=leftpad, k_scale=k_scale,
                          v_scale=v_scale, head_dim_v=None)  # fmt: skip
        return made

    def _with_lengths(self, lengths: torch.Tensor) -> Cache:
        """This cache with other lengths. (`dataclasses.replace` takes 2 us.)"""
        other = object.__new__(type(self))
        vars(other).update(vars(self), lengths=lengths)
        return other


class Rotary(NamedTuple):
    """A rotary embedding: cos and sin [positions, n] of the first 2n columns. interleaved: it turns pairs of neighbours
    (GPT-J); otherwise each of the first n columns with that which stands n further (GPT-NeoX, Llama)."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False
