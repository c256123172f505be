"""Dropout: which weights of the softmax count as 0 (Srivastava et al. 2014); the others are divided by 1 - p.

Whether a pair is kept follows from the seed, the batch entry (or sequence), the query head, the row and the key alone, so it
does not depend on tiles, on kernels or on the direction: a word of Philox 4x32-7 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3": seven rounds are the fewest that pass all tests) with the seed's two halves as its key.

Philox makes four words at a time. They belong to the rows i and i + 8 and the keys j and j + 8 of a square of 16: in results
of tensor cores, whether rows by keys or transposed, one thread has these four. The counter is (key, row, head, batch), each 16
rows or keys counted as 8. Kernels compute the same words in 32 bits (`kernels/common/philox.py`); here they are exact in int64,
whose products wrap around.
"""

from __future__ import annotations

import torch

ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85

_WORD = 0xFFFFFFFF


def dropout_mask(seed: torch.Tensor, p: float, batch: int, heads: int, n_q: int, n_kv: int) -> torch.Tensor:
    """Which weights `strobe.attention(..., dropout_p=p)` keeps: bool [batch, heads, n_q, n_kv], on the seed's device.

    Args:
        seed: int64 [1]. Attention draws it by `torch.randint(2**63 - 1, (1,), device=q.device)`, so after the same
            `torch.manual_seed` this gives the seed of the next call.
        p: the share that is dropped, from 0 to below 1.
        batch, heads, n_q, n_kv: the sizes of q and k. Where sequences are packed: their number, and the lengths of the longest;
            the mask of a shorter one is the first rows and keys of its entry.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    if not isinstance(seed, torch.Tensor):
        raise TypeError(f"seed must be a tensor, got {type(seed).__name__}")
    if seed.dtype != torch.int64 or tuple(seed.shape) != (1,):
        raise ValueError(f"seed must be int64 with shape [1], got {seed.dtype} with shape {list(seed.shape)}")
    check_probability("p", p)
    for name, size in (("batch", batch), ("heads", heads), ("n_q", n_q), ("n_kv", n_kv)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an int, got {type(size).__name__}")
        if size < 0:
            raise ValueError(f"{name} must be 0 or more, got {size}")
    b, h, i, j = (torch.arange(n, device=seed.device) for n in (batch, heads, n_q, n_kv))
    return kept(seed, p, b[:, None, None, None], h[:, None, None], i[:, None], j)


def check_probability(name: str, p: float) -> None:
    if isinstance(p, bool) or not isinstance(p, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(p).__name__}")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name} must be from 0 to below 1, got {p}")


def new_seed(device: torch.device) -> torch.Tensor:
    """A seed, int64 [1], from torch's default generator of a device. Nothing waits for the device, and a CUDA graph that draws
    a seed draws another one at every replay."""
    return torch.randint(2**63 - 1, (1,), device=device)


def threshold(p: float) -> int:
    """The number, an int32, below which a pair is dropped: what counts is the upper 31 bits of its word."""
    return int(p * 2**31)


def kept(
    seed: torch.Tensor, p: float, batch: torch.Tensor, head: torch.Tensor, i: torch.Tensor, j: torch.Tensor
) -> torch.Tensor:
    """Whether pairs are kept, for int64 indices that broadcast to them; i and j count from 0 in each sequence."""
    return word(seed, batch, head, i, j) >> 1 >= threshold(p)


def word(seed: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """The word of a pair, from 0 to 2^32 - 1, in int64; the arguments are int64 and broadcast."""
    four = philox(seed, j // 16 * 8 + j % 8, i // 16 * 8 + i % 8, head, batch)
    far_row, far_key = i // 8 % 2 == 1, j // 8 % 2 == 1
    return torch.where(far_row, torch.where(far_key, four[3], four[2]), torch.where(far_key, four[1], four[0]))


def philox(seed: torch.Tensor, *counter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The four words of Philox 4x32, from 0 to 2^32 - 1, in int64."""
    c0, c1, c2, c3 = counter
    low, high = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = ((second >> 32) & _WORD) ^ c1 ^ low, second & _WORD
        c2, c3 = ((first >> 32) & _WORD) ^ c3 ^ high, first & _WORD
        low, high = (low + KEY_STEPS[0]) & _WORD, (high + KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3
