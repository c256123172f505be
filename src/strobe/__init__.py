"""Strobe: flash attention for PyTorch in pure Python, and the instruments that show why it is fast."""

from strobe.api import (
    attention,
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    supports,
    use_optimistic_softmax,
)
from strobe.call import precompiled as _precompiled
from strobe.call.dispatch import BACKENDS
from strobe.dropout import dropout_mask
from strobe.fp8 import attention_fp8
from strobe.integrations import flop_counter as _flop_counter
from strobe.integrations import sdpa as _sdpa
from strobe.integrations.flash_attn import install_as_flash_attn, uninstall_as_flash_attn
from strobe.integrations.flex import flex_attention
from strobe.integrations.sdpa import scaled_dot_product_attention
from strobe.kernels.workspace import redone_blocks
from strobe.masks import Causal, Document, Full, Mask, Prefix, Visible, Window
from strobe.scores import Score
from strobe.serving.api import append, decode, merge
from strobe.serving.cache import Cache, Rotary
from strobe.serving.flash import flash_attn_with_kvcache

__version__ = "0.1.0"

_sdpa.register()
_precompiled.begin()
_flop_counter.register()

__all__ = [
    "BACKENDS",
    "Cache",
    "Causal",
    "Document",
    "Full",
    "Mask",
    "Prefix",
    "Rotary",
    "Score",
    "Visible",
    "Window",
    "append",
    "attention",
    "attention_fp8",
    "decode",
    "dropout_mask",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "install_as_flash_attn",
    "merge",
    "redone_blocks",
    "scaled_dot_product_attention",
    "supports",
    "uninstall_as_flash_attn",
    "use_optimistic_softmax",
]
