"""transformers: any model that uses its attention interface runs on Strobe with `attn_implementation="strobe"`.

A model asks twice. Once per forward pass its mask is made: transformers hands over the mask as nested Python functions
of (batch, head, query, key), and `_model_mask` reads from them which `strobe.Mask` they mean, or refuses. Then each layer
calls `_attention` with that mask. Padding becomes document numbers: a padded key belongs to no query's document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import ClassVar

import torch

from strobe.api import attention
from strobe.masks import Causal, Document, Full, Mask, Window, visible
from strobe.scores import Score

_UNSUPPORTED = ("s_aux", "position_bias", "head_mask", "cache", "output_attentions")


def register(name: str = "strobe") -> None:
    """Make `attn_implementation=name` run on Strobe, in `from_pretrained`, `from_config` and `set_attn_implementation`.

    Causal, bidirectional, sliding-window, padded and packed (position_ids) masks, soft caps, GQA, dropout and cross attention
    are honoured, with dynamic and static caches. What Strobe cannot represent raises a ValueError when the model runs.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _model_mask)


@dataclass(frozen=True, eq=False)
class ModelMask:
    """What layers get as `attention_mask`: the mask of n_q queries among the first `keys` of n_kv keys.

    keys < n_kv where a static cache is longer than the positions written so far.
    """

    mask: Mask
    n_q: int
    n_kv: int
    keys: int

    ndim: ClassVar[int] = 4
    """transformers takes what has four dimensions for a mask that is ready, and passes it on as it is."""

    def contiguous(self) -> ModelMask:
        """generate() asks this of every mask."""
        return self


def _attention(
    module, query, key, value, attention_mask, *, scaling=None, dropout=0.0, is_causal=None, sliding_window=None,
    softcap=None, **others,
):  # fmt: skip
    """transformers' attention function: q, k, v [batch, heads, length, D] -> (out [batch, length, heads, D], None)."""
    for name in _UNSUPPORTED:
        if others.get(name) is not None and others[name] is not False:
            raise ValueError(f"{name} is not supported by strobe attention: run this model with another attn_implementation")
    if isinstance(attention_mask, ModelMask):
        _check_lengths(attention_mask, query, key)
        mask, key, value = attention_mask.mask, key[:, :, : attention_mask.keys], value[:, :, : attention_mask.keys]
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = _implied_mask(causal, sliding_window, query.shape[2], key.shape[2])
    else:
        shape = list(getattr(attention_mask, "shape", ()))
        raise ValueError(
            f"attention_mask must be None or [batch, length] with strobe attention, got a custom one of shape {shape}"
        )
    q, k, v = (_autocast(x).transpose(1, 2) for x in (query, key, value))
    return attention(q, k, v, mask=mask, score=Score(softcap=softcap or 0.0), scale=scaling, dropout_p=dropout), None


def _check_lengths(model_mask: ModelMask, query: torch.Tensor, key: torch.Tensor) -> None:
    made_for, given = (model_mask.n_q, model_mask.n_kv), (query.shape[2], key.shape[2])
    if made_for != given:
        raise ValueError(f"attention_mask was made for {made_for} queries and keys, but this layer has {given}")


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """Under autocast attention runs in its dtype, as PyTorch's own attention does."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _implied_mask(causal: bool, sliding_window: int | None, n_q: int, n_kv: int) -> Mask:
    """The mask of a layer whose model made none."""
    if not causal:
        if sliding_window is not None:
            raise ValueError(f"sliding_window={sliding_window} without a causal mask needs an attention_mask, got None")
        return Full()
    if n_q not in (1, n_kv):
        raise ValueError(f"attention_mask is None for {n_q} causal queries and {n_kv} keys: where the queries stand is unknown")
    window = Full() if sliding_window is None else Window(left=sliding_window - 1)
    return _shortened(window & Causal(), n_q, n_kv)


@torch.compiler.disable  # it reads closures: one graph break, before the layers
def _model_mask(
    *, batch_size, kv_length, mask_function, q_length=None, q_offset=0, kv_offset=0, attention_mask=None, device=None,
    cache_position=None, **_,
) -> ModelMask:  # fmt: skip
    """transformers' mask function, called once per forward pass.

    Queries stand at positions q_offset .. q_offset + q_length - 1 (up to transformers 4: cache_position), keys at
    kv_offset .. kv_offset + kv_length - 1. attention_mask: bool [batch, positions], False where there is padding.
    """
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    if cache_position is not None:
        q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
    mask, keys = _translate(mask_function), kv_length
    real = _real_keys(attention_mask, kv_offset, kv_length)
    if mask.left is None and mask.right is None:
        pass  # without a band it does not matter where queries stand
    elif q_length == 1 and _on_gpu_only(q_offset):
        # A static cache while decoding: what the one query sees is computed where its position is known.
        seen = visible(q_offset - kv_offset, torch.arange(kv_length, device=device), kv_length, *mask.band)
        seen = seen.expand(batch_size, -1) if real is None else real & seen
        return ModelMask(replace(mask, left=None, right=None) & _only(seen, q_length), q_length, kv_length, keys)
    else:
        keys = _keys_in_reach(mask, int(q_offset) + q_length - kv_offset, kv_length)
    if real is not None and _holds_padding(real[:, :keys]):
        mask = mask & _only(real[:, :keys], q_length)
    return ModelMask(_shortened(mask, q_length, keys), q_length, kv_length, keys)


def _translate(function: Callable) -> Mask:
    """The mask that a mask function of transformers means. ValueError, with its name, if it is not one of those below."""
    name = function.__qualname__.partition(".<locals>")[0]
    bound = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    if name == "causal_mask_function":
        return Causal()
    if name == "bidirectional_mask_function":
        return Full()
    if name == "sliding_window_overlay":
        return Window(left=bound["sliding_window"] - 1)
    if name == "sliding_window_bidirectional_overlay":
        return Window(left=bound["sliding_window"], right=bound["sliding_window"])
    if name == "packed_sequence_mask_function":
        return Document(bound["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence":
        # Within one packed sequence, positions differ by as much as indices do: the band is the same.
        return _translate(bound["mask_function"])
    if name == "and_masks":
        return reduce(and_, (_translate(one) for one in bound["mask_functions"]), Full())
    if name == "or_masks":
        name += f"({', '.join(one.__qualname__ for one in bound['mask_functions'])})"
    raise ValueError(
        f"the model's mask {name} is not supported by strobe attention, which knows causal, bidirectional, sliding-window, "
        "padded and packed masks"
    )


def _real_keys(attention_mask, kv_offset: int, kv_length: int) -> torch.Tensor | None:
    """bool [batch, kv_length], True where a key is no padding; positions past the end of attention_mask hold none."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask must have shape [batch, length], got {list(attention_mask.shape)}")
    missing = max(0, kv_offset + kv_length - attention_mask.shape[1])
    real = torch.nn.functional.pad(attention_mask, (0, missing)) if missing else attention_mask
    return real[:, kv_offset : kv_offset + kv_length]


def _on_gpu_only(q_offset) -> bool:
    """Whether reading the offset would wait for the GPU."""
    return isinstance(q_offset, torch.Tensor) and q_offset.device.type != "cpu"


def _keys_in_reach(mask: Mask, end: int, n_kv: int) -> int:
    """How many keys to keep so that the last query stands on the last key; it stands on key `end` - 1 of n_kv."""
    if end == n_kv or (end < n_kv and mask.right == 0):
        return end
    raise ValueError(f"the mask {mask} puts the last query on key {end - 1} of {n_kv}: strobe aligns it with the last key")


def _holds_padding(real: torch.Tensor) -> bool:
    """Whether some key is padding: without, a faster kernel may run.

    On a GPU this waits for it, once per forward pass, as transformers' own mask functions do; attention_mask=None spares it.
    While a CUDA graph is captured nothing can be waited for, and padding is assumed.
    """
    if real.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return not bool(real.all())


def _only(seen: torch.Tensor, n_q: int) -> Mask:
    """All queries see the keys where seen, bool [batch, n_kv], is True: these are document 0, the others document -1."""
    return Document(torch.zeros(seen.shape[0], n_q, dtype=torch.int32, device=seen.device), seen.to(torch.int32) - 1)


def _shortened(mask: Mask, n_q: int, n_kv: int) -> Mask:
    """The same mask without bounds that hide nothing: more kernels know how to run it."""
    left = None if mask.left is not None and mask.left >= n_kv - 1 else mask.left
    right = None if mask.right is not None and (mask.right >= n_kv - 1 or n_q == 1) else mask.right
    return replace(mask, left=left, right=right)
