"""Channel: a ring of shared-memory buffers between one producer, which fills them by TMA, and its consumers.

Positions count 0, 1, 2, ... over the whole life of a CTA. Position g uses buffer g % stages for the (g // stages)-th
time, and a barrier's phase flips with every use: that is all the bookkeeping there is, and both sides derive it from g.
"""

from strobe.kernels.gluon import aggregate, gl, gluon, mbarrier, tma_load


@aggregate
class Channel:
    """buffers [stages, rows, columns]; `full` counts the arrival of a TMA copy, `empty` those of all consumers."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, stages):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def fill(self, position, descriptor, coordinates):
        """Producer: wait until the position's buffer is empty, then start the copy of one block into it."""
        slot = position % self.stages
        mbarrier.wait(self.empty.index(slot), ((position // self.stages) & 1) ^ 1)
        mbarrier.expect(self.full.index(slot), descriptor.block_type.nbytes)
        tma_load(descriptor, coordinates, self.full.index(slot), self.buffers.index(slot).reshape(descriptor.block_type.shape))

    @gluon.jit
    def wait(self, position):
        """Consumer: wait until the position has been filled."""
        mbarrier.wait(self.full.index(position % self.stages), (position // self.stages) & 1)

    @gluon.jit
    def buffer(self, position):
        return self.buffers.index(position % self.stages)

    @gluon.jit
    def release(self, position):
        """Consumer: this one has read the position's buffer."""
        mbarrier.arrive(self.empty.index(position % self.stages), count=1)


@gluon.jit
def make_channel(dtype: gl.constexpr, layout: gl.constexpr, stages: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr,
                 consumers: gl.constexpr):  # fmt: skip
    """A channel of empty buffers that each of `consumers` warpgroups must release. The caller fences."""
    buffers = gl.allocate_shared_memory(dtype, [stages, rows, columns], layout)
    full = make_barriers(stages, 1)
    empty = make_barriers(stages, consumers)
    return Channel(buffers, full, empty, stages)


@gluon.jit
def make_barriers(number: gl.constexpr, count: gl.constexpr):
    """`number` mbarriers that complete a phase after `count` arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=count)
    return barriers
