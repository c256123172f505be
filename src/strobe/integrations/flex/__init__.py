"""PyTorch's FlexAttention on Strobe."""

from strobe.integrations.flex.api import explain, flex_attention

__all__ = ["explain", "flex_attention"]
