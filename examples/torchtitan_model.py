"""torchtitan's models on Strobe, with one call after the model is built: torchtitan's attentions, over whole sequences and over
packed documents (VarlenAttention), end in PyTorch's flash operators, which are Strobe's then.

    python -m torchtitan.train ...      # call use_strobe(model) where the trainer has built its model
"""

import torch
from torch.nn.attention import SDPBackend

import strobe  # noqa: F401 - it offers itself to PyTorch


def use_strobe(model: torch.nn.Module) -> None:
    """Make a torchtitan model's attention run on Strobe, on NVIDIA GPUs. torchtitan chooses an implementation as it builds its
    layers, so this comes after that."""
    torch.nn.attention.activate_flash_attention_impl("strobe")
    for module in model.modules():
        if hasattr(module, "sdpa_backends"):  # torchtitan asks cuDNN first
            module.sdpa_backends = [SDPBackend.FLASH_ATTENTION]
