"""Philox 4x32 in Triton: the words of `strobe.dropout`, computed in 32 bits.

The first two rounds are nearly free: of the counter (key, row, head, batch) each word varies along one axis of a tile at most,
and so do most words after a round.
"""

import triton.language as tl

from strobe import dropout
from strobe.kernels.common.device_function import device_function

ROUNDS = tl.constexpr(dropout.ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = (tl.constexpr(x) for x in dropout.MULTIPLIERS)
KEY_STEP_0, KEY_STEP_1 = (tl.constexpr(x) for x in dropout.KEY_STEPS)


def four_words(seed, c0, c1, c2, c3):
    """The four words of Philox 4x32, uint32. seed: int64. c0 to c3, the counter: int32, which broadcast to a tile."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    c0 = c0.to(tl.uint32)
    c1 = c1.to(tl.uint32)
    c2 = c2.to(tl.uint32)
    c3 = c3.to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        first = c0.to(tl.uint64) * MULTIPLIER_0  # one instruction: both factors are known to have 32 bits
        second = c2.to(tl.uint64) * MULTIPLIER_1
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ low
        c1 = second.to(tl.uint32)
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ high
        c3 = first.to(tl.uint32)
        low = low + KEY_STEP_0
        high = high + KEY_STEP_1
    return c0, c1, c2, c3


compiled = device_function(four_words)


@device_function
def kept(seed, threshold, batch, head, i, j):
    """Whether dropout keeps the pairs of a tile, to which i and j broadcast. threshold: `strobe.dropout.threshold`."""
    zero = i * 0
    w0, w1, w2, w3 = compiled(seed, j // 16 * 8 + j % 8, i // 16 * 8 + i % 8, head + zero, batch + zero)
    far_key = (j & 8) != 0
    word = tl.where((i & 8) != 0, tl.where(far_key, w3, w2), tl.where(far_key, w1, w0))
    return (word >> 1).to(tl.int32) >= threshold
