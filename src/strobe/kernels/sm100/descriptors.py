"""TMA on Blackwell: copies of rows between global and shared memory, and the descriptors of a tensor's chunks."""

import torch

from strobe.kernels.common.descriptors import coordinates, descriptor
from strobe.kernels.gluon import TensorDescriptor, gl, gluon, mbarrier, reinterpret, tma_load, tma_store
from strobe.kernels.sm100.config import Config


@gluon.jit
def as_block(chunk, descriptor):
    """[rows, columns] of shared memory in the descriptor's block shape."""
    if len(descriptor.layout.cga_layout) == 0:
        return chunk.reshape(descriptor.block_type.shape)
    else:
        return reinterpret(chunk, descriptor.dtype, descriptor.block_type.shape, descriptor.layout)


@gluon.jit
def copy_in(descriptors, chunks, barrier, start, n, batch, head, row):
    """Start the copy of rows of one head; the barrier expects their bytes. Rows from n on come as 0."""
    NUMBER: gl.constexpr = len(descriptors)
    mbarrier.expect(barrier, descriptors[0].nbytes_per_cta + (descriptors[1].nbytes_per_cta if NUMBER == 2 else 0))
    for c in gl.static_range(NUMBER):
        place = coordinates(descriptors[c], start, n, batch, head, row, c * chunks[0].shape[1])
        tma_load(descriptors[c], place, barrier, as_block(chunks[c], descriptors[c]))


@gluon.jit
def copy_out(descriptors, chunks, work, row):
    """Start the copy of the rows of O from `row` on to global memory."""
    for c in gl.static_range(len(descriptors)):
        place = coordinates(descriptors[c], work.start_q, work.n_q, work.batch, work.head, row, c * chunks[0].shape[1])
        tma_store(descriptors[c], place, as_block(chunks[c], descriptors[c]))


def descriptors(
    x: torch.Tensor, rows: int, chunks: tuple[int, ...], halved: int, config: Config
) -> list[TensorDescriptor | None]:
    """Two TMA descriptors of x in blocks of `rows` rows of one head, one for each chunk of columns; None if there is one chunk
    only. halved: whether two CTAs halve a block's rows (0) or columns (1)."""
    split = halved if config.two_ctas else None
    made: list[TensorDescriptor | None] = [descriptor(x, rows, columns, split) for columns in chunks]
    return made if len(made) == 2 else [*made, None]
