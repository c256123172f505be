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
from strobe.call.dispatch import BACKENDS
from strobe.dropout import dropout_mask
from strobe.fp8 import attention_fp8
from strobe.kernels.workspace import redone_blocks
from strobe.masks import Causal, Document, Full, Mask, Prefix, Visible, Window
from strobe.scores import Score

__version__ = "0.1.0"

__all__ = [
    "BACKENDS",
    "Causal",
    "Document",
    "Full",
    "Mask",
    "Prefix",
    "Score",
    "Visible",
    "Window",
    "attention",
    "attention_fp8",
    "dropout_mask",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "redone_blocks",
    "supports",
    "use_optimistic_softmax",
]
