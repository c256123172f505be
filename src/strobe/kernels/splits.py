"""When to split the keys of a problem into parts that run beside each other (split-KV), and into how many.

A tile of queries is one CTA's work. Where there are fewer tiles than a GPU can run at once, as in decoding, the rest of it
idles while each CTA walks through all of its keys. Parts of the keys fill it; `combine` then merges their results.
(Dao et al. 2023, "Flash-Decoding for long-context inference".)
"""

from __future__ import annotations

COMBINE_BLOCKS = 4
"""What the second launch costs, in blocks of keys: an assumption, not a measurement. A block takes about 1 us where it runs
at a B200's peak rate (4 * 256 * 128 * 128 FLOP at 2250 TFLOP/s over 148 SMs), and a launch a few of them."""


def choose_splits(tiles: int, blocks: int, workers: int) -> int:
    """How many parts to split the keys into: 1 if that does not pay.

    tiles: of queries, over all heads and sequences. blocks: of keys, that the longest tile sees. workers: CTAs (or pairs of
    them) that the GPU runs at once. All parts run at once, so there are at most workers // tiles of them, and no more than
    it takes to make the longest part as short as that allows.
    """
    most = min(workers // tiles, blocks) if tiles else 0
    if most < 2:
        return 1
    longest = -(-blocks // most)
    return -(-blocks // longest) if blocks - longest > COMBINE_BLOCKS else 1
