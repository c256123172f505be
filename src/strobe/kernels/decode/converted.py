"""The copiers of a cache of 8 bits, which wgmma takes as numbers of 16: cp.async copies a step's bytes to rings of their own,
and four warps convert those of K, four those of V, to the type of the queries, exactly, into the rings that wgmma reads.

    shared memory   shape                               filled by        read by
    k, v (Bytes)    [steps under way, 1, tokens,        its converter    the thread that copied them
                    columns]

What is under way takes half as much of shared memory so, and the rings of 16 bits are short.
"""

from strobe.kernels.common.packed_halves import widened_8_bits
from strobe.kernels.decode.again import ALL, chosen_next, is_chosen
from strobe.kernels.decode.boxes import first_step
from strobe.kernels.decode.keys import is_key, look_up, rows_at
from strobe.kernels.decode.layouts import along
from strobe.kernels.decode.pieces import take_pieces
from strobe.kernels.gluon import (
    aggregate,
    async_copy,
    cp_async,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
)


@aggregate
class Bytes:
    """The rings of bytes, [steps under way, tokens, columns]."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor


@gluon.jit
def make_bytes(k, v, C: gl.constexpr):
    L: gl.constexpr = gl.SwizzledSharedLayout(vec=64, per_phase=1, max_phase=C.chunk // 64, order=[2, 1, 0])
    KIND: gl.constexpr = k.dtype.element_ty
    return Bytes(gl.allocate_shared_memory(KIND, [C.bytes_stages, 1, C.tokens, C.head_dim], L),
                 gl.allocate_shared_memory(KIND, [C.bytes_stages, 1, C.tokens, C.head_dim_v], L))  # fmt: skip


@gluon.constexpr_function
def bytes_layout(tokens, columns):
    """The layout of [1, tokens, columns]: a thread has 16 neighbours; of eight lanes that access shared memory together four
    have 64 neighbours of one row, and four those of the next, which the swizzles of both rings move to other banks."""
    registers, lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8]], [[0, 0, 16], [0, 0, 32], [0, 1, 0]]
    lanes += [[0, 0, 64], [0, 2, 0]] if columns == 128 else [[0, 2, 0], [0, 4, 0]]
    row = 4 * 128 // columns
    while row < tokens // 4:
        registers.append([0, row, 0])
        row *= 2
    warps = [[0, tokens // 4, 0], [0, tokens // 2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [1, tokens, columns])


@gluon.jit
def copy_bytes(block, base, rows, inside, COLUMNS: gl.constexpr):
    """Start copying a step's rows, at offsets `rows` from `base`, in one group; zeros where none is inside, and beyond
    COLUMNS."""
    L: gl.constexpr = bytes_layout(block.shape[1], block.shape[2])
    KEYS: gl.constexpr = gl.SliceLayout(2, L)
    rows, inside = gl.convert_layout(gl.where(inside, rows, 0), KEYS), gl.convert_layout(inside, KEYS)
    columns = along(block.shape[2], 2, L)
    mask = gl.max_constancy(gl.expand_dims(inside, 2) & (columns < COLUMNS), [1, 1, 16])
    cp_async(block, gl.multiple_of(base + gl.expand_dims(rows, 2) + columns, [1, 1, 16]), mask=mask)
    async_copy.commit_group()


@gluon.jit
def convert(channel, ring, position, least, UNDER_WAY: gl.constexpr, C: gl.constexpr):
    """Convert a step, if it is the `least`-th or a later one, and let it be read; its bytes are there when so many groups of
    copies are still under way."""
    async_copy.wait_group(UNDER_WAY)
    if position >= least:
        place, stage = channel.block(position)[0], ring.index(position % C.bytes_stages)
        raw = gl.reshape(stage.load(bytes_layout(stage.shape[1], stage.shape[2])), place.shape)
        full = channel.acquire(position)
        place.store(widened_8_bits(raw, place.dtype))
        fence_async_shared()
        partition_barrier()
        mbarrier.arrive(full, count=1)


@gluon.jit
def convert_rows(channel, ring, base, page_stride, row_stride, K, piece, job, state, COLUMNS: gl.constexpr):
    """Copy rows of a piece, if it is chosen, and convert what was copied a few steps before; state: how many steps the CTA
    copied before, and how many of them before it began anew, the number of the piece, and which pieces are chosen."""
    C: gl.constexpr = K.C
    KEYS: gl.constexpr = gl.SliceLayout(2, bytes_layout(C.tokens, ring.shape[3]))
    LAG: gl.constexpr = C.bytes_stages - 1
    position, least, number, chosen = state
    if is_chosen(chosen, number, job, C):
        cached = K.cached
        first, steps = first_step(piece, C)
        pages = look_up(cached, piece, first, C, KEYS)
        for i in range(steps):
            at = first + i * C.tokens
            inside = is_key(cached, piece, at, pages, C, KEYS)
            rows = rows_at(cached, at, pages, piece.entry, page_stride, row_stride, C, KEYS)
            pages = look_up(cached, piece, at + C.tokens, C, KEYS)
            copy_bytes(ring.index(position % C.bytes_stages), base, rows, inside, COLUMNS)
            convert(channel, ring, position - LAG, least, LAG, C)
            position += 1
    return position, least, number + 1, chosen


@gluon.jit
def convert_keys(memory, K, piece, job, state):
    cached = K.cached
    base = cached.k + piece.head.to(gl.int64) * cached.k_head
    return convert_rows(memory.k, memory.bytes.k, base, cached.k_page, cached.k_row, K, piece, job, state, K.DIM)


@gluon.jit
def convert_values(memory, K, piece, job, state):
    cached = K.cached
    base = cached.v + piece.head.to(gl.int64) * cached.v_head
    return convert_rows(memory.v, memory.bytes.v, base, cached.v_page, cached.v_row, K, piece, job, state, K.DIM_V)


@gluon.jit
def convert_all(CONVERT: gl.constexpr, channel, ring, memory, K):
    """All pieces of a CTA, and again those that are chosen."""
    C: gl.constexpr = K.C
    LAG: gl.constexpr = C.bytes_stages - 1
    position, chosen = gl.to_tensor(0), gl.to_tensor(ALL)
    while chosen != 0:
        position, least, _, _ = take_pieces(CONVERT, memory, K, (position, position, 0 * chosen, chosen))
        for i in gl.static_range(LAG):
            convert(channel, ring, position - LAG + i, least, LAG - i - 1, C)
        chosen = chosen_next(memory.again, chosen, C)


@gluon.jit
def converter_of_keys(memory, K):
    convert_all(convert_keys, memory.k, memory.bytes.k, memory, K)


@gluon.jit
def converter_of_values(memory, K):
    convert_all(convert_values, memory.v, memory.bytes.v, memory, K)
