"""Attention of many rows over a cache, in Gluon, for Hopper: TMA, wgmma, warp specialisation.

The schedule, the terms, the results and their merging are those of `forward`, the copies and scores those of `boxes`. Every
role finds its CTA's pieces of work from the lengths by itself or, of two groups or of 8 bits, the first copier does, and tells
the others (see `board`). The roles:

    role            warps                          work
    copier of K     1                              copies steps of K in (TMA)
    copier of V     1                              copies steps of V in; clears what is not of the piece in its first and last
    copier of rows  4                              in place of both: copies steps of K and V in, whole rows (cp.async)
    copier of bytes 1                              in place of both: copies steps of K and V of 8 bits (TMA), for
    converters      4 of both, or of each          the same in float16 (see `converted`)
    multiplier      4 for each 64 rows of a tile   S = Q K^T and O += P V (wgmma), the softmax in between; the result, or part
                    or, of two groups, one each

    shared memory   shape                              filled by      read by
    k, v (Channel)  a chunk of [stages, tokens,        its copier     the multiplier
                    chunk] each: columns in chunks,
                    keys in boxes, which TMA copies,
                    or one chunk of whole rows, or
                    groups of 8 keys
    q               [groups * chunks, rows of a        a multiplier   itself
                    group, chunk]
    notes           [groups * NOTES, 1]                a multiplier   itself: numbers of a piece, where there are splits
    sums            [groups * chunks, squares of 8     a multiplier   itself: O of a part's splits, where registers are Q's
                    rows and 8 columns]

    barrier         arrivals                           says
    full            TMA bytes, or the copier of V,     a step is there
                    or the copier of rows
    v.full, last    TMA bytes                          a step of V is there that must be cleared
    empty           one of each multiplier             a step has been read

A multiplier issues S(i) = Q K(i)^T and O += P(i - 1) V(i - 1) together, and turns S(i) into P(i) while the second still runs.
An instruction of wgmma waits until the tensor core has taken those ahead of it: what hides most of a softmax is another group's
products.

A box lies in one page. TMA copies zeros for a page that is not there, and for keys beyond a contiguous cache. Keys beyond a
length may be anything, NaN too: their scores are masked, and their values are set to zero where they lie.

The copier of rows writes zeros for all that is not a key of the piece. What it copied the tensor cores may read when each of
its threads has waited for its own copies and fenced. It hands a step over some steps later, when that waits for nothing.
"""

import triton.language as tl

from strobe.kernels.common.channel import Channel, invalidate, make_barriers, swizzled
from strobe.kernels.common.dependent_launch import take_turn
from strobe.kernels.common.groups import block_of, make_groups
from strobe.kernels.common.packed_halves import rounded
from strobe.kernels.decode.again import ALL, Again, bit_of, chosen_next, is_chosen, make_again, out_of_range, tell
from strobe.kernels.decode.arguments import NUMBERS, Cached, Chain, Job, Kernel, Outputs, Piece, Terms
from strobe.kernels.decode.board import Board, make_board, take_all, tell_of, tell_of_the_end
from strobe.kernels.decode.boxes import (
    accumulator,
    ask_for_queries,
    beside,
    clear_groups,
    clear_values,
    copy_boxes,
    copy_groups,
    copy_steps,
    first_step,
    has_others,
    lane_sums,
    masked,
    misses_a_page,
    no_output,
    rescaled,
    rows_layout,
    rows_of,
    rows_of_queries,
    scale_of_scores,
    wait_output,
    weights_of,
)
from strobe.kernels.decode.converted import converter, converter_of_keys, converter_of_values, copier_of_bytes, make_bytes
from strobe.kernels.decode.keys import is_key, largest, look_up, power_of, rows_at
from strobe.kernels.decode.latent import make_latent_memory, take_latent
from strobe.kernels.decode.latent_turns import left_group, make_turns_memory, right_group
from strobe.kernels.decode.layouts import lanes
from strobe.kernels.decode.pieces import ask_ahead, take_pieces
from strobe.kernels.decode.results import deliver, leave_parts
from strobe.kernels.decode.schedule import Requests
from strobe.kernels.decode.scores import finite
from strobe.kernels.decode.splits import added, ends_part
from strobe.kernels.gluon import (
    aggregate,
    async_copy,
    cp_async,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tensor_descriptor,
    warpgroup_mma,
    warpgroup_mma_wait,
)

NOTES = gl.constexpr(22)
"""Numbers of a piece and its job."""


@aggregate
class Memory:
    """The descriptors of K and V, and the shared memory of a CTA: see the tables above."""

    k_desc: (gl.tensor, tensor_descriptor)
    v_desc: (gl.tensor, tensor_descriptor)
    q_desc: (gl.constexpr, tensor_descriptor)
    q: gl.shared_memory_descriptor
    k: Channel
    v: Channel
    again: (Again, gl.constexpr)
    notes: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    board: (Board, gl.constexpr)
    bytes: (Channel, gl.constexpr)
    turns: (Channel, gl.constexpr)


@gluon.jit
def make_memory(k_desc, v_desc, q_desc, asked: gl.constexpr, dtype: gl.constexpr, C: gl.constexpr):
    """asked: the type of Q where TMA copies it; dtype: of what is multiplied. The caller fences."""
    shape: gl.constexpr = [C.groups * (C.head_dim // C.chunk), C.rows // C.groups, C.chunk]
    OF_Q: gl.constexpr = asked if C.asks_q else dtype
    q = gl.allocate_shared_memory(OF_Q, shape, swizzled(OF_Q, C.chunk))
    notes, sums, board, bytes, turns, again = q, q, None, None, None, None
    if C.optimistic:
        again = make_again(C.groups)
    if C.bytes_stages > 0:
        bytes = make_bytes(k_desc.dtype, C)
        if C.asks_q:
            turns = Channel((), make_barriers(1, 1), make_barriers(1, C.groups), 1)
    if C.tells:
        board = make_board(C.groups + max(C.converters, 1))
    if C.split:
        notes = gl.allocate_shared_memory(gl.int32, [C.groups * NOTES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if C.sums_wait:
        squares: gl.constexpr = [C.groups * (C.head_dim_v // C.chunk), C.rows // C.groups // 8, C.chunk // 8, 8, 8]
        sums = gl.allocate_shared_memory(gl.float32, squares, gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    k, v = make_ring(dtype, C.head_dim, 0, C), make_ring(dtype, C.head_dim_v, 1, C)
    return Memory(k_desc, v_desc, q_desc, q, k, v, again, notes, sums, board, bytes, turns)


@gluon.jit
def make_ring(dtype: gl.constexpr, columns: gl.constexpr, more: gl.constexpr, C: gl.constexpr):
    """A channel of steps, and so many barriers more behind those of its steps."""
    chunks = ()
    if C.grouped:
        chunks += (make_groups(dtype, C.stages, C.tokens, columns),)
    else:
        for _ in gl.static_range(columns // C.chunk):
            chunks += (gl.allocate_shared_memory(dtype, [C.stages, C.tokens, C.chunk], swizzled(dtype, C.chunk)),)
    return Channel(chunks, make_barriers(C.stages + more, 1), make_barriers(C.stages, C.groups), C.stages)


# ---- copiers


@gluon.jit
def copy_step(descriptor, channel, position, barrier, cached, pages, page_stride, row_stride, head, first, C: gl.constexpr):
    """Start copying the step from key `first` on to its place, whose turn it is."""
    if C.grouped:
        block = channel.block(position)[0]
        copy_groups(descriptor, block, barrier, cached, pages, page_stride, row_stride, head, first, C)
    else:
        slot = channel.slot(position)
        for c in gl.static_range(len(channel.chunks)):
            copy_boxes(descriptor, channel.chunks[c], slot, barrier, cached, pages, head, first, c * C.chunk, C)


@gluon.jit
def wait_for_earlier(channel, position, C: gl.constexpr):
    """Wait until so many steps before this one are there that no more are under way than may be."""
    if C.under_way > 0:
        channel.wait(gl.maximum(position - C.under_way, 0), pred=position >= C.under_way)


@gluon.jit
def copy_keys(memory, K, piece, at, pages, state):
    """Copy K of a step, with which Q comes in a piece's first one; state: how many steps the CTA copied before, and up to the
    piece's first one."""
    C: gl.constexpr = K.C
    position, begun = state
    wait_for_earlier(memory.k, position, C)
    barrier = memory.k.acquire(position)
    if C.asks_q:
        if position == begun:
            mbarrier.expect(barrier, (C.tokens + C.rows) * C.head_dim * 2)
            ask_for_queries(memory.q_desc, memory.q, barrier, K.requests, piece, C, K.GROUP)
        else:
            mbarrier.expect(barrier, C.tokens * C.head_dim * 2)
    else:
        mbarrier.expect(barrier, C.tokens * C.head_dim * 2)
    k_page, k_row = K.cached.k_page, K.cached.k_row
    copy_step(memory.k_desc, memory.k, position, barrier, K.cached, pages, k_page, k_row, piece.head, at, C)
    return position + 1, begun


@gluon.jit
def copy_values(memory, K, piece, at, pages, state):
    """Copy V of a step, without values that are not of the piece; state: how many steps the CTA copied before, and how many of
    them it cleared."""
    C: gl.constexpr = K.C
    position, cleared = state
    clears = has_others(piece, at, C)
    wait_for_earlier(memory.v, position, C)
    full = memory.v.acquire(position)
    barrier = memory.v.full.index(gl.where(clears, C.stages, memory.v.slot(position)))
    mbarrier.expect(barrier, C.tokens * C.head_dim_v * 2)
    v_page, v_row = K.cached.v_page, K.cached.v_row
    copy_step(memory.v_desc, memory.v, position, barrier, K.cached, pages, v_page, v_row, piece.head, at, C)
    if clears:
        mbarrier.wait(barrier, cleared & 1)
        values = memory.v.block(position)
        for c in gl.static_range(len(values)):
            if C.grouped:
                clear_groups(values[c], piece, at, C)
            else:
                clear_values(values[c], piece, at, C)
        fence_async_shared()
        partition_barrier()
        mbarrier.arrive(full, count=1)
        cleared += 1
    return position + 1, cleared


@gluon.jit
def take_keys(memory, K, piece, job, state):
    """Copy K of a piece, if it is chosen; state: how many steps the CTA copied before, and up to the first one of the piece
    before, the number of the piece, which pieces are chosen, and of how many the others were told."""
    C: gl.constexpr = K.C
    copied, number, chosen, told = state
    if C.tells:
        tell_of(memory.board, told, piece, job)
    position, before = copied
    if is_chosen(chosen, number, job, C):
        if C.asks_q:  # a group that has read the first step of a piece holds Q; long before the ring is around again
            near = (before < position) & (position - before < C.stages)
            mbarrier.wait(memory.k.empty.index(memory.k.slot(before)), memory.k.phase(before), pred=near)
        position, before = copy_steps(copy_keys, memory, K, piece, (position, position))
    return (position, before), number + 1, chosen, told + 1


@gluon.jit
def take_values(memory, K, piece, job, state):
    """The same of V; state: of `copy_values`, the number of the piece, and which pieces are chosen."""
    copied, number, chosen = state
    if is_chosen(chosen, number, job, K.C):
        copied = copy_steps(copy_values, memory, K, piece, copied)
    return copied, number + 1, chosen


@gluon.jit
def copier_of_keys(memory, K):
    copied, chosen, told = (gl.to_tensor(0), gl.to_tensor(0)), gl.to_tensor(ALL), gl.to_tensor(0)
    while chosen != 0:
        copied, _, _, told = take_pieces(take_keys, memory, K, (copied, 0 * chosen, chosen, told))
        if K.C.tells:
            tell_of_the_end(memory.board, told)
            told += 1
        chosen = chosen_next(memory.again, chosen, K.C)


@gluon.jit
def copier_of_values(memory, K):
    copied, chosen, told = (gl.to_tensor(0), gl.to_tensor(0)), gl.to_tensor(ALL), gl.to_tensor(0)
    while chosen != 0:
        told, state = take_all(take_values, memory, K, told, (copied, 0 * chosen, chosen))
        copied, _, _ = state
        chosen = chosen_next(memory.again, chosen, K.C)


# ---- the copier by cp.async


@gluon.constexpr_function
def lag_of(C):
    """How many steps are being copied beside the one that is told to be there; more, and the first of a piece is told late."""
    return min(2, C.stages - 2)  # an H100: 2 to 4 % faster than 4, where a CTA has 16 steps


@gluon.jit
def copy_rows(block, base, rows, inside, COLUMNS: gl.constexpr):
    """Start copying a step's rows, at offsets `rows` from `base`, in one group; zeros where none is inside, and beyond
    COLUMNS."""
    WIDE: gl.constexpr = block.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDE, WIDE // 8], [gl.num_warps(), 1], [1, 0])
    KEYS: gl.constexpr = gl.SliceLayout(1, L)
    rows = gl.convert_layout(gl.reshape(gl.where(inside, rows, 0), [block.shape[0]]), KEYS)
    inside = gl.convert_layout(gl.reshape(inside, [block.shape[0]]), KEYS)
    columns = gl.expand_dims(gl.arange(0, WIDE, gl.SliceLayout(0, L)), 0)
    mask = gl.max_constancy(gl.expand_dims(inside, 1) & (columns < COLUMNS), [1, 8])
    cp_async(block, gl.multiple_of(base + gl.expand_dims(rows, 1) + columns, [1, 16]), mask=mask)  # bytes
    async_copy.commit_group()


@gluon.jit
def hand_over(channel, position, UNDER_WAY: gl.constexpr):
    """Let a step be read, if there is one: it is there when so many groups of copies are still under way."""
    async_copy.wait_group(UNDER_WAY)
    fence_async_shared()
    partition_barrier()
    mbarrier.arrive(channel.full.index(channel.slot(gl.maximum(position, 0))), count=1, pred=position >= 0)


@gluon.jit
def copy_keys_and_values(memory, K, piece, job, position):
    """Copy K and V of a piece, and hand over what was copied a few steps before; position: how many steps the CTA copied
    before."""
    C: gl.constexpr = K.C
    KEYS: gl.constexpr = gl.SliceLayout(2, rows_layout(C.chunk, gl.num_warps()))
    LAG: gl.constexpr = lag_of(C)
    cached = K.cached
    first, steps = first_step(piece, C)
    k_base = cached.k + piece.head.to(gl.int64) * cached.k_head
    v_base = cached.v + piece.head.to(gl.int64) * cached.v_head
    pages = look_up(cached, piece, first, C, KEYS)
    for i in tl.range(0, steps):
        at = first + i * C.tokens
        inside = is_key(cached, piece, at, pages, C, KEYS)
        k_rows = rows_at(cached, at, pages, piece.entry, cached.k_page, cached.k_row, C, KEYS)
        next_pages = look_up(cached, piece, at + C.tokens, C, KEYS)
        memory.k.acquire(position)
        copy_rows(memory.k.block(position)[0], k_base, k_rows, inside, K.DIM)
        hand_over(memory.k, position - LAG, 2 * LAG)
        v_rows = rows_at(cached, at, pages, piece.entry, cached.v_page, cached.v_row, C, KEYS)
        memory.v.acquire(position)
        copy_rows(memory.v.block(position)[0], v_base, v_rows, inside, K.DIM_V)
        hand_over(memory.v, position - LAG, 2 * LAG)
        position += 1
        pages = next_pages
    return position


@gluon.jit
def copier_of_rows(memory, K):
    LAG: gl.constexpr = lag_of(K.C)
    position = take_pieces(copy_keys_and_values, memory, K, gl.to_tensor(0))
    for i in gl.static_range(LAG):
        hand_over(memory.k, position - LAG + i, 2 * (LAG - i) - 1)
        hand_over(memory.v, position - LAG + i, 2 * (LAG - i) - 2)


# ---- multipliers


@gluon.jit
def start_scores(q, k, C: gl.constexpr):
    """S = Q K^T."""
    s = gl.full([C.rows, C.tokens], 0.0, gl.float32, accumulator(C, C.tokens))
    for c in gl.static_range(len(q)):
        s = warpgroup_mma(q[c], k[c].permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def start_output(acc, p, v, C: gl.constexpr):
    """O += P V."""
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(C, C.chunk), k_width=2)
    new = ()
    for c in gl.static_range(len(v)):
        new += (warpgroup_mma(gl.convert_layout(p, P), v[c], acc[c], is_async=True),)
    return new


@gluon.jit
def store_queries(W: gl.constexpr, memory, K, piece, C: gl.constexpr):
    """The W-th group's Q, in shared memory or registers, in chunks of columns, by what products become scores, of all rows or
    of each one, by what they become products of the queries as they are, and if a page is missing."""
    CHUNKS: gl.constexpr = C.head_dim // C.chunk
    rows, q = (), ()
    for c in gl.static_range(CHUNKS):
        rows += (rows_of_queries(K.outputs, piece, c * C.chunk, C.chunk, C, K.GROUP, K.DIM),)
        q += (memory.q.index(W * CHUNKS + c),)
    holes = misses_a_page(K.cached, piece)  # while Q is on its way: behind the copies of all CTAs a load takes long
    scale, sign = scale_of_scores(K.terms, piece)
    power = 1.0
    if C.bytes_stages > 0:
        rows, scale, power = rows_as_half(rows, scale, K.terms, C)
    partition_barrier()  # everybody has read the rows before
    for c in gl.static_range(CHUNKS):
        q[c].store((rows[c] * sign).to(memory.q.dtype))
    fence_async_shared()
    partition_barrier()
    if C.holds_q:
        L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(C, C.tokens), k_width=2)
        held = ()
        for c in gl.static_range(CHUNKS):
            held += (q[c].load(L),)
        return held, scale, power, holes
    else:
        return q, scale, power, holes


@gluon.jit
def rows_as_half(rows, scale, terms, C: gl.constexpr):
    """Chunks of Q as the float16 that a cache of 8 bits is converted to, and by what products with them become scores, for each
    row, or, where scores change otherwise, by what they become products of the queries as they are."""
    ROWS: gl.constexpr = rows_of(C, C.tokens)
    scale, power = gl.full([C.rows], 0.0, gl.float32, ROWS) + scale, 1.0
    if rows[0].dtype == gl.bfloat16:
        most = largest(rows[0])
        for c in gl.static_range(1, len(rows)):
            most = gl.maximum(most, largest(rows[c]))
        power, halves = power_of(most), ()
        for c in gl.static_range(len(rows)):
            halves += ((rows[c].to(gl.float32) * gl.expand_dims(1.0 / power, 1)).to(gl.float16),)
        rows, power = halves, gl.convert_layout(power, ROWS)
        if (terms.softcap is not None) | (terms.alibi is not None):
            power = gl.expand_dims(power, 1)
        else:
            scale, power = scale * power, 1.0
    return rows, scale, power


@gluon.jit
def asked_queries(W: gl.constexpr, memory, K, piece, position, C: gl.constexpr):
    """The same in registers, if the copier of K has asked for Q, which is there with the piece's first step."""
    L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(C, C.tokens), k_width=2)
    CHUNKS: gl.constexpr = C.head_dim // C.chunk
    holes = misses_a_page(K.cached, piece)
    scale, sign = scale_of_scores(K.terms, piece)
    memory.k.wait(position)
    q = ()
    for c in gl.static_range(CHUNKS):
        chunk = memory.q.index(W * CHUNKS + c).load(L)
        if sign != 1.0:
            chunk = (chunk.to(gl.float32) * sign).to(memory.q.dtype)
        q += (chunk,)
    return q, scale, 1.0, holes


@gluon.jit
def asked_halves(W: gl.constexpr, memory, K, piece, taken, C: gl.constexpr):
    """The same of a cache of 8 bits: Q comes ahead of the bytes, and becomes float16 in registers. taken: how many pieces the
    CTA took before."""
    L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(C, C.tokens), k_width=2)
    CHUNKS: gl.constexpr = C.head_dim // C.chunk
    holes = misses_a_page(K.cached, piece)
    scale, sign = scale_of_scores(K.terms, piece)
    memory.turns.wait(taken)
    rows, q = (), ()
    for c in gl.static_range(CHUNKS):
        rows += (memory.q.index(W * CHUNKS + c).load(L),)
    fence_async_shared()
    partition_barrier()
    memory.turns.release(taken)
    rows, scale, power = rows_as_half(rows, scale, K.terms, C)
    for c in gl.static_range(CHUNKS):
        q += ((rows[c] * sign).to(gl.float16),)
    return q, scale, power, holes


@gluon.jit
def plain_steps(terms, piece, first, steps, holes, C: gl.constexpr):
    """Up to which step, from the second one on, every row sees all keys."""
    end, own = piece.end, piece.length - piece.queries
    plain = ~holes
    if terms.BY_ROW:
        if terms.right is not None:
            end = gl.minimum(end, own + terms.right + 1)
        if terms.tree is not None:
            end = gl.minimum(end, own)
        if terms.left is not None:
            plain = plain & (first + C.tokens >= piece.length - 1 - terms.left)
    return gl.where(plain, gl.maximum(gl.minimum((end - first) // C.tokens, steps), 1), 1)


@gluon.jit
def operand_of(p, dtype: gl.constexpr, C: gl.constexpr):
    """P as it is multiplied, rounded in pairs where TMA copies: an H100, 128 rows, 32 requests of 8k keys over pages of 64: 382
    microseconds, not 411. With cp.async that was slower over pages of 16."""
    if C.box > 0:
        return rounded(p, dtype)
    else:
        return p.to(dtype)


@gluon.jit
def rescaled_sums(sums, factor):
    """Sums of each lane of a row, of whose exponentials the reference has moved."""
    return sums * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout)), 1)


@gluon.jit
def note(W: gl.constexpr, memory, piece, job):
    """Write a piece and its job down, so that no register has to hold them while the group walks along its keys."""
    chain = job.chain
    numbers = (
        piece.batch, piece.entry, piece.head, piece.first_row, piece.first_query, piece.queries, piece.length, piece.begin,
        piece.end, job.number, job.parts, job.first, job.begins, job.stretch, job.place, job.patience,
        chain.begins.to(gl.int32), chain.settled, chain.line, chain.job_begin, chain.begin, chain.end,
    )  # fmt: skip
    for i in gl.static_range(NOTES):
        memory.notes.index(W * NOTES + i).store(gl.full([1], 0, gl.int32, lanes(gl.num_warps())) + numbers[i])


@gluon.jit
def noted(W: gl.constexpr, memory):
    """What `note` wrote down."""
    n = ()
    for i in gl.static_range(NOTES):
        n += (gl.max(memory.notes.index(W * NOTES + i).load(lanes(gl.num_warps())), 0),)
    chain = Chain(n[16] != 0, n[17], n[18], n[19], n[20], n[21])
    piece = Piece(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8])
    return piece, Job(n[9], n[10], n[11], n[12], n[13], n[14], n[15], chain)


@gluon.jit
def next_scores(memory, K, piece, q, power, acc, p, now, at, holes, MASKED: gl.constexpr):
    """Scores of the step from key `at` on, the CTA's `now`-th, and O, to which P V of the step before is being added
    (`output_of`)."""
    C: gl.constexpr = K.C
    memory.k.wait(now)
    s = start_scores(q, block_of(memory.k, now, C), C)
    memory.v.wait(now - 1)
    acc = start_output(acc, p, block_of(memory.v, now - 1, C), C)
    s = warpgroup_mma_wait(len(acc), deps=[s])
    memory.k.release(now)
    return masked(s, K, piece, at, holes, C, MASKED, power), acc


@gluon.jit
def output_of(memory, acc, position):
    """O, when P V of that step is added to it."""
    # Complete already, but ptxas moves no wait above it: P V stays hidden under the exponentials.
    memory.v.wait(position)
    acc = wait_output(acc)
    memory.v.release(position)
    return acc


@gluon.jit
def hopeful_step(memory, s, scale, shift, acc, sums, now, C: gl.constexpr):
    """P of a step's scores, whose exponents are counted from the same maxima as those of the steps before; O and sums."""
    wide = gl.exp2(gl.fma(s, beside(scale), shift))
    sums += lane_sums(wide)
    acc = output_of(memory, acc, now - 1)
    return operand_of(wide, memory.k.chunks[0].dtype, C), acc, sums


@gluon.jit
def running_step(memory, s, scale, acc, top, sums, now, C: gl.constexpr):
    """The same with a running maximum, which is returned, too."""
    top, wide, factor = weights_of(s, scale, top)
    sums = rescaled_sums(sums, factor) + lane_sums(wide)
    acc = output_of(memory, acc, now - 1)
    p = operand_of(wide, memory.k.chunks[0].dtype, C)
    return p, rescaled(acc, factor, C), top, sums


@gluon.jit
def split_step(W: gl.constexpr, memory, K, job, s, scale, acc, top, sums, part, now, at):
    """The same where keys are cut in splits: one that begins with this step is found from nothing, and the one before it is
    added to its part, which is left if it ends. part: O, maxima and sums of the splits before, returned last."""
    C: gl.constexpr = K.C
    none = no_part(C)
    next_top, wide, factor = split_weights_of(s, scale, gl.where(at % C.split == 0, none[1], top), memory.k.chunks[0].dtype, C)
    own_sums = lane_sums(wide)
    next_sums = rescaled_sums(sums, factor) + own_sums
    acc = output_of(memory, acc, now - 1)
    p = operand_of(wide, memory.k.chunks[0].dtype, C)
    if at % C.split == 0:
        part = added_split(part, acc, top, sums)
        if ends_part(job.chain, at, C):
            its, its_job = noted(W, memory)
            leave_parts(K, its, its_job, at - 1, *part)
            part = none
        acc, sums = no_output(C), own_sums
    else:
        acc, sums = rescaled(acc, factor, C), next_sums
    return p, acc, next_top, sums, part


@gluon.jit
def hopeful_split_step(W: gl.constexpr, memory, K, job, s, scale, acc, top, sums, part, worst, now, at, leaves,
                       HOPEFUL: gl.constexpr):  # fmt: skip
    """The same where pieces may be taken again, by the optimistic softmax if HOPEFUL: parts are left only by who `leaves` them.
    worst: the greatest sum of splits that were hopeful, returned last."""
    C: gl.constexpr = K.C
    none = no_part(C)
    begins = at % C.split == 0
    if HOPEFUL:
        next_top = top
        if begins:
            next_top = gl.max(s, 1) * scale
        wide = gl.exp2(gl.fma(s, scale, gl.expand_dims(-finite(next_top), 1)))
        own_sums = lane_sums(wide)
    else:
        next_top, wide, factor = split_weights_of(s, scale, gl.where(begins, none[1], top), memory.k.chunks[0].dtype, C)
        own_sums = lane_sums(wide)
        next_sums = rescaled_sums(sums, factor) + own_sums
    acc = output_of(memory, acc, now - 1)
    p = operand_of(wide, memory.k.chunks[0].dtype, C)
    if begins:
        if HOPEFUL:
            worst = worse(worst, top, sums)
        o, part_top, part_total = added_split(taken_up(W, memory, part, acc, C), acc, top, sums)
        if ends_part(job.chain, at, C):
            if leaves:
                its, its_job = noted(W, memory)
                leave_parts(K, its, its_job, at - 1, o, part_top, part_total)
            o, part_top, part_total = none
        part = put_down(W, memory, o, C), part_top, part_total
        acc, sums = no_output(C), own_sums
    elif HOPEFUL:
        sums += own_sums
    else:
        acc, sums = rescaled(acc, factor, C), next_sums
    return p, acc, next_top, sums, part, worst


@gluon.jit
def in_squares(x):
    """[rows, columns], of which a warp's neighbours are those of squares of 8 rows and 8 columns, as it has them of wgmma."""
    return gl.permute(gl.reshape(x, [x.shape[0] // 8, 8, x.shape[1] // 8, 8]), (0, 2, 1, 3))


@gluon.jit
def put_down(W: gl.constexpr, memory, o, C: gl.constexpr):
    """Chunks of O, which wait in shared memory where registers are Q's."""
    if C.sums_wait:
        for c in gl.static_range(len(o)):
            memory.sums.index(W * len(o) + c).store(in_squares(o[c]))
        return ()
    else:
        return o


@gluon.jit
def taken_up(W: gl.constexpr, memory, part, like, C: gl.constexpr):
    """A part of which O was put down."""
    o, top, total = part
    if C.sums_wait:
        for c in gl.static_range(len(like)):
            squares = memory.sums.index(W * len(like) + c).load(in_squares(like[c]).type.layout)
            chunk = gl.reshape(gl.permute(squares, (0, 2, 1, 3)), like[c].shape)
            o += (gl.convert_layout(chunk, like[c].type.layout),)
    return o, top, total


@gluon.constexpr_function
def reach_of(dtype):
    """log2 of how far a weight may be above those of the first step of its split, so that it fits P."""
    return 15.0 if dtype == gl.float16 else 32.0


@gluon.jit
def split_weights_of(s, scale, top, dtype: gl.constexpr, C: gl.constexpr):
    """Find what `weights_of` finds, or count from a reference that moves to the maximum of a step only if that is far above it.
    So who counts on that it does not move finds the same, as long as no sum is so great that it might have."""
    if C.late:
        most = gl.max(s, 1) * scale
        new_top = gl.where(most > top + reach_of(dtype), most, top)
        shift = finite(new_top)
        return new_top, gl.exp2(gl.fma(s, scale, gl.expand_dims(-shift, 1))), gl.exp2(top - shift)
    else:
        return weights_of(s, scale, top)


@gluon.jit
def worse(worst, top, sums):
    """The greater one of `worst` and the sum of each row of a split, inf if its first step had no weights."""
    total = gl.convert_layout(gl.sum(sums, 1), top.type.layout)
    return gl.maximum(worst, gl.where(top == -float("inf"), float("inf"), total))


@gluon.jit
def no_part(C: gl.constexpr):
    """O, maxima and sums of no keys."""
    S: gl.constexpr = rows_of(C, C.tokens)
    return no_output(C), gl.full([C.rows], -float("inf"), gl.float32, S), gl.full([C.rows], 0.0, gl.float32, S)


@gluon.jit
def added_split(part, acc, top, sums):
    """A part with the split that comes behind it."""
    o, part_top, part_total = part
    return added(o, part_top, part_total, acc, top, gl.convert_layout(gl.sum(sums, 1), top.type.layout))


@gluon.jit
def walk(W: gl.constexpr, memory, K, piece, job, position, taken, hopeful, leaves):
    """Walk along the keys of a piece, one step at least: O in chunks, what exponents are counted from and the sum for each row
    of the W-th group, how many steps the CTA has copied, and whether that has to be done again. taken: how many pieces the CTA
    took before. Where keys are cut in splits, that is what the last part is made of; those before are left, if it `leaves`
    them. hopeful: whether the optimistic softmax may be tried."""
    C: gl.constexpr = K.C
    first, steps = first_step(piece, C)
    if C.asks_q and C.bytes_stages > 0:
        q, scale, power, holes = asked_halves(W, memory, K, piece, taken, C)
    elif C.asks_q:
        q, scale, power, holes = asked_queries(W, memory, K, piece, position, C)
    else:
        q, scale, power, holes = store_queries(W, memory, K, piece, C)
    part = no_part(C)
    acc, nothing, _ = part
    memory.k.wait(position)
    s = warpgroup_mma_wait(0, deps=[start_scores(q, block_of(memory.k, position, C), C)])
    memory.k.release(position)
    s = masked(s, K, piece, first, holes, C, True, power)
    top, wide, _ = weights_of(s, scale, nothing)
    sums, p = lane_sums(wide), operand_of(wide, memory.k.chunks[0].dtype, C)
    begin, plain = gl.to_tensor(1), plain_steps(K.terms, piece, first, steps, holes, C)
    if C.optimistic:
        plain = gl.where(hopeful, plain, 1)
    shift = gl.expand_dims(-finite(top), 1)
    worst, part = part[2], (put_down(W, memory, part[0], C), part[1], part[2])
    for MASKED in gl.static_range(2):
        end = steps if MASKED else plain
        for i in tl.range(begin, end, disable_licm=True):
            now, at = position + i, first + i * C.tokens
            s, acc = next_scores(memory, K, piece, q, power, acc, p, now, at, holes, MASKED)
            if C.optimistic and C.split:
                p, acc, top, sums, part, worst = hopeful_split_step(
                    W, memory, K, job, s, scale, acc, top, sums, part, worst, now, at, leaves, not MASKED
                )
            elif C.optimistic and not MASKED:
                p, acc, sums = hopeful_step(memory, s, scale, shift, acc, sums, now, C)
            elif C.split:
                p, acc, top, sums, part = split_step(W, memory, K, job, s, scale, acc, top, sums, part, now, at)
            else:
                p, acc, top, sums = running_step(memory, s, scale, acc, top, sums, now, C)
        if C.split and C.optimistic and not MASKED:
            worst = worse(worst, top, sums)
        begin = end
    position += steps
    memory.v.wait(position - 1)
    acc = wait_output(start_output(acc, p, block_of(memory.v, position - 1, C), C))
    memory.v.release(position - 1)
    total = gl.convert_layout(gl.sum(sums, 1), rows_of(C, C.tokens))
    broken = False
    if C.optimistic and C.split:
        broken = (plain > 1) & (gl.max(worst, 0) >= 2.0 ** reach_of(memory.k.chunks[0].dtype))
    elif C.optimistic:
        broken = (plain > 1) & out_of_range(acc, total)
    if C.split:
        acc, top, total = added_split(taken_up(W, memory, part, acc, C), acc, top, sums)
    return acc, top, total, position, broken


@gluon.constexpr_function
def of_group(C):
    return C.of_group


@gluon.jit
def as_seen_by(W: gl.constexpr, K, piece, job):
    """A kernel, a piece and a job as the W-th group sees them: it has rows, parts and arrivals of its own."""
    C: gl.constexpr = of_group(K.C)
    FIRST: gl.constexpr = W * C.rows
    o = K.outputs
    outputs = Outputs(o.q, o.q_batch, o.q_row, o.q_head, o.out, o.out_batch, o.out_row, o.out_head, o.lse, o.lse_batch,
                      o.lse_head, o.parts + FIRST * C.head_dim_v, o.sums + FIRST, o.arrivals)  # fmt: skip
    own = Kernel(K.requests, outputs, K.terms, K.cached, K.heads_kv, K.tiles, C, K.GROUP, K.DIM, K.DIM_V, K.ROWS)
    rows = Piece(piece.batch, piece.entry, piece.head, piece.first_row + FIRST, piece.first_query, piece.queries, piece.length,
                 piece.begin, piece.end)  # fmt: skip
    number = K.C.groups * job.number + W
    return own, rows, Job(number, job.parts, job.first, job.begins, job.stretch, job.place, job.patience, job.chain)


@gluon.jit
def multiply(W: gl.constexpr, memory, K, piece, job, state):
    """What the W-th group finds of a piece is delivered, if the piece is chosen; state: how many steps the CTA has copied
    before, and how many pieces it took, the number of the piece, which pieces are chosen, which of them are this group's, and
    which have to be taken again."""
    position, taken, number, chosen, mine, broken = state
    if is_chosen(chosen, number, job, K.C):
        own, rows, own_job = as_seen_by(W, K, piece, job)
        if own.C.split:
            note(W, memory, rows, own_job)
        is_mine = is_chosen(mine, number, job, K.C)
        acc, top, total, position, failed = walk(W, memory, own, rows, own_job, position, taken, chosen == ALL, is_mine)
        if own.C.split:
            rows, own_job = noted(W, memory)
        if failed:
            broken = broken | bit_of(number, job)
        elif is_mine:
            if own.C.by_way_of_q:
                deliver(own, rows, own_job, acc, top, total, memory.q.index(W * (own.C.head_dim // own.C.chunk)))
            else:
                deliver(own, rows, own_job, acc, top, total)
        taken += 1
    return position, taken, number + 1, chosen, mine, broken


@gluon.jit
def multiply_first(memory, K, piece, job, state):
    return multiply(0, memory, K, piece, job, state)


@gluon.jit
def multiply_second(memory, K, piece, job, state):
    return multiply(1, memory, K, piece, job, state)


@gluon.jit
def multiply_all(MULTIPLY: gl.constexpr, W: gl.constexpr, memory, K):
    position, chosen, mine, told = gl.to_tensor(0), gl.to_tensor(ALL), gl.to_tensor(ALL), gl.to_tensor(0)
    taken = gl.to_tensor(0)
    while chosen != 0:
        zero = 0 * position
        told, state = take_all(MULTIPLY, memory, K, told, (position, taken, zero, chosen, mine, zero))
        position, taken, _, _, _, mine = state
        tell(memory.again, W, chosen, mine, K.C)
        chosen = chosen_next(memory.again, chosen, K.C)


@gluon.jit
def multiplier(memory, K):
    multiply_all(multiply_first, 0, memory, K)


@gluon.jit
def second_multiplier(memory, K):
    multiply_all(multiply_second, 1, memory, K)


# ---- entry


@gluon.jit(do_not_specialize=NUMBERS)
def hopper_kernel(
    q, k, v, out, lse, lengths, page_table, index, leftpad, cu_q, tree, alibi, sinks, k_scale, v_scale, parts, sums, arrivals,
    q_batch, q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head, out_batch, out_row, out_head, lse_batch, lse_head,
    table_row, tree_batch, tree_row, tree_column, alibi_batch, k_scale_page, k_scale_row, v_scale_page, v_scale_row, batch,
    heads_kv, n_q, capacity, total_q, pages, tiles, scale, softcap, left, right, q_boxes,
    C: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, ROWS: gl.constexpr,
    BY_ROW: gl.constexpr, K_BY_TOKEN: gl.constexpr, V_BY_TOKEN: gl.constexpr, IN_TURN: gl.constexpr,
):  # fmt: skip
    if C.halves > 1:
        memory = make_turns_memory(k, v, C)
    elif C.narrow > 0:
        memory = make_latent_memory(k, v, C)
    else:
        memory = make_memory(k, v, q_boxes, q.dtype.element_ty, gl.float16 if C.bytes_stages > 0 else q.dtype.element_ty, C)
    fence_async_shared()
    partition_barrier()
    take_turn()
    requests = Requests(lengths, leftpad, index, cu_q, batch, n_q, capacity, total_q, pages, left)
    cached = Cached(k, v, page_table, k_page, k_row, k_head, v_page, v_row, v_head, table_row, pages, PAGE)
    terms = Terms(tree, tree_batch, tree_row, tree_column, alibi, alibi_batch, sinks, k_scale, v_scale, k_scale_page,
                  k_scale_row, v_scale_page, v_scale_row, scale, softcap, left, right, BY_ROW, K_BY_TOKEN,
                  V_BY_TOKEN)  # fmt: skip
    outputs = Outputs(q, q_batch, q_row, q_head, out, out_batch, out_row, out_head, lse, lse_batch, lse_head, parts, sums,
                      arrivals)  # fmt: skip
    K = Kernel(requests, outputs, terms, cached, heads_kv, tiles, C, GROUP, DIM, DIM_V, ROWS)
    if C.halves == 1:  # two groups in turns: level or a percent faster without (an H100), as their first loads wait behind it
        ask_ahead(K)
    if C.halves > 1:
        gl.warp_specialize([(left_group, (memory, K)), (right_group, (memory, K))], [4], [C.registers // 8 * 8])
        for i in gl.static_range(len(memory.full)):
            invalidate(memory.full[i])
    elif C.narrow > 0:
        take_pieces(take_latent, memory, K, gl.to_tensor(0))
        invalidate(memory.full)
    elif C.bytes_stages > 0 and C.groups == 2:
        gl.warp_specialize(
            [(multiplier, (memory, K)), (second_multiplier, (memory, K)), (converter, (memory, K)),
             (copier_of_bytes, (memory, K))],
            [4, 4, 1], [C.group_registers, C.converter_registers, C.copier_registers],
        )  # fmt: skip
    elif C.bytes_stages > 0:
        gl.warp_specialize(
            [(multiplier, (memory, K)), (converter_of_keys, (memory, K)), (converter_of_values, (memory, K)),
             (copier_of_bytes, (memory, K))],
            [4, 4, 1], [C.converter_registers, C.converter_registers, C.copier_registers],
        )  # fmt: skip
    elif C.box == 0:
        gl.warp_specialize([(multiplier, (memory, K)), (copier_of_rows, (memory, K))], [4], [C.copier_registers])
    elif C.groups == 2:
        gl.warp_specialize(
            [(multiplier, (memory, K)), (second_multiplier, (memory, K)), (copier_of_keys, (memory, K)),
             (copier_of_values, (memory, K))],
            [4, 1, 1], [C.group_registers, C.copier_registers, C.copier_registers],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(multiplier, (memory, K)), (copier_of_keys, (memory, K)), (copier_of_values, (memory, K))],
            [1, 1], [C.copier_registers, C.copier_registers],
        )  # fmt: skip
