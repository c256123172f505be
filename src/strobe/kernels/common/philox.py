"""Philox 4x32-10 in Triton: the words of `strobe.dropout`, computed in 32 bits.

The first two rounds are nearly free: of the counter (key, row, head, batch) each word varies along one axis of a tile at most,
and so do most words after a round.
"""

import triton.language as tl

from strobe import dropout
from strobe.kernels.common.device_function import device_function

ROUNDS = tl.constexpr(dropout.ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = (tl.constexpr(x) for x in dropout.MULTIPLIERS)
KEY_STEP_0, KEY_STEP_1 = (tl.constexpr(x) for x in dropout.KEY_STEPS)


@device_function
def first_word(seed, c0, c1, c2, c3):
    """The first of the four words, uint32; seed: int64, a counter's words: integers that broadcast to a tile."""
    low = tl.cast(seed, tl.uint32)
    high = tl.cast(seed >> 32, tl.uint32)
    c0 = tl.cast(c0, tl.uint32)
    c1 = tl.cast(c1, tl.uint32)
    c2 = tl.cast(c2, tl.uint32)
    c3 = tl.cast(c3, tl.uint32)
    for _ in tl.static_range(ROUNDS):
        first = tl.cast(c0, tl.uint64) * MULTIPLIER_0  # one instruction: both factors are known to have 32 bits
        second = tl.cast(c2, tl.uint64) * MULTIPLIER_1
        c0 = tl.cast(second >> 32, tl.uint32) ^ c1 ^ low
        c1 = tl.cast(second, tl.uint32)
        c2 = tl.cast(first >> 32, tl.uint32) ^ c3 ^ high
        c3 = tl.cast(first, tl.uint32)
        low = low + KEY_STEP_0
        high = high + KEY_STEP_1
    return c0


@device_function
def kept(dropout, batch, head, i, j):
    """Whether pairs are kept; i and j broadcast to the tile. dropout: a tuple with a pointer to the seed and the threshold."""
    word = first_word(tl.load(dropout.seed), j, i, head, batch)
    return tl.cast(word >> 1, tl.int32) >= dropout.threshold
