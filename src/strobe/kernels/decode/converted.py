"""The way of a cache of 8 bits to wgmma, which takes float16: a warp copies a step's bytes by TMA to a ring of their own, and
others convert them, exactly, into the rings that wgmma reads. Beside one group of warps that multiply four warps convert K,
and four V; beside two groups four convert both.

    shared memory   shape                               filled by        read by
    bytes           chunks of [steps under way,         the copier       converters
    (Channel)       tokens, columns], of K, then of V

What is under way takes half as much of shared memory so, and the rings of 16 bits are short. Values that are not of a piece
become zeros as they are converted.
"""

from strobe.kernels.common.channel import Channel, make_barriers, swizzled
from strobe.kernels.common.packed_halves import widened_8_bits
from strobe.kernels.decode.again import ALL, chosen_next, is_chosen
from strobe.kernels.decode.board import take_all, tell_of, tell_of_the_end
from strobe.kernels.decode.boxes import copy_boxes, copy_steps, first_step, has_others
from strobe.kernels.decode.pieces import take_pieces
from strobe.kernels.decode.queries import ask_in_turn
from strobe.kernels.gluon import fence_async_shared, gl, gluon, mbarrier, partition_barrier


@gluon.jit
def make_bytes(dtype: gl.constexpr, C: gl.constexpr):
    """The ring of bytes. The caller fences."""
    WIDE: gl.constexpr = C.copied_chunk
    chunks = ()
    for _ in gl.static_range((C.head_dim + C.head_dim_v) // WIDE):
        chunks += (gl.allocate_shared_memory(dtype, [C.bytes_stages, C.tokens, WIDE], swizzled(dtype, WIDE)),)
    return Channel(chunks, make_barriers(C.bytes_stages, 1), make_barriers(C.bytes_stages, C.converters), C.bytes_stages)


# ---- the copier


@gluon.jit
def copy_bytes(memory, K, piece, at, pages, position):
    """Copy the bytes of a step of K and V; position: how many steps the CTA copied before."""
    C: gl.constexpr = K.C
    bytes = memory.bytes
    WIDE: gl.constexpr = C.copied_chunk
    OF_K: gl.constexpr = C.head_dim // WIDE
    barrier, slot = bytes.acquire(position), bytes.slot(position)
    mbarrier.expect(barrier, C.tokens * (C.head_dim + C.head_dim_v))
    for c in gl.static_range(OF_K):
        copy_boxes(memory.k_desc, bytes.chunks[c], slot, barrier, K.cached, pages, piece.head, at, c * WIDE, C)
    for c in gl.static_range(C.head_dim_v // WIDE):
        copy_boxes(memory.v_desc, bytes.chunks[OF_K + c], slot, barrier, K.cached, pages, piece.head, at, c * WIDE, C)
    return position + 1


@gluon.jit
def take_bytes(memory, K, piece, job, state):
    """Copy Q of a piece, if that is asked for, and its bytes, if the piece is chosen; state: how many steps and how many pieces
    the CTA copied before, the number of the piece, which pieces are chosen, and of how many the others were told."""
    C: gl.constexpr = K.C
    position, taken, number, chosen, told = state
    if C.tells:
        tell_of(memory.board, told, piece, job)
    if is_chosen(chosen, number, job, C):
        if C.asks_q:
            ask_in_turn(memory, K, piece, taken)
        position = copy_steps(copy_bytes, memory, K, piece, position)
        taken += 1
    return position, taken, number + 1, chosen, told + 1


@gluon.jit
def copier_of_bytes(memory, K):
    position, taken, chosen, told = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(ALL), gl.to_tensor(0)
    while chosen != 0:
        position, taken, _, _, told = take_pieces(take_bytes, memory, K, (position, taken, 0 * chosen, chosen, told))
        if K.C.tells:
            tell_of_the_end(memory.board, told)
            told += 1
        chosen = chosen_next(memory.again, chosen, K.C)


# ---- converters


@gluon.constexpr_function
def bytes_layout(tokens):
    """The layout of [tokens, 64 columns]: a thread has 16 neighbours; of eight lanes that access shared memory together four
    have a row, and four the next one, which the swizzles of both rings move to other banks."""
    registers, row = [[0, 1], [0, 2], [0, 4], [0, 8]], 8
    while row < tokens // 4:
        registers.append([row, 0])
        row *= 2
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[tokens // 4, 0], [tokens // 2, 0]], [], [tokens, 64])


@gluon.jit
def load_bytes(bytes, FIRST: gl.constexpr, CHUNKS: gl.constexpr, position, C: gl.constexpr):
    """Chunks of a step's bytes."""
    raw = ()
    for c in gl.static_range(CHUNKS):
        raw += (bytes.chunks[FIRST + c].index(bytes.slot(position)).load(bytes_layout(C.tokens)),)
    return raw


@gluon.jit
def store_halves(channel, position, raw, CLEARED: gl.constexpr, piece, at, C: gl.constexpr):
    """Wait until a step may be written, and store what its bytes are as float16; without those that are not of the piece, if
    CLEARED. The barrier that says when it is there."""
    full, place = channel.acquire(position), channel.block(position)[0]
    if CLEARED:
        if has_others(piece, at, C):  # zeros: 0 * NaN would be NaN
            keys = at + gl.expand_dims(gl.arange(0, C.tokens, gl.SliceLayout(1, bytes_layout(C.tokens))), 1)
            store_chunks(place, raw, (keys >= piece.begin) & (keys < piece.end))
        else:
            store_chunks(place, raw, None)
    else:
        store_chunks(place, raw, None)
    return full


@gluon.jit
def store_chunks(place, raw, inside):
    """Store chunks of bytes, or those that are `inside`, as float16."""
    WIDE: gl.constexpr = raw[0].shape[1]
    for c in gl.static_range(len(raw)):
        halves = widened_8_bits(raw[c], place.dtype)
        if inside is not None:
            halves = gl.where(inside, halves, 0.0)
        place.slice(c * WIDE, WIDE, 1).store(halves)


@gluon.jit
def convert_step(KEYS: gl.constexpr, VALUES: gl.constexpr, memory, K, piece, at, position):
    """Convert K of a step, or V, or both, and let it be read."""
    C: gl.constexpr = K.C
    OF_K: gl.constexpr = C.head_dim // C.copied_chunk
    memory.bytes.wait(position)
    if KEYS:
        k = load_bytes(memory.bytes, 0, OF_K, position, C)
    if VALUES:
        v = load_bytes(memory.bytes, OF_K, C.head_dim_v // C.copied_chunk, position, C)
    if KEYS:
        k_full = store_halves(memory.k, position, k, False, piece, at, C)
    if VALUES:
        v_full = store_halves(memory.v, position, v, True, piece, at, C)
    fence_async_shared()
    partition_barrier()
    if KEYS:
        mbarrier.arrive(k_full, count=1)
    if VALUES:
        mbarrier.arrive(v_full, count=1)
    memory.bytes.release(position)


@gluon.jit
def convert_piece(KEYS: gl.constexpr, VALUES: gl.constexpr, memory, K, piece, job, state):
    """Convert the steps of a piece, if it is chosen; state: how many steps the CTA copied before, the number of the piece, and
    which pieces are chosen."""
    position, number, chosen = state
    if is_chosen(chosen, number, job, K.C):
        first, steps = first_step(piece, K.C)
        for i in range(steps):
            convert_step(KEYS, VALUES, memory, K, piece, first + i * K.C.tokens, position + i)
        position += steps
    return position, number + 1, chosen


@gluon.jit
def take_keys(memory, K, piece, job, state):
    return convert_piece(True, False, memory, K, piece, job, state)


@gluon.jit
def take_values(memory, K, piece, job, state):
    return convert_piece(False, True, memory, K, piece, job, state)


@gluon.jit
def take_both(memory, K, piece, job, state):
    return convert_piece(True, True, memory, K, piece, job, state)


@gluon.jit
def convert_all(TAKE: gl.constexpr, memory, K):
    """All pieces of a CTA, and again those that are chosen."""
    position, chosen, told = gl.to_tensor(0), gl.to_tensor(ALL), gl.to_tensor(0)
    while chosen != 0:
        told, state = take_all(TAKE, memory, K, told, (position, 0 * chosen, chosen))
        position, _, _ = state
        chosen = chosen_next(memory.again, chosen, K.C)


@gluon.jit
def converter_of_keys(memory, K):
    convert_all(take_keys, memory, K)


@gluon.jit
def converter_of_values(memory, K):
    convert_all(take_values, memory, K)


@gluon.jit
def converter(memory, K):
    convert_all(take_both, memory, K)
