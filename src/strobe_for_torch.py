"""What PyTorch loads at the end of its own import where Strobe is installed, by the entry point `torch.backends`.

    torch.nn.attention.activate_flash_attention_impl("strobe")

then needs no import of Strobe, which is imported when that is called. Until then nothing is changed, and nothing is loaded.
"""


def register() -> None:
    """Offer "strobe" as an implementation of flash attention, if this PyTorch takes any (2.11 and later)."""
    import torch

    offer = getattr(getattr(torch.nn, "attention", None), "register_flash_attention_impl", None)
    if offer is not None:
        offer("strobe", register_fn=_activate)


def _activate(*arguments, **keywords):
    """Strobe in the place of PyTorch's flash operators, until its `remove`."""
    from strobe.integrations.sdpa import Implementation

    return Implementation(*arguments, **keywords)
