"""A cache in pages for transformers' models on Strobe: `model.generate(..., past_key_values=PagedCache(batch, length))`.

transformers' own caches copy all keys at every token, or keep them in a tensor that attention reads to its end. Here a layer
appends to pages, and its attention is `strobe.decode`, which reads the keys that there are, from many multiprocessors at once.
"""

from __future__ import annotations

import functools

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

import strobe


class PagedLayer(CacheLayerMixin):
    """The keys and values of one layer, in pages that are allocated at the first token."""

    is_sliding = False
    is_croppable = True

    def __init__(self, batch: int, max_length: int, page: int):
        super().__init__()
        self.batch, self.max_length, self.page, self.length = batch, max_length, page, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        columns = -(-self.max_length // self.page)
        self.keys, self.values = (
            torch.empty(self.batch * columns, self.page, x.shape[1], x.shape[3], dtype=x.dtype, device=x.device)
            for x in (key_states, value_states)
        )
        self.table = torch.arange(self.batch * columns, dtype=torch.int32, device=self.device).view(self.batch, columns)
        self.lengths = torch.zeros(self.batch, dtype=torch.int32, device=self.device)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_, **__) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [batch, heads, n, head_dim]. Returns the new ones alone, which lead attention to the pages."""
        if key_states.shape[0] != self.batch:
            raise ValueError(f"PagedCache must be made for the batch, {key_states.shape[0]}, got one for {self.batch}")
        new = key_states.shape[2]
        if self.length + new > self.max_length:
            raise ValueError(f"PagedCache has room for {self.max_length} keys, got {self.length + new}: make a longer one")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        so_far = strobe.Cache._of(self.keys, self.values, self.lengths, self.table)
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (key_states, value_states))
        longer = strobe.append(so_far, k.transpose(1, 2), v.transpose(1, 2))[0]
        if self.lengths.is_cuda and torch.cuda.is_current_stream_capturing():
            self.lengths.copy_(longer.lengths)  # a replay appends where the one before ended
        else:
            self.lengths = longer.lengths
        self.length += new
        key_states.strobe_cache = longer, self.length  # type: ignore[attr-defined]
        return key_states, value_states

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        """How many keys there are with `query_length` new ones (in transformers 4: their positions), and the first one."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.length + new, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.max_length

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.length = 0
        if self.is_initialized:
            self.lengths = torch.zeros_like(self.lengths)

    def crop(self, tokens: int) -> None:
        """Keep the first `tokens` keys or, if it is negative, all but so many."""
        kept = max(0, self.length + tokens) if tokens < 0 else min(tokens, self.length)
        if self.is_initialized:
            self.lengths = self.lengths - (self.length - kept)
        self.length = kept

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these requests of the batch, each with pages of its own."""
        self.batch = len(indices)
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            indices, columns = indices.to(self.device), self.table.shape[1]
            pages = self.table[indices].flatten().long()
            self.keys, self.values, self.lengths = self.keys[pages], self.values[pages], self.lengths[indices]
            self.table = torch.arange(len(pages), dtype=torch.int32, device=self.device).view(self.batch, columns)


class PagedCache(Cache):
    """Keys and values of all layers in pages, for `batch` sequences of at most `max_length` tokens, padding included.

    It serves inference: attention over it has no gradient. It works with attn_implementation="strobe" alone (see
    `strobe.integrations.transformers.register`), with any mask that is a band and padding on the left, with softcaps and sinks;
    anything else is refused by name.

    page: keys of a page.
    """

    def __init__(self, batch: int, max_length: int, page: int = 64):
        for name, number in (("batch", batch), ("max_length", max_length), ("page", page)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"PagedCache: {name} must be an int of 1 or more, got {number!r}")
        super().__init__(layer_class_to_replicate=functools.partial(PagedLayer, batch, max_length, page))  # type: ignore[arg-type]
