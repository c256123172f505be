"""Attention of 64 rows over a cache whose values are columns of its keys (MLA), in Gluon, for Hopper: two groups take turns.

Each four warps are a group: the left one has the first half of the columns of O, the right one the second. Of the steps of 64
keys the left group has the scores and the softmax of those with even numbers, the right group of the odd ones; both multiply P
of every step, in order, by their half of its V. So the tensor cores have products of other steps, while a group computes
exponentials:

    left     S(0)             P(0) V(0)         S(2)  P(1) V(1)  P(2) V(2)         S(4)  P(3) V(3) ...
    right                     P(0) V(0)   S(1)        P(1) V(1)  P(2) V(2)   S(3)        P(3) V(3) ...

    shared memory   shape                         filled by                         read by
    k               [2 steps * 2 halves, tokens,  the group whose half of O it is   the group whose step it is, for S; then the
                    half]                                                           one that fills it, for P V
    narrow          [2 steps, tokens, narrow]     the group whose step it is not    the group whose step it is, for S
    P, in its place [2 steps, rows, tokens]       the group whose step it is        the other one, for P V
    tops            [2 steps, rows]               the same, with P                  the other one
    q, q_narrow     [2 halves, rows, half],       the groups, a half each; the      both
                    [rows, narrow]                right one the narrow part
    sums            [2, rows]                     each group, when a piece ends     the other one

    barrier         arrivals                      says
    full            TMA bytes                     a half, or the narrow part, of an even or an odd step is there
    EVEN, ODD       all threads of both groups    P of an even or an odd step is there (and that P before it has been read)
    MET             all threads of both groups    Q is there; the sums are there, and the piece has been read

Nobody says that a place is free: who fills it has read it last. Half a step of K is read for S first, then for P V by the group
that fills it; the narrow part is read for S, then P takes its place, which the other group reads and fills again.
"""

import triton.language as tl

from strobe.kernels.common.channel import make_barriers, swizzled
from strobe.kernels.common.named_barrier import FIRST, announce, meet, rendezvous
from strobe.kernels.decode.arguments import Kernel, Outputs, Piece
from strobe.kernels.decode.boxes import (
    accumulator,
    clear_values,
    first_step,
    has_others,
    lane_sums,
    masked,
    misses_a_page,
    no_output,
    pages_of_boxes,
    place_of_box,
    rescaled,
    rows_of,
    rows_of_queries,
    scale_of_scores,
    weights_of,
)
from strobe.kernels.decode.pieces import take_pieces
from strobe.kernels.decode.results import deliver
from strobe.kernels.decode.scores import finite
from strobe.kernels.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tensor_descriptor,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

EVEN, ODD, MET = FIRST, gl.constexpr(FIRST.value + 1), gl.constexpr(FIRST.value + 2)
"""Numbers of named barriers."""
NARROW = gl.constexpr(2)
"""The part of a step, beside its halves 0 and 1, that is no values."""


@aggregate
class TurnsMemory:
    """The descriptors of both parts of K, and the shared memory of a CTA: see the tables above."""

    k_desc: tensor_descriptor
    narrow_desc: tensor_descriptor
    q: gl.shared_memory_descriptor
    q_narrow: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    narrow: gl.shared_memory_descriptor
    tops: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.jit
def make_turns_memory(k_desc, narrow_desc, C: gl.constexpr):
    """The caller fences."""
    dtype: gl.constexpr = k_desc.dtype
    HALF: gl.constexpr = swizzled(dtype, C.chunk)
    N: gl.constexpr = swizzled(dtype, C.narrow)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return TurnsMemory(
        k_desc,
        narrow_desc,
        gl.allocate_shared_memory(dtype, [2, C.rows, C.chunk], HALF),
        gl.allocate_shared_memory(dtype, [1, C.rows, C.narrow], N),
        gl.allocate_shared_memory(dtype, [4, C.tokens, C.chunk], HALF),
        gl.allocate_shared_memory(dtype, [2, C.tokens, C.narrow], N),
        gl.allocate_shared_memory(gl.float32, [2, C.rows], ROWS),
        gl.allocate_shared_memory(gl.float32, [2, C.rows], ROWS),
        make_barriers(6, 1),
    )


@aggregate
class Walk:
    """A piece: the first key of its first step, and how many steps it has, one at least."""

    memory: TurnsMemory
    K: Kernel
    piece: Piece
    first: gl.tensor
    steps: gl.tensor


@gluon.jit
def walk_along(memory, K, piece):
    first, steps = first_step(piece, K.C)
    return Walk(memory, K, piece, first, steps)


# ---- copies. W: 0 for the left group, 1 for the right one; ODDS: 0 for even steps, 1 for odd ones


@gluon.jit
def place(memory, odds, PART: gl.constexpr):
    """Where a part of an even or an odd step lies."""
    if PART == NARROW:
        return memory.narrow.index(odds)
    else:
        return memory.k.index(2 * odds + PART)


@gluon.jit
def page_of(walk, step):
    """The page of a step, which is one box."""
    return pages_of_boxes(walk.K.cached, walk.piece, walk.first + step * walk.K.C.tokens, walk.K.C)[0]


@gluon.jit
def fill(walk, page, step, ODDS: gl.constexpr, PART: gl.constexpr):
    """Start copying a part of a step, if the piece has that step."""
    memory = walk.memory
    C: gl.constexpr = walk.K.C
    COLUMNS: gl.constexpr = C.narrow if PART == NARROW else C.chunk
    desc = memory.narrow_desc if PART == NARROW else memory.k_desc
    barrier = memory.full.index(3 * ODDS + PART)
    go = step < walk.steps
    mbarrier.expect(barrier, C.tokens * COLUMNS * 2, pred=go)
    page, row = place_of_box(walk.K.cached, page, walk.first + step * C.tokens)
    box = place(memory, ODDS, PART).reshape(desc.block_type.shape)
    tma_load(desc, [page, walk.piece.head, row, PART * C.chunk], barrier, box, pred=go)


@gluon.jit
def fill_first(walk, W: gl.constexpr):
    """Start copying a group's parts of the first two steps."""
    pages = page_of(walk, 0), page_of(walk, 1)
    fill(walk, pages[0], 0, 0, W)
    fill(walk, pages[1 - W], 1 - W, 1 - W, NARROW)
    fill(walk, pages[1], 1, 1, W)


# ---- products


@gluon.jit
def start_part(memory, s, turn, ODDS: gl.constexpr, PART: gl.constexpr, ADDS: gl.constexpr):
    """S += Q K^T of a part of the turn-th even or odd step, once it is there."""
    mbarrier.wait(memory.full.index(3 * ODDS + PART), turn & 1)
    zero = turn >> 30  # unknown to the compiler, or it keeps the places of 36 products in registers, and spills them
    q = memory.q_narrow.index(zero) if PART == NARROW else memory.q.index(zero + PART)
    return warpgroup_mma(q, place(memory, zero + ODDS, PART).permute((1, 0)), s, use_acc=ADDS, is_async=True)


@gluon.jit
def start_scores(memory, C: gl.constexpr, turn, ODDS: gl.constexpr):
    """S = Q K^T of the half that came first: the own one of the group whose step it is."""
    s = gl.full([C.rows, C.tokens], 0.0, gl.float32, accumulator(C, C.tokens))
    return start_part(memory, s, turn, ODDS, ODDS, False)


@gluon.jit
def start_other_scores(memory, s, turn, ODDS: gl.constexpr):
    """S += Q K^T of all else."""
    s = start_part(memory, s, turn, ODDS, 1 - ODDS, True)
    return start_part(memory, s, turn, ODDS, NARROW, True)


@gluon.jit
def start_output(walk, step, acc, p, ODDS: gl.constexpr, W: gl.constexpr):
    """O += P V of a group's half of a step. p: the group's own, or in shared memory."""
    C: gl.constexpr = walk.K.C
    v = place(walk.memory, ODDS, W)
    at = walk.first + step * C.tokens
    if has_others(walk.piece, at, C):
        clear_values(v, walk.piece, at, C)
        fence_async_shared()
        partition_barrier()
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def own_output(walk, step, acc, p, W: gl.constexpr):
    """O + P V of a group's half of its own step."""
    C: gl.constexpr = walk.K.C
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(C, C.chunk), k_width=2)
    acc = warpgroup_mma_wait(0, deps=[start_output(walk, step, acc, gl.convert_layout(p, P), W, W)])
    partition_barrier()  # everybody has read it
    return acc


# ---- the softmax


@gluon.jit
def scaled_sums(sums, factor):
    return sums * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout)), 1)


@gluon.jit
def own_weights(walk, s, step, scale, holes, top, sums):
    """P of a group's own step, the maxima and the sums with it, and the factor of what was summed before."""
    C: gl.constexpr = walk.K.C
    s = masked(s, walk.K, walk.piece, walk.first + step * C.tokens, holes, C, True)
    top, wide, factor = weights_of(s, scale, top)
    return wide.to(walk.memory.k.dtype), top, scaled_sums(sums, factor) + lane_sums(wide), factor


@gluon.jit
def publish(memory, p, top, W: gl.constexpr):
    """Let the other group have P of this one's step, and the maxima by which it was computed."""
    partition_barrier()  # everybody has multiplied what lies there by Q
    memory.narrow.index(W).store(p)
    memory.tops.index(W).store(top)
    fence_async_shared()
    announce(EVEN + W)


@gluon.jit
def follow(memory, C: gl.constexpr, acc, top, sums, W: gl.constexpr):
    """Wait for P of the other group's step: O, the maxima and the sums as they are for that step."""
    meet(EVEN + 1 - W)
    new_top = memory.tops.index(1 - W).load(rows_of(C, C.tokens))
    factor = gl.exp2(top - finite(new_top))
    return rescaled((acc,), factor, C)[0], new_top, scaled_sums(sums, factor)


# ---- the groups


@gluon.jit
def begin_piece(walk, W: gl.constexpr):
    """Start copying, and store Q for both groups: by what its products become scores, and if a page is missing; O, the maxima
    and the sums of no keys."""
    memory, K = walk.memory, walk.K
    C: gl.constexpr = K.C
    dtype: gl.constexpr = memory.k.dtype
    q = rows_of_queries(K.outputs, walk.piece, W * C.chunk, C.chunk, C, K.GROUP, K.DIM)
    if W == 1:
        narrow = rows_of_queries(K.outputs, walk.piece, C.head_dim, C.narrow, C, K.GROUP, K.DIM)
    fill_first(walk, W)  # behind the copies Q would come late
    holes = misses_a_page(K.cached, walk.piece)
    scale, sign = scale_of_scores(K.terms, walk.piece)
    memory.q.index(W).store((q * sign).to(dtype))
    if W == 1:
        memory.q_narrow.index(0).store((narrow * sign).to(dtype))
    fence_async_shared()
    rendezvous(MET, W)
    top = gl.full([C.rows], -float("inf"), gl.float32, rows_of(C, C.tokens))
    sums = lane_sums(gl.full([C.rows, C.tokens], 0.0, gl.float32, accumulator(C, C.tokens)))
    return scale, holes, no_output(C)[0], top, sums


@gluon.jit
def walk_left(walk, evens):
    """The left group's half of a piece: O, the maxima, its sums. evens: how many even steps the CTA had before."""
    memory = walk.memory
    C: gl.constexpr = walk.K.C
    mine = (walk.steps + 1) // 2
    scale, holes, acc, top, sums = begin_piece(walk, 0)
    page = page_of(walk, 2)
    s = start_other_scores(memory, start_scores(memory, C, evens, 0), evens, 0)
    s = warpgroup_mma_wait(0, deps=[s])
    p, top, sums, _ = own_weights(walk, s, 0, scale, holes, top, sums)
    publish(memory, p, top, 0)
    acc = own_output(walk, 0, acc, p, 0)
    fill(walk, page, 2, 0, 0)
    for i in tl.range(1, mine, disable_licm=True):
        n = 2 * i
        odd_page, page = page_of(walk, n + 1), page_of(walk, n + 2)
        s = start_other_scores(memory, start_scores(memory, C, evens + i, 0), evens + i, 0)
        acc, top, sums = follow(memory, C, acc, top, sums, 0)
        acc = start_output(walk, n - 1, acc, memory.narrow.index(1), 1, 0)
        s = warpgroup_mma_wait(1, deps=[s])
        p, top, sums, factor = own_weights(walk, s, n, scale, holes, top, sums)
        publish(memory, p, top, 0)
        acc = warpgroup_mma_wait(0, deps=[acc])
        partition_barrier()  # everybody has read the step before
        fill(walk, odd_page, n + 1, 1, 0)
        fill(walk, odd_page, n + 1, 1, NARROW)
        acc = own_output(walk, n, rescaled((acc,), factor, C)[0], p, 0)
        fill(walk, page, n + 2, 0, 0)
    if walk.steps == 2 * mine:
        acc, top, sums = follow(memory, C, acc, top, sums, 0)
        acc = warpgroup_mma_wait(0, deps=[start_output(walk, walk.steps - 1, acc, memory.narrow.index(1), 1, 0)])
    return acc, top, sums


@gluon.jit
def walk_right(walk, odds):
    """The right group's half of a piece, as `walk_left`. odds: how many odd steps the CTA had before."""
    memory = walk.memory
    C: gl.constexpr = walk.K.C
    mine = walk.steps // 2
    scale, holes, acc, top, sums = begin_piece(walk, 1)
    for i in tl.range(0, mine, disable_licm=True):
        n = 2 * i + 1
        even_page, page = page_of(walk, n + 1), page_of(walk, n + 2)
        acc, top, sums = follow(memory, C, acc, top, sums, 1)
        acc = start_output(walk, n - 1, acc, memory.narrow.index(0), 0, 1)
        s = start_scores(memory, C, odds + i, 1)
        acc = warpgroup_mma_wait(1, deps=[acc])
        partition_barrier()  # everybody has read the step before
        fill(walk, even_page, n + 1, 0, 1)
        fill(walk, even_page, n + 1, 0, NARROW)
        s = warpgroup_mma_wait(0, deps=[start_other_scores(memory, s, odds + i, 1)])
        p, top, sums, factor = own_weights(walk, s, n, scale, holes, top, sums)
        publish(memory, p, top, 1)
        acc = own_output(walk, n, rescaled((acc,), factor, C)[0], p, 1)
        fill(walk, page, n + 2, 1, 1)
    if walk.steps > 2 * mine:
        acc, top, sums = follow(memory, C, acc, top, sums, 1)
        acc = warpgroup_mma_wait(0, deps=[start_output(walk, walk.steps - 1, acc, memory.narrow.index(0), 0, 1)])
    return acc, top, sums


@gluon.jit
def half_of(K, W: gl.constexpr):
    """The kernel of a group's half of the results, as if that were all."""
    o = K.outputs
    places, jobs = 2 * gl.num_programs(0), K.requests.batch * K.heads_kv * K.tiles
    outputs = Outputs(
        o.q, o.q_batch, o.q_row, o.q_head, o.out + W * K.DIM_V, o.out_batch, o.out_row, o.out_head,
        o.lse if W == 0 else None, o.lse_batch, o.lse_head, o.parts + W * places.to(gl.int64) * (K.ROWS * K.DIM_V),
        o.sums + W * places * (2 * K.ROWS), o.arrivals + W * 2 * jobs,
    )  # fmt: skip
    return Kernel(K.requests, outputs, K.terms, K.cached, K.heads_kv, K.tiles, K.C, K.GROUP, K.DIM, K.DIM_V, K.ROWS)


@gluon.jit
def end_piece(walk, job, acc, top, sums, W: gl.constexpr):
    """Deliver a group's half of O."""
    memory = walk.memory
    total = gl.sum(sums, 1)
    memory.sums.index(W).store(total)
    rendezvous(MET, W)
    total += memory.sums.index(1 - W).load(total.type.layout)
    deliver(half_of(walk.K, W), walk.piece, job, (acc,), top, total)


@gluon.jit
def take_left(memory, K, piece, job, turns):
    """turns: how many even and odd steps the CTA had before."""
    walk = walk_along(memory, K, piece)
    acc, top, sums = walk_left(walk, turns[0])
    end_piece(walk, job, acc, top, sums, 0)
    return turns[0] + (walk.steps + 1) // 2, turns[1] + walk.steps // 2


@gluon.jit
def take_right(memory, K, piece, job, turns):
    """turns: how many even and odd steps the CTA had before."""
    walk = walk_along(memory, K, piece)
    acc, top, sums = walk_right(walk, turns[1])
    end_piece(walk, job, acc, top, sums, 1)
    return turns[0] + (walk.steps + 1) // 2, turns[1] + walk.steps // 2


@gluon.jit
def left_group(memory, K):
    take_pieces(take_left, memory, K, (gl.to_tensor(0), gl.to_tensor(0)))


@gluon.jit
def right_group(memory, K):
    take_pieces(take_right, memory, K, (gl.to_tensor(0), gl.to_tensor(0)))
