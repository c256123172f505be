"""Channel: a ring of shared-memory buffers between one producer, which fills them by TMA, and its consumers.

Positions count 0, 1, 2, ... over the whole life of a CTA. Position g uses buffer g % stages for the (g // stages)-th
time, and a barrier's phase flips with every use: that is all the bookkeeping there is, and both sides derive it from g.
"""

from strobe.kernels.gluon import aggregate, gl, gluon, mbarrier


@aggregate
class Channel:
    """chunks: a tuple of [stages, rows, columns], the chunks of columns of a block. `full` counts the arrival of TMA copies,
    `empty` those of all consumers."""

    chunks: gl.tuple
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, chunks, full, empty, stages):
        self.chunks = chunks
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def slot(self, position):
        """The buffer of a position. Unsigned, a division by a power of two is one instruction, not six, in a chain that a
        product waits for: head dim 64 gained 3%."""
        return (position.to(gl.uint32) % self.stages).to(gl.int32)

    @gluon.jit
    def phase(self, position):
        """The phase (0 or 1) that the barriers of a position's buffer are in when it is that position's turn."""
        return ((position.to(gl.uint32) // self.stages) & 1).to(gl.int32)

    @gluon.jit
    def block(self, position):
        """The chunks of a position, [rows, columns] each."""
        return at(self.chunks, self.slot(position))

    @gluon.jit
    def acquire(self, position):
        """Producer: wait until the position is empty; the barrier that says when it is full."""
        slot = self.slot(position)
        mbarrier.wait(self.empty.index(slot), self.phase(position) ^ 1)
        return self.full.index(slot)

    @gluon.jit
    def wait(self, position, pred=True):
        """Consumer: wait until the position is full; not if `pred` is false."""
        mbarrier.wait(self.full.index(self.slot(position)), self.phase(position), pred=pred)

    @gluon.jit
    def release(self, position, pred=True):
        """Consumer: this one has read the position; not if `pred` is false."""
        mbarrier.arrive(self.empty.index(self.slot(position)), count=1, pred=pred)


@gluon.jit
def at(chunks, index):
    """The index-th buffer of each chunk."""
    chosen = ()
    for c in gl.static_range(len(chunks)):
        chosen += (chunks[c].index(index),)
    return chosen


@gluon.jit
def make_chunks(dtype: gl.constexpr, number: gl.constexpr, rows: gl.constexpr, wide: gl.constexpr, narrow: gl.constexpr):
    """[number, rows, wide] of shared memory, and [number, rows, narrow] if `narrow` is not 0, swizzled as TMA writes and the
    tensor core reads it."""
    chunks = (gl.allocate_shared_memory(dtype, [number, rows, wide], swizzled(dtype, wide)),)
    if narrow > 0:
        chunks += (gl.allocate_shared_memory(dtype, [number, rows, narrow], swizzled(dtype, narrow)),)
    return chunks


@gluon.constexpr_function
def swizzled(dtype, columns):
    bits = dtype.primitive_bitwidth
    return gl.NVMMASharedLayout(swizzle_byte_width=min(columns * bits // 8, 128), element_bitwidth=bits, rank=2)


@gluon.jit
def make_channel(dtype: gl.constexpr, stages: gl.constexpr, rows: gl.constexpr, wide: gl.constexpr, narrow: gl.constexpr,
                 consumers: gl.constexpr):  # fmt: skip
    """A channel of empty buffers that each of `consumers` warpgroups must release. The caller fences."""
    chunks = make_chunks(dtype, stages, rows, wide, narrow)
    return Channel(chunks, make_barriers(stages, 1), make_barriers(stages, consumers), stages)


@gluon.jit
def make_barriers(number: gl.constexpr, count: gl.constexpr):
    """`number` mbarriers that complete a phase after `count` arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit
def invalidate(barriers):
    """Give up barriers that no role has, at the end of a kernel: so their memory is theirs until then. Triton gives it to
    others behind their last use, and a GPU that is taken from a process puts a barrier back there (docs/upstream.md)."""
    NUMBER: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(NUMBER):
        mbarrier.invalidate(barriers.index(i))
