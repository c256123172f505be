"""How the results of Hopper's backward leave: dQ is added to an accumulator, dK and dV are copied out, both by the TMA."""

from strobe.kernels.common.channel import swizzled
from strobe.kernels.common.descriptors import coordinates
from strobe.kernels.gluon import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    reinterpret,
    tma_add,
    tma_store,
    tma_store_wait,
)
from strobe.kernels.sm90.backward_config import PARTIAL_COLUMNS
from strobe.kernels.sm90.backward_tiles import HALF
from strobe.kernels.sm90.layouts import accumulator, rows_of

UNIT = gl.constexpr([[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0], [0, 8], [0, 16], [0, 32]])
"""The elements [row, column] of a 64 x 64 result in the order of registers, lanes and warps: of the number of an element in
dQ's accumulator, each bit's row and column. Bits 0 and 1 number four registers of a thread."""


PIECE = gl.constexpr(PARTIAL_COLUMNS)


@gluon.constexpr_function
def flat(rank):
    """Layout of float32 in shared memory, without swizzling."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)


@gluon.constexpr_function
def in_order(columns):
    """Layout of 64 x columns results in shared memory: each next number belongs to the next register, lane, warp."""
    return gl.SharedLinearLayout(UNIT.value[: 6 + columns.bit_length() - 1])


@gluon.jit
def add_to_dq(w: gl.constexpr, dq, place, g, K):
    """Add a share of 64 rows, of the CTA's g-th tile, to the accumulator, from number 64 * place on; or, if dQ has an order,
    give it to the writer. Group w's buffer in shared memory must be free, but for what the writer reads there."""
    COLUMNS: gl.constexpr = dq.shape[1]
    buffer = place_of_share(w, K, COLUMNS)
    if K.C.order != 0:
        await_writer(w, g, K)
    reinterpret(buffer, gl.float32, [64, COLUMNS], in_order(COLUMNS)).store(dq)
    fence_async_shared()
    if K.C.order == 0:
        start_addition(K, place, buffer)
    else:
        partition_barrier()
        mbarrier.arrive(K.memory.dq_full.index(w), count=1)


@gluon.jit
def place_of_share(w: gl.constexpr, K, COLUMNS: gl.constexpr):
    """Group w's place of dQ, as the TMA reads a share of so many columns."""
    place = K.memory.dq.index(w)
    if COLUMNS < 64:
        place = reinterpret(place, gl.float32, [64 // COLUMNS, COLUMNS // 4, 256], flat(2)).index(0)
    return place


@gluon.jit
def start_addition(K, place, share):
    """Start to add a share in shared memory to the accumulator, from number 64 * place on."""
    tma_add(K.outputs.dq[descriptor_of(share.shape[0])], [place // 4, 0], share)


@gluon.jit
def start_store(K, place, share):
    """Start to store a share there, to which nobody has added yet."""
    tma_store(K.outputs.dq[descriptor_of(share.shape[0])], [place // 4, 0], share)


@gluon.constexpr_function
def descriptor_of(rows):
    """Which of the accumulator's descriptors takes a share: that of 64 columns is the first."""
    return 0 if rows == 16 else 1


@gluon.constexpr_function
def first_share(w, C):
    """Where group w's share of a tile's dQ begins, in units of 64 numbers, of which 64 rows have `head_dim`."""
    return w * (C.head_dim if C.tile_q > 64 else C.share_columns[0])


@gluon.jit
def await_writer(w: gl.constexpr, given, K):
    """Wait until the writer needs group w's place of dQ no more, by which the group has given so many shares."""
    mbarrier.wait(K.memory.dq_empty.index(w), (given & 1) ^ 1)


# ---- dK and dV


@gluon.jit
def note_of_keys(w: gl.constexpr, K, result, work):
    """Write 1 to the note of 64 keys if their dK or dV has a NaN or an infinity, which a row may have caused that does not see
    them."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, result[0].type.layout)
    check = gl.full([HALF], 0.0, gl.float32, LAYOUT)
    for c in gl.static_range(len(result)):
        check += gl.convert_layout(gl.sum(result[c] * 0.0, 1), LAYOUT)
    blocks = (K.lengths.n_kv + HALF - 1) // HALF
    place = (work.batch * K.heads.heads_kv + work.head_kv) * blocks + work.first // HALF + w
    exists = work.first + w * HALF + gl.arange(0, HALF, LAYOUT) < work.n_kv
    gl.store(K.outputs.notes + place + gl.full([HALF], 0, gl.int32, LAYOUT), 1, mask=(check != 0.0) & exists)


@gluon.jit
def leave(w: gl.constexpr, K, dk, dv, tiles, work):
    """Copy group w's dK and dV to global memory, by way of its place of dQ, one after the other. tiles: of the CTA so far."""
    if K.C.order != 0:
        # Where there are two places for K, dQ of the last tile comes later.
        await_writer(w, gl.maximum(tiles - (K.C.k_stages - 1), 0), K)
    tma_store_wait(0)
    if K.outputs.dv[0].dtype == gl.float32:
        leave_in_pieces(w, K, dv, 1.0, K.outputs.dv[0], work)
        tma_store_wait(0)
        leave_in_pieces(w, K, dk, K.outputs.scale, K.outputs.dk[0], work)
    else:
        leave_rounded(w, K, dk, dv, work)


@gluon.jit
def leave_rounded(w: gl.constexpr, K, dk, dv, work):
    """dK and dV in the inputs' type, of which the place of dQ holds 128 columns."""
    leave_chunks(w, K, dv, 1.0, K.outputs.dv, work)
    tma_store_wait(0)
    leave_chunks(w, K, dk, K.outputs.scale, K.outputs.dk, work)


@gluon.jit
def leave_chunks(w: gl.constexpr, K, x, scale, descriptors, work):
    """dK or dV, all at once if the place of dQ holds all, else a chunk after the other."""
    if x[0].shape[1] < 128 or len(x) == 1:
        copy_out(w, K, x, 0, scale, descriptors, work)
    else:
        copy_out(w, K, (x[0],), 0, scale, descriptors, work)
        tma_store_wait(0)
        copy_out(w, K, (x[1],), x[0].shape[1], scale, (descriptors[1],), work)


@gluon.jit
def leave_in_pieces(w: gl.constexpr, K, x, scale, descriptor, work):
    """Group w's dK or dV in float32: pieces of PIECE columns leave by the two halves of its place of dQ in turn."""
    for c in gl.static_range(len(x)):
        copy_piece(w, K, x[c], c * x[0].shape[1], scale, descriptor, work)


@gluon.jit
def copy_piece(w: gl.constexpr, K, x, column: gl.constexpr, scale, descriptor, work):
    """Copy columns of float32 results to global memory, from a column on."""
    if x.shape[1] > PIECE:
        COLUMNS: gl.constexpr = x.shape[1] // 2
        left, right = x.reshape([HALF, 2, COLUMNS]).permute(0, 2, 1).split()
        copy_piece(w, K, gl.convert_layout(left, accumulator(COLUMNS)), column, scale, descriptor, work)
        copy_piece(w, K, gl.convert_layout(right, accumulator(COLUMNS)), column + COLUMNS, scale, descriptor, work)
    else:
        TURN: gl.constexpr = (column // PIECE) % 2
        halves = reinterpret(K.memory.dq.index(w), gl.float32, [2, HALF, PIECE], swizzled(gl.float32, x.shape[1]))
        tma_store_wait(1)  # what was in this half has left
        partition_barrier()
        result = x * scale
        if K.lengths.used_kv is not None:  # keys that exist and are not used
            key = work.first + w * HALF + gl.arange(0, HALF, rows_of(PIECE))
            result = gl.where((key < work.n_kv)[:, None], result, 0.0)
        halves.index(TURN).store(result)
        fence_async_shared()
        partition_barrier()
        place = coordinates(descriptor, work.start_kv, work.n_kv, work.batch, work.head_kv, work.first + w * HALF, column)
        tma_store(descriptor, place, halves.index(TURN).reshape(descriptor.block_type.shape))


@gluon.jit
def copy_out(w: gl.constexpr, K, x, column: gl.constexpr, scale, descriptors, work):
    """Copy chunks of group w's dK or dV to global memory, from a column on, by way of its place of dQ, which this thread knows
    to be free."""
    buffer = K.memory.dq.index(w)
    partition_barrier()
    staged = staged_chunks(x, buffer, descriptors[0].dtype)
    for c in gl.static_range(len(x)):
        result = x[c] * scale
        if K.lengths.used_kv is not None:  # keys that exist and are not used
            key = work.first + w * HALF + gl.arange(0, HALF, rows_of(x[c].shape[1]))
            result = gl.where((key < work.n_kv)[:, None], result, 0.0)
        staged[c].store(result.to(descriptors[c].dtype))
    fence_async_shared()
    partition_barrier()
    for c in gl.static_range(len(x)):
        place = coordinates(descriptors[c], work.start_kv, work.n_kv, work.batch, work.head_kv, work.first + w * HALF,
                            column + c * x[0].shape[1])  # fmt: skip
        tma_store(descriptors[c], place, staged[c].reshape(descriptors[c].block_type.shape))


@gluon.jit
def staged_chunks(x, buffer, dtype: gl.constexpr):
    """A place of dQ, seen as places for the chunks, one after the other."""
    chunks = ()
    for c in gl.static_range(len(x)):
        chunks += (part_of(buffer, dtype, x[c].shape[1], c * x[0].shape[1] // x[c].shape[1]),)
    return chunks


@gluon.jit
def part_of(buffer, dtype: gl.constexpr, columns: gl.constexpr, index: gl.constexpr):
    return reinterpret(buffer, dtype, [128 // columns, HALF, columns], swizzled(dtype, columns)).index(index)
