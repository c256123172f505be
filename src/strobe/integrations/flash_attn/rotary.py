"""flash_attn.layers.rotary: rotary position embeddings (Su et al. 2021), in plain torch, differentiable and compiled.

A pair (a, b) of a head's numbers at position p is turned by the angle p * frequency: (a cos - b sin, a sin + b cos). The pairs
are the numbers i and i + rotary_dim / 2, or, interleaved, 2 i and 2 i + 1. What lies beyond rotary_dim stays.
"""

from __future__ import annotations

import torch


def rotate_half(x: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """(a, b) -> (-b, a) for every pair of the last dim."""
    a, b = _pairs(x, interleaved)
    return _joined(-b, a, interleaved)


def apply_rotary_emb_torch(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """x [batch, seqlen, heads, D], turned; cos and sin [seqlen, rotary_dim / 2] or [batch, seqlen, rotary_dim / 2]."""
    return _turned(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """x, turned by its positions.

    Args:
        x: [batch, seqlen, heads, D]; with cu_seqlens [total, heads, D].
        cos, sin: [positions, rotary_dim / 2], with as many positions as are looked up; rotary_dim is at most D.
        interleaved: whether neighbours are a pair, instead of numbers half of rotary_dim apart.
        inplace: whether x is changed, and returned.
        seqlen_offsets: the position of each sequence's first row, an int or int [batch].
        cu_seqlens: int32 [batch + 1], the bounds of packed sequences, in which positions count from 0.
        max_seqlen: not needed.

    Raises:
        ValueError: if cos and sin do not fit.
    """
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[-1] > x.shape[-1]:
        shapes = f"{list(cos.shape)} and {list(sin.shape)}"
        raise ValueError(f"cos and sin must have one shape [positions, at most {x.shape[-1] // 2}], got {shapes}")
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    if positions.dim() == 1 and cu_seqlens is None and positions.shape[0] > cos.shape[0]:
        raise ValueError(f"cos must have a row for each of {positions.shape[0]} positions, got {cos.shape[0]}")
    out = _turned(x, cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2), interleaved)
    return x.copy_(out) if inplace else out


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """qkv with q and k turned in place: [batch, seqlen, 3, heads, D], or [batch, seqlen, heads_q + 2 heads_kv, D] with
    num_heads_q. cos_k and sin_k are k's own, if they are given."""
    if qkv.dim() == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif qkv.dim() == 4 and num_heads_q is not None:
        heads_kv = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_kv]
    else:
        raise ValueError(
            "qkv must have shape [batch, seqlen, 3, heads, D], or 4 dims and num_heads_q given, "
            f"got {list(qkv.shape)} and num_heads_q={num_heads_q}"
        )
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
) -> torch.Tensor:
    """kv [batch, seqlen, 2, heads, D] with k turned in place."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Turns the q and k of qkv in place, by the frequencies base ** (-2 i / dim).

    scale_base: XPos (Sun et al. 2022): q grows with the position as k shrinks; None leaves that out.
    """

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: float | None = None, device=None
    ):
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", self.base ** (-even / dim), persistent=False)
        scale = None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)

    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: int | torch.Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ):
        """qkv of `apply_rotary_emb_qkv_`, turned; or q [batch, seqlen, heads, D] and kv of `apply_rotary_emb_kv_`, both turned.

        seqlen_offset: the position of the first row, an int, or int [batch] with max_seqlen, above which no position is.
        """
        length = qkv.shape[1]
        if max_seqlen is not None:
            length = max_seqlen
        elif isinstance(seqlen_offset, int):
            length += seqlen_offset
        else:
            raise ValueError("seqlen_offset as a tensor needs max_seqlen, got None")
        cos, sin, cos_k, sin_k = self._tables(length, qkv.device, qkv.dtype)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        kv = apply_rotary_emb_kv_(
            kv, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, self.interleaved, seqlen_offset
        )
        return q, kv

    def _tables(self, length: int, device, dtype) -> tuple:
        """cos and sin of q [length, dim / 2], and those of k where XPos makes them others; angles are float32."""
        position = torch.arange(length, device=device, dtype=torch.float32)
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        angle = torch.outer(position, self.base ** (-even / self.dim))  # a model in bfloat16 has rounded its buffer
        cos, sin = angle.cos(), angle.sin()
        if self.scale_base is None:
            return cos.to(dtype), sin.to(dtype), None, None
        power = (position - length // 2) / self.scale_base
        growth = ((even + 0.4 * self.dim) / (1.4 * self.dim)) ** power[:, None]
        return tuple(x.to(dtype) for x in (cos * growth, sin * growth, cos / growth, sin / growth))


def _pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return (x[..., ::2], x[..., 1::2]) if interleaved else tuple(x.chunk(2, -1))  # type: ignore[return-value]


def _joined(a: torch.Tensor, b: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [..., heads, D] for cos and sin [..., 1, rotary_dim / 2]: in float32, rounded to x's dtype."""
    dim = 2 * cos.shape[-1]
    a, b = (part.float() if x.dtype.itemsize < 4 else part for part in _pairs(x[..., :dim], interleaved))
    cos, sin = cos.to(a.dtype), sin.to(a.dtype)
    turned = _joined(a * cos - b * sin, a * sin + b * cos, interleaved).to(x.dtype)
    return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), -1)


def _positions(x: torch.Tensor, seqlen_offsets: int | torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """The position of each row of x: [seqlen] or [batch, seqlen], or with cu_seqlens [total]."""
    if cu_seqlens is None:
        row = torch.arange(x.shape[1], device=x.device)
        return row + (seqlen_offsets[:, None] if isinstance(seqlen_offsets, torch.Tensor) else seqlen_offsets)
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    offsets = seqlen_offsets[sequence] if isinstance(seqlen_offsets, torch.Tensor) else seqlen_offsets
    return row - cu_seqlens[sequence] + offsets
