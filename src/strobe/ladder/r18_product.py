"""Rung 18: the product's own kernel, persistent: strobe.kernels.sm90.forward, through the public door.

q, k, v [heads, S, D], float16 or bfloat16. What it adds to rung 17: as many CTAs as the GPU has multiprocessors, which take
tile after tile, so that one tile's store and the next one's first copies go under products; heads in bundles that fit the L2
cache; tiles that were measured for this GPU. And what a product needs: masks, scores, packed sequences, a proof of when to redo
a block."""

import strobe


def attention(q, k, v):
    """The kernel takes [batch, S, heads, D] with any strides, so nothing is copied."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return strobe.attention(q, k, v, backend="sm90")[0].transpose(0, 1)
