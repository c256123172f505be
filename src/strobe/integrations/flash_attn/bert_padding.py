"""flash_attn.bert_padding: padded sequences to packed ones, and back. Plain torch, differentiable."""

from __future__ import annotations

import torch


def index_first_axis(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The rows `indices`, int [n], of a tensor [rows, ...]: [n, ...]."""
    return tensor[indices]


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """Zeros [first_axis_dim, ...] in which the rows `indices`, int [n], are values [n, ...]."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(tensor: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows `indices` of a tensor, and the tensor itself."""
    return tensor[indices], tensor


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The rows of hidden_states [batch, seqlen, ...] that a mask [batch, seqlen], bool or of 0 and 1, keeps. It waits for the
    device.

    unused_mask: rows that are kept, and not used.
    Returns rows [total, ...], their places among batch * seqlen, cu_seqlens int32 [batch + 1], the longest length, and the used
    lengths int32 [batch].
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = kept.sum(-1, dtype=torch.int32), attention_mask.sum(-1, dtype=torch.int32)
    places = kept.flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    return hidden_states.flatten(0, 1)[places], places, _bounds(lengths), longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """`unpad_input` where an entry holds several sequences: attention_mask_in_length int [batch, seqlen] lists their lengths
    from the left, then zeros. cu_seqlens are the bounds of all sequences."""
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths != 0].to(torch.int32)
    row = torch.arange(attention_mask_in_length.shape[1], device=lengths.device)
    places = (row < attention_mask_in_length.sum(-1, keepdim=True)).flatten().nonzero().flatten()
    longest = int(lengths.max()) if lengths.numel() else 0
    return hidden_states.flatten(0, 1)[places], places, _bounds(lengths), longest


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Rows [total, ...] at their places among batch * seqlen: [batch, seqlen, ...], with zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _bounds(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
