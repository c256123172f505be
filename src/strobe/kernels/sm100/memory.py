"""The memory of a Blackwell CTA, or of a pair that works as one: layouts, the ring of K and V, what a Q stage owns."""

from strobe.kernels.common.channel import at
from strobe.kernels.gluon import (
    TensorMemoryLayout,
    aggregate,
    allocate_tensor_memory,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    tcgen05_commit,
    tensor_memory_descriptor,
    tensor_memory_descriptor_type,
)
from strobe.kernels.sm100.config import ROWS_PER_STAGE

# ---- layouts


@gluon.constexpr_function
def halves(dim, rank, C):
    """cga_layout of a tensor of which two CTAs have half of dimension `dim` each; one CTA has it all."""
    return [[int(i == dim) for i in range(rank)]] if C.two_ctas else []


@gluon.constexpr_function
def tensor_layout(columns, C):
    """Layout of C.rows x columns of tensor memory: a row is a lane."""
    return TensorMemoryLayout((ROWS_PER_STAGE, columns), col_stride=1, cga_layout=halves(0, 2, C), two_ctas=C.two_ctas)


@gluon.constexpr_function
def thread_rows(columns, C):
    """Layout of C.rows x columns in the registers of a warpgroup (of each CTA), a row a thread: how it reads tensor memory."""
    shape = [C.rows, columns]
    return tensor_memory_descriptor_type(gl.float32, shape, tensor_layout(columns, C), shape).get_reg_layout(num_warps=4)


@gluon.constexpr_function
def rows_of(columns, C):
    """Layout of one value for each row of `thread_rows`."""
    return gl.SliceLayout(1, thread_rows(columns, C))


@gluon.constexpr_function
def swizzled(columns, dim, C):
    """Layout of a block of 16-bit rows in shared memory, as TMA writes and the tensor core reads it; two CTAs halve `dim`."""
    own = columns // C.ctas if dim == 1 else columns
    return gl.NVMMASharedLayout(swizzle_byte_width=min(2 * own, 128), element_bitwidth=16, rank=2, cga_layout=halves(dim, 2, C))


# ---- the memory of a CTA


@aggregate
class Ring:
    """Blocks of K and V in turn: position 2g is K of the g-th block that the CTA works on, 2g + 1 its V. A block is a
    wide chunk and perhaps a narrow one; if only K has one, those have a ring of `narrow_stages` of their own, whose slots
    are empty whenever the wide chunk's is."""

    wide: gl.shared_memory_descriptor
    narrow: (gl.shared_memory_descriptor, gl.constexpr)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    C: gl.constexpr

    @gluon.jit
    def k(self, position):
        """The chunks of a block of K, [tile_kv, columns] each."""
        return self._chunks(position, len(self.C.chunks))

    @gluon.jit
    def v(self, position):
        """The chunks of a block of V, which two CTAs share by columns, not by keys."""
        chunks = self._chunks(position, len(self.C.chunks_v))
        if self.C.two_ctas:
            halved = ()
            for c in gl.static_range(len(chunks)):
                halved += (reinterpret(chunks[c], chunks[c].dtype, chunks[c].shape,
                                       swizzled(chunks[c].shape[1], 1, self.C)),)  # fmt: skip
            return halved
        else:
            return chunks

    @gluon.jit
    def _chunks(self, position, CHUNKS: gl.constexpr):
        wide = self.wide.index(position % self.C.kv_stages)
        if CHUNKS == 1:
            return (wide,)
        elif self.C.narrow_stages == self.C.kv_stages:
            return (wide, self.narrow.index(position % self.C.kv_stages))
        else:
            return (wide, self.narrow.index(position // 2 % self.C.narrow_stages))

    @gluon.jit
    def acquire(self, position):
        """Wait, as the load warp, until the position is empty; returns the barrier that says when it is full."""
        slot = position % self.C.kv_stages
        mbarrier.wait(self.empty.index(slot), ((position // self.C.kv_stages) & 1) ^ 1)
        return self.full.index(slot)

    @gluon.jit
    def wait(self, position):
        """Wait, as the MMA warp, until the position is full."""
        mbarrier.wait(self.full.index(position % self.C.kv_stages), (position // self.C.kv_stages) & 1)

    @gluon.jit
    def release(self, position):
        """Release the position, as the MMA warp: it is empty once all products so far are done."""
        commit(self.empty.index(position % self.C.kv_stages), self.k(position), self.C)


@aggregate
class Stage:
    """The buffers and barriers of one Q stage; q, o and out are tuples of chunks."""

    q: gl.tuple
    s: tensor_memory_descriptor
    p: tensor_memory_descriptor
    o: gl.tuple
    out: gl.tuple
    sums: gl.shared_memory_descriptor
    maxima: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    p_last: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    s_full: gl.shared_memory_descriptor
    o_full: gl.shared_memory_descriptor
    stats_full: gl.shared_memory_descriptor
    stats_empty: gl.shared_memory_descriptor
    out_full: gl.shared_memory_descriptor
    out_empty: gl.shared_memory_descriptor


@gluon.jit
def commit(barrier, operands, C: gl.constexpr):
    """Arrive once, in both CTAs if there are two, as soon as all products so far are done, those of `operands` among them."""
    if C.two_ctas:
        tcgen05_commit(barrier, descs=[operands[0]])
    else:
        tcgen05_commit(barrier)


@gluon.jit
def barriers(number: gl.constexpr, for_mma: gl.constexpr, C: gl.constexpr):
    """Make barriers of one arrival each. for_mma: the MMA warp, which runs in one CTA of a pair, waits for both of them, so
    the pair has one barrier; otherwise each CTA has its own."""
    made = mbarrier.allocate_mbarrier(batch=number, two_ctas=for_mma and C.two_ctas)
    for i in gl.static_range(number):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def make_ring(dtype: gl.constexpr, C: gl.constexpr):
    wide = gl.allocate_shared_memory(dtype, [C.kv_stages, C.tile_kv, C.chunks[0]], swizzled(C.chunks[0], 0, C))
    narrow = None
    if len(C.chunks) == 2:
        narrow = gl.allocate_shared_memory(dtype, [C.narrow_stages, C.tile_kv, C.chunks[1]], swizzled(C.chunks[1], 0, C))
    return Ring(wide, narrow, barriers(C.kv_stages, True, C), barriers(C.kv_stages, False, C), C)


@gluon.jit
def shared_chunks(dtype: gl.constexpr, chunks: gl.constexpr, C: gl.constexpr):
    """Allocate [q_stages, rows, columns] of shared memory for each chunk of columns."""
    buffers = ()
    for c in gl.static_range(len(chunks)):
        buffers += (gl.allocate_shared_memory(dtype, [C.q_stages, C.rows, chunks[c]], swizzled(chunks[c], 0, C)),)
    return buffers


@gluon.jit
def columns(tmem, dtype: gl.constexpr, first: gl.constexpr, number: gl.constexpr, C: gl.constexpr):
    """Elements of tensor memory from 32-bit column `first` on, `number` a row. (Triton 3.8 reinterprets no slices.)"""
    PACKED: gl.constexpr = 32 // dtype.primitive_bitwidth
    whole = reinterpret(tmem, dtype, [C.rows, PACKED * tmem.shape[1]], tensor_layout(number, C))
    return whole.slice(PACKED * first, number)


@gluon.jit
def make_stages(dtype: gl.constexpr, C: gl.constexpr):
    q = shared_chunks(dtype, C.chunks, C)
    out = ()
    if C.o_in_q:
        out = (q[0],)
    elif C.splits == 1:
        out = shared_chunks(dtype, C.chunks_v, C)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=halves(0, 1, C))
    stats = gl.allocate_shared_memory(gl.float32, [2 * C.q_stages, C.rows], layout)
    tmem = allocate_tensor_memory(gl.float32, [C.rows, C.tmem_allocation], tensor_layout(C.tile_kv, C))
    stages = ()
    STAGES: gl.constexpr = C.q_stages
    for w in gl.static_range(STAGES):
        stages += (make_stage(w, at(q, w), at(out, w), stats, tmem, dtype, C),)
    return stages


@gluon.jit
def make_stage(w: gl.constexpr, q, out, stats, tmem, dtype: gl.constexpr, C: gl.constexpr):
    S_FIRST: gl.constexpr = w * C.tile_kv
    O_FIRST: gl.constexpr = C.o_first(w)
    s = columns(tmem, gl.float32, S_FIRST, C.tile_kv, C)
    p = columns(tmem, dtype, S_FIRST + C.tile_kv // 2, C.tile_kv, C)
    o = (columns(tmem, gl.float32, O_FIRST, C.chunks_v[0], C),)
    if len(C.chunks_v) == 2:
        o += (columns(tmem, gl.float32, O_FIRST + C.chunks_v[0], C.chunks_v[1], C),)
    a = mbarrier.allocate_mbarrier(batch=3, two_ctas=C.two_ctas)
    mbarrier.init(a.index(0), count=1)
    mbarrier.init(a.index(1), count=2 if C.correction else 1)
    mbarrier.init(a.index(2), count=1)
    b = barriers(7, False, C)
    return Stage(q, s, p, o, out, stats.index(2 * w), stats.index(2 * w + 1), a.index(0), a.index(1), a.index(2),
                 b.index(0), b.index(1), b.index(2), b.index(3), b.index(4), b.index(5), b.index(6))  # fmt: skip
