"""The attentions that Strobe is measured beside, and Strobe itself: one registry, one way to call them.

`prepare(q, k, v, causal)` takes tensors in the peer's own layout and returns the call to be timed, which returns out in
the same layout. It imports the peer, so a missing one raises ImportError here and is reported with that reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import strobe

Call = Callable[[], Any]
"""Returns out."""


@dataclass(frozen=True)
class Peer:
    """One contender. heads_first: takes [B, H, S, D], else [B, S, H, D]. Its calls run inside `context()`."""

    name: str
    prepare: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Call]
    heads_first: bool = False
    context: Callable[[], AbstractContextManager] = nullcontext


def strobe_peer(backend: str | None = None) -> Peer:
    """Strobe with the kernel that dispatch picks, or with one backend by name."""

    def prepare(q, k, v, causal) -> Call:
        mask = strobe.Causal() if causal else strobe.Full()
        return lambda: strobe.attention(q, k, v, mask=mask, backend=backend)

    return Peer(f"strobe {backend}" if backend else "strobe", prepare)


def _sdpa(name: str, backend: str) -> Peer:
    """One backend of PyTorch's scaled_dot_product_attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def prepare(q, k, v, causal) -> Call:
        options = {"is_causal": causal, "enable_gqa": q.shape[1] != k.shape[1]}
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return Peer(name, prepare, heads_first=True, context=lambda: sdpa_kernel(getattr(SDPBackend, backend)))


def _flash_attn_2(q, k, v, causal) -> Call:
    from flash_attn import flash_attn_func

    return lambda: flash_attn_func(q, k, v, causal=causal)


def _flash_attn_3(q, k, v, causal) -> Call:
    from flash_attn_interface import flash_attn_func

    return lambda: _first(flash_attn_func(q, k, v, causal=causal))


def _flash_attn_4(q, k, v, causal) -> Call:
    from flash_attn.cute.interface import flash_attn_func

    return lambda: _first(flash_attn_func(q, k, v, causal=causal))


def _flex(q, k, v, causal) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(batch, head, i, j):
        return i >= j

    mask = create_block_mask(visible, None, None, q.shape[2], k.shape[2], device=q.device) if causal else None
    attend = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return lambda: attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def _first(result) -> torch.Tensor:
    """Some versions return (out, lse)."""
    return result[0] if isinstance(result, tuple) else result


def peers_for(device: torch.device) -> dict[str, Peer]:
    """Name -> peer for a device."""
    if device.type == "cpu":
        peers = [_sdpa("SDPA flash", "FLASH_ATTENTION"), _sdpa("SDPA math", "MATH")]
    else:
        peers = [
            _sdpa("cuDNN", "CUDNN_ATTENTION"),
            Peer("FA4", _flash_attn_4),
            Peer("FA3", _flash_attn_3),
            Peer("FA2", _flash_attn_2),
            _sdpa("SDPA flash", "FLASH_ATTENTION"),
            _sdpa("SDPA efficient", "EFFICIENT_ATTENTION"),
            Peer("flex", _flex, heads_first=True),
        ]
    return {peer.name: peer for peer in peers}
