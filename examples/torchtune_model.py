"""torchtune's models on Strobe, with one function: dense masks, causal ones, and the BlockMasks of packed samples.

tune run ...                        # call use_strobe(model) where a recipe has built its model
"""

import torch

import strobe


def use_strobe(model: torch.nn.Module) -> None:
    """Make a torchtune model's attention run on Strobe."""
    for module in model.modules():
        if hasattr(module, "_attention_call"):
            module._attention_call = _attention


def _attention(q, k, v, mask, dropout_p: float, is_causal: bool) -> torch.Tensor:
    """q, k, v [batch, heads, length, D]; mask: None, bool [batch, length, length], or a BlockMask."""
    if mask is not None and not isinstance(mask, torch.Tensor):
        return strobe.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    mask = None if mask is None else mask[:, None]
    return strobe.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, enable_gqa=True)
