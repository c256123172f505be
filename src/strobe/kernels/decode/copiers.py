"""The roles of `hopper` that copy keys and values: by TMA, a warp for K and one for V, or by cp.async, four warps for both."""

import triton.language as tl

from strobe.kernels.decode.again import ALL, chosen_next, is_chosen
from strobe.kernels.decode.board import take_all, tell_of, tell_of_the_end
from strobe.kernels.decode.boxes import (
    clear_groups,
    clear_values,
    copy_boxes,
    copy_groups,
    copy_steps,
    first_step,
    has_others,
    rows_layout,
)
from strobe.kernels.decode.keys import is_key, look_up, rows_at
from strobe.kernels.decode.pieces import take_pieces
from strobe.kernels.decode.queries import ask_for_queries, ask_in_turn
from strobe.kernels.gluon import async_copy, cp_async, fence_async_shared, gl, gluon, mbarrier, partition_barrier


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
    piece's first one or, of Q in turn, how many pieces it took."""
    C: gl.constexpr = K.C
    position, begun = state
    wait_for_earlier(memory.k, position, C)
    barrier = memory.k.acquire(position)
    if C.asks_q and C.holds_q:
        if position == begun:
            mbarrier.expect(barrier, (C.tokens + C.rows) * C.head_dim * 2)
            ask_for_queries(memory.q_desc, memory.q, barrier, K.requests, piece, C, K.GROUP)
        else:
            mbarrier.expect(barrier, C.tokens * C.head_dim * 2)
    else:
        mbarrier.expect(barrier, C.tokens * C.head_dim * 2)
    k_page, k_row = K.cached.k_page, K.cached.k_row
    copy_step(memory.k_desc, memory.k, position, barrier, K.cached, pages, k_page, k_row, piece.head, at, C)
    if C.q_in_turn:
        if at <= piece.begin:
            ask_in_turn(memory, K, piece, begun)
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
    before or, of Q in turn, how many pieces it took, the number of the piece, which pieces are chosen, and of how many the
    others were told."""
    C: gl.constexpr = K.C
    copied, number, chosen, told = state
    if C.tells:
        tell_of(memory.board, told, piece, job)
    position, before = copied
    if is_chosen(chosen, number, job, C):
        if C.q_in_turn:
            position, before = copy_steps(copy_keys, memory, K, piece, (position, before))
            before += 1
        else:
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
def copy_rows(chunks, base, rows, inside, COLUMNS: gl.constexpr):
    """Start copying a step's rows, at offsets `rows` from `base`, to chunks of columns, in one group; zeros where none is
    inside, and beyond COLUMNS."""
    NUMBER: gl.constexpr = chunks[0].shape[0]
    WIDE: gl.constexpr = chunks[0].shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDE, WIDE // 8], [gl.num_warps(), 1], [1, 0])
    KEYS: gl.constexpr = gl.SliceLayout(1, L)
    rows = gl.expand_dims(gl.convert_layout(gl.reshape(gl.where(inside, rows, 0), [NUMBER]), KEYS), 1)
    inside = gl.expand_dims(gl.convert_layout(gl.reshape(inside, [NUMBER]), KEYS), 1)
    for c in gl.static_range(len(chunks)):
        columns = gl.expand_dims(gl.arange(c * WIDE, (c + 1) * WIDE, gl.SliceLayout(0, L)), 0)
        mask = gl.max_constancy(inside & (columns < COLUMNS), [1, 8])
        cp_async(chunks[c], gl.multiple_of(base + rows + columns, [1, 16]), mask=mask)  # bytes
    async_copy.commit_group()


@gluon.jit
def hand_over(channel, position, start, UNDER_WAY: gl.constexpr):
    """Let a step be read, if it is not one from before `start`: it is there when so many groups of copies are still under
    way."""
    async_copy.wait_group(UNDER_WAY)
    fence_async_shared()
    partition_barrier()
    mbarrier.arrive(channel.full.index(channel.slot(gl.maximum(position, 0))), count=1, pred=position >= start)


@gluon.jit
def take_keys_and_values(memory, K, piece, job, state):
    """Copy K and V of a piece, if it is chosen; state: how many steps the CTA copied before, and before it took the first of
    these pieces, the number of the piece, and which pieces are chosen."""
    position, start, number, chosen = state
    if is_chosen(chosen, number, job, K.C):
        position = copy_keys_and_values(memory, K, piece, position, start)
    return position, start, number + 1, chosen


@gluon.jit
def copy_keys_and_values(memory, K, piece, position, start):
    """Copy K and V of a piece, and hand over what was copied a few steps before, from the step numbered `start` on; position:
    how many steps the CTA copied before."""
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
        copy_rows(memory.k.block(position), k_base, k_rows, inside, K.DIM)
        hand_over(memory.k, position - LAG, start, 2 * LAG)
        v_rows = rows_at(cached, at, pages, piece.entry, cached.v_page, cached.v_row, C, KEYS)
        memory.v.acquire(position)
        copy_rows(memory.v.block(position), v_base, v_rows, inside, K.DIM_V)
        hand_over(memory.v, position - LAG, start, 2 * LAG)
        position += 1
        pages = next_pages
    return position


@gluon.jit
def copy_pieces(memory, K, start, chosen):
    """Copy K and V of the chosen pieces, and hand over all; start: how many steps the CTA copied before, which is returned."""
    LAG: gl.constexpr = lag_of(K.C)
    position, _, _, _ = take_pieces(take_keys_and_values, memory, K, (start, start, 0 * chosen, chosen))
    for i in gl.static_range(LAG):
        hand_over(memory.k, position - LAG + i, start, 2 * (LAG - i) - 1)
        hand_over(memory.v, position - LAG + i, start, 2 * (LAG - i) - 2)
    return position


@gluon.jit
def copier_of_rows(memory, K):
    position, chosen = copy_pieces(memory, K, gl.to_tensor(0), gl.to_tensor(ALL)), gl.to_tensor(ALL)
    if K.C.optimistic:
        chosen = chosen_next(memory.again, chosen, K.C)
        if chosen != 0:
            copy_pieces(memory, K, position, chosen)
