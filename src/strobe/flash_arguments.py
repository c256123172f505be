"""flash-attn's arguments in Strobe's terms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strobe.arguments import integer
from strobe.masks import Causal, Mask, Window
from strobe.scores import Score

NO_WINDOW = (-1, -1)
"""flash-attn's window without bounds."""
HINTS = frozenset(("scheduler_metadata", "pack_gqa", "sm_margin", "fa_version", "ver"))
"""Arguments of others that say how to schedule, or which of their kernels to take: they change nothing."""
_CAUSAL = Causal()


def flash_mask(causal: bool, window_size: Sequence[int] | None) -> Mask | None:
    """The mask of flash-attn's `causal` and `window_size`, whose sides without a bound are -1 or, as in FlashAttention-4, None;
    None is no mask."""
    if window_size is None or (not torch.compiler.is_compiling() and window_size is NO_WINDOW):
        # The default needs no checks, which take half a microsecond. (PyTorch 2.11's compiler knows no `is` of two tuples.)
        return _CAUSAL if causal else None
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size must be a pair (left, right), got {window_size!r}") from None
    left, right = (-1 if side is None else integer("window_size must hold two ints", side) for side in (left, right))
    for side in (left, right):
        if side < -1:
            raise ValueError(f"window_size must hold -1 (no bound) or sizes >= 0, got {window_size!r}")
    if causal:
        right = 0
    if left < 0 and right <= 0:
        return _CAUSAL if right == 0 else None
    return Window(left if left >= 0 else None, right if right >= 0 else None)


def flash_score(softcap: float, alibi_slopes: torch.Tensor | None, learnable_sink: torch.Tensor | None) -> Score | None:
    """The score of flash-attn's arguments; None is the plain one."""
    if isinstance(softcap, (int, float)) and softcap == 0 and alibi_slopes is None and learnable_sink is None:
        return None
    return Score(softcap, alibi_slopes, sinks=learnable_sink)
