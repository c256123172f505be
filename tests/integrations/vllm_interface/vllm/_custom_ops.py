"""What vLLM compiles in C++ and CUDA, in PyTorch."""

import torch


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    """Write keys and values, [tokens, heads, D], to their slots in [pages, keys of a page, heads, D]; a negative slot is not
    written, but the first page, which no request has, may be. Nothing waits for the device, so a graph may capture it."""
    page = key_cache.shape[1]
    slots = slot_mapping.clamp(min=0)
    there = (slot_mapping >= 0)[:, None, None]
    for new, cache in ((key, key_cache), (value, value_cache)):
        at = slots // page, slots % page
        cache.index_put_(at, torch.where(there, new[: len(slots)], cache[at]))
