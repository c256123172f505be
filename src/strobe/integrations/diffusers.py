"""diffusers: any model whose attention goes through its dispatcher runs on Strobe with `model.set_attention_backend("strobe")`.

diffusers (0.35 and later) names its backends by an enum and has no public way to add one, so `register` adds a member to it.
"""

from __future__ import annotations

import torch

from strobe.integrations.sdpa import scaled_dot_product_attention

NAME = "strobe"


def register() -> None:
    """Make "strobe" a name of an attention backend in diffusers: for `model.set_attention_backend`, the `attention_backend`
    context and `dispatch_attention_fn`. A second call changes nothing.

    Raises:
        ImportError: diffusers is not installed, or has no such dispatcher.
    """
    from diffusers.models import attention_dispatch as theirs

    names = theirs.AttentionBackendName
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        names._member_map_[NAME.upper()] = names._value2member_map_[NAME] = member
        names._member_names_.append(NAME.upper())
    theirs._AttentionBackendRegistry.register(names(NAME))(_attention)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
    _parallel_config=None,
) -> torch.Tensor:  # fmt: skip
    """diffusers' attention function: query, key, value [batch, length, heads, D], and the same back. attn_mask: as PyTorch's,
    or [batch, keys]."""
    if return_lse or _parallel_config is not None:
        name = "return_lse" if return_lse else "context parallelism"
        raise ValueError(f"{name} is not taken by strobe's backend in diffusers: strobe.attention and strobe.parallel have it")
    if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return out.transpose(1, 2)
