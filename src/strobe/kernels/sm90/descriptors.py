"""TMA of Hopper's: copies of rows into shared memory, and the descriptors of a tensor's chunks."""

import torch

from strobe.kernels.common.descriptors import coordinates, descriptor
from strobe.kernels.gluon import TensorDescriptor, gl, gluon, mbarrier, tma_load


@gluon.jit
def copy_in(descriptors, chunks, barrier, start, n, batch, head, row, MORE: gl.constexpr = 0):
    """Start the copy of rows of one head; the barrier expects their bytes, and MORE. Rows from n on come as 0."""
    NUMBER: gl.constexpr = len(descriptors)
    BYTES: gl.constexpr = descriptors[0].block_type.nbytes + (descriptors[1].block_type.nbytes if NUMBER == 2 else 0)
    mbarrier.expect(barrier, BYTES + MORE)
    for c in gl.static_range(NUMBER):
        place = coordinates(descriptors[c], start, n, batch, head, row, c * chunks[0].shape[1])
        tma_load(descriptors[c], place, barrier, chunks[c].reshape(descriptors[c].block_type.shape))


def descriptors(x: torch.Tensor, rows: int, chunks: tuple[int, ...]) -> list[TensorDescriptor | None]:
    """TMA descriptors of x in blocks of `rows` rows of one head, one for each chunk of columns; None for one of no columns."""
    return [descriptor(x, rows, columns) if columns else None for columns in chunks]
