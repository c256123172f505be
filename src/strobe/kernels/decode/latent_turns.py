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
    board           [numbers of a piece]          the right group, which finds      the left one
                                                  the pieces

    barrier         arrivals                      says
    full            TMA bytes                     what a group copies of an even or an odd step is there
    EVEN, ODD       all threads of both groups    P of an even or an odd step is there (and that P before it has been read)
    MET             all threads of both groups    Q is there; the sums are there, and the piece has been read
    TOLD            all threads of both groups    a piece stands on the board

Nobody says that a place is free: who fills it has read it last. Half a step of K is read for S first, then for P V by the group
that fills it; the narrow part is read for S, then P takes its place, which the other group reads and fills again.

What runs once in a launch is short: its instructions come from memory, a few lines at a time, and two groups that both search
for their work wait for twice as many.
"""

import triton.language as tl

from strobe.kernels.common.channel import make_barriers, swizzled
from strobe.kernels.common.named_barrier import FIRST, announce, meet, rendezvous
from strobe.kernels.decode.arguments import Job, Kernel, Outputs, Piece
from strobe.kernels.decode.boxes import clear_values, first_step, has_others, pages_of_boxes, place_of_box
from strobe.kernels.decode.keys import is_page
from strobe.kernels.decode.layouts import lanes
from strobe.kernels.decode.pieces import take_pieces
from strobe.kernels.decode.products import (
    accumulator,
    lane_sums,
    masked,
    no_output,
    rescaled,
    rows_of,
    scale_of_scores,
    weights_of,
)
from strobe.kernels.decode.queries import copy_queries
from strobe.kernels.decode.results import deliver
from strobe.kernels.decode.scores import finite, is_seen, some_are_hidden
from strobe.kernels.gluon import (
    aggregate,
    async_copy,
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

EVEN, ODD, MET, TOLD = (gl.constexpr(FIRST.value + number) for number in (0, 1, 2, 4))
"""Numbers of named barriers; that of MET and the next one are a pair."""
NARROW = gl.constexpr(2)
"""The part of a step, beside its halves 0 and 1, that is no values."""
NUMBERS = gl.constexpr(16)
"""Numbers that say what a piece and its job are."""


@aggregate
class TurnsMemory:
    """The descriptors of both parts of K, and the shared memory of a CTA: see the tables above."""

    k_desc: tensor_descriptor
    narrow_desc: tensor_descriptor
    q: gl.shared_memory_descriptor
    q_narrow: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    narrow: gl.tuple
    tops: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    board: gl.shared_memory_descriptor
    full: gl.tuple


@gluon.jit
def make_turns_memory(k_desc, narrow_desc, C: gl.constexpr):
    """The caller fences."""
    dtype: gl.constexpr = k_desc.dtype
    HALF: gl.constexpr = swizzled(dtype, C.chunk)
    N: gl.constexpr = swizzled(dtype, C.narrow)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    full = ()  # one by one: between waits for barriers of one array Triton has the warps of a group meet
    for _ in gl.static_range(4):
        full += (make_barriers(1, 1),)
    narrow = ()
    for _ in gl.static_range(2):
        narrow += (gl.allocate_shared_memory(dtype, [1, C.tokens, C.narrow], N),)
    return TurnsMemory(
        k_desc,
        narrow_desc,
        gl.allocate_shared_memory(dtype, [2, C.rows, C.chunk], HALF),
        gl.allocate_shared_memory(dtype, [1, C.rows, C.narrow], N),
        gl.allocate_shared_memory(dtype, [4, C.tokens, C.chunk], HALF),
        narrow,
        gl.allocate_shared_memory(gl.float32, [2, C.rows], ROWS),
        gl.allocate_shared_memory(gl.float32, [2, C.rows], ROWS),
        gl.allocate_shared_memory(gl.int32, [NUMBERS, 1], ROWS),
        full,
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
def place(memory, zero, ODDS: gl.constexpr, PART: gl.constexpr):
    """Where a part of an even or an odd step lies. zero: 0, see `unknown_zero`."""
    if PART == NARROW:
        return memory.narrow[ODDS].index(zero)
    else:
        return memory.k.index(zero + 2 * ODDS + PART)


@gluon.jit
def page_of(walk, step):
    """The page of a step, which is one box."""
    return pages_of_boxes(walk.K.cached, walk.piece, walk.first + step * walk.K.C.tokens, walk.K.C)[0]


@gluon.jit
def copy_part(walk, page, step, barrier, go, ODDS: gl.constexpr, PART: gl.constexpr):
    """Start copying a part of a step, if `go`."""
    memory = walk.memory
    C: gl.constexpr = walk.K.C
    desc = memory.narrow_desc if PART == NARROW else memory.k_desc
    page, row = place_of_box(walk.K.cached, page, walk.first + step * C.tokens)
    box = place(memory, 0, ODDS, PART).reshape(desc.block_type.shape)
    tma_load(desc, [page, walk.piece.head, row, PART * C.chunk], barrier, box, pred=go)


@gluon.jit
def fill(walk, page, step, ODDS: gl.constexpr, W: gl.constexpr):
    """Start copying a group's half of a step, and the narrow part of the other one's, if the piece has that step."""
    C: gl.constexpr = walk.K.C
    COLUMNS: gl.constexpr = C.chunk if W == ODDS else C.chunk + C.narrow
    barrier = walk.memory.full[2 * ODDS + W].index(0)
    go = step < walk.steps
    mbarrier.expect(barrier, C.tokens * COLUMNS * 2, pred=go)
    copy_part(walk, page, step, barrier, go, ODDS, W)
    if W != ODDS:
        copy_part(walk, page, step, barrier, go, ODDS, NARROW)


@gluon.jit
def start_piece(memory, K, piece, W: gl.constexpr):
    """Start copying a group's parts of Q and of the first two steps."""
    C: gl.constexpr = K.C
    walk = walk_along(memory, K, piece)
    pages = page_of(walk, 0), page_of(walk, 1)
    copy_queries(memory.q.index(W), K.outputs, piece, W * C.chunk, C, K.GROUP)  # behind the keys it would come late
    if W == 1:
        copy_queries(memory.q_narrow.index(0), K.outputs, piece, C.head_dim, C, K.GROUP)
    async_copy.commit_group()
    fill(walk, pages[0], 0, 0, W)
    fill(walk, pages[1], 1, 1, W)
    return walk


# ---- products


@gluon.jit
def unknown_zero(turn):
    """0, which the compiler does not know, or it keeps the places of 36 products in registers, and spills them."""
    return turn >> 30


@gluon.jit
def start_part(memory, s, zero, ODDS: gl.constexpr, PART: gl.constexpr, ADDS: gl.constexpr):
    """S += Q K^T of a part of an even or an odd step."""
    q = memory.q_narrow.index(zero) if PART == NARROW else memory.q.index(zero + PART)
    return warpgroup_mma(q, place(memory, zero, ODDS, PART).permute((1, 0)), s, use_acc=ADDS, is_async=True)


@gluon.jit
def start_scores(memory, C: gl.constexpr, turn, ODDS: gl.constexpr):
    """S = Q K^T of the half that came first, of the turn-th even or odd step: the own one of the group whose step it is."""
    s = gl.full([C.rows, C.tokens], 0.0, gl.float32, accumulator(C, C.tokens))
    mbarrier.wait(memory.full[3 * ODDS].index(0), turn & 1)
    return start_part(memory, s, unknown_zero(turn), ODDS, ODDS, False)


@gluon.jit
def start_other_scores(memory, s, turn, ODDS: gl.constexpr):
    """S += Q K^T of all else."""
    zero = unknown_zero(turn)
    mbarrier.wait(memory.full[1 + ODDS].index(0), turn & 1)
    s = start_part(memory, s, zero, ODDS, 1 - ODDS, True)
    return start_part(memory, s, zero, ODDS, NARROW, True)


@gluon.jit
def start_output(walk, acc, p, ODDS: gl.constexpr, W: gl.constexpr):
    """O += P V of a group's half of an even or an odd step. p: the group's own, or in shared memory."""
    return warpgroup_mma(p, place(walk.memory, 0, ODDS, W), acc, is_async=True)


@gluon.jit
def own_output(walk, acc, p, W: gl.constexpr):
    """O + P V of a group's half of its own step."""
    C: gl.constexpr = walk.K.C
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(C, C.chunk), k_width=2)
    acc = warpgroup_mma_wait(0, deps=[start_output(walk, acc, gl.convert_layout(p, P), W, W)])
    partition_barrier()  # everybody has read it
    return acc


# ---- the softmax


@gluon.jit
def scaled_sums(sums, factor):
    return sums * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout)), 1)


@gluon.jit
def clear_step(walk, at, W: gl.constexpr):
    """Set the values of a group's own step to zero that are not of the piece, both halves."""
    C: gl.constexpr = walk.K.C
    for half in tl.range(2):
        clear_values(walk.memory.k.index(2 * W + half), walk.piece, at, C)
    fence_async_shared()  # before the group's warps meet in `publish`: one multiplies what others have cleared


@gluon.jit
def seen_alone(walk, s, at, hole):
    """Products of the step from key `at` on; -inf where nobody sees a key, and for all keys of a hole, a page that is none."""
    C: gl.constexpr = walk.K.C
    s = gl.reshape(s, [1, C.rows, C.tokens])
    L: gl.constexpr = s.type.layout
    s = gl.where(is_seen(walk.K.terms, walk.piece, at, C, walk.K.GROUP, L), s, -float("inf"))
    s = gl.convert_layout(gl.reshape(s, [C.rows, C.tokens]), accumulator(C, C.tokens))
    return gl.where(hole, -float("inf"), s)


@gluon.jit
def own_weights(walk, s, step, page, scale, sign, top, sums, W: gl.constexpr):
    """P of a group's own step, the maxima and the sums with it, and the factor of what was summed before. page: the step's."""
    K = walk.K
    at = walk.first + step * K.C.tokens
    if sign < 1.0:
        s = s * sign
    s = masked(s, K, walk.piece, at, False, K.C, False)
    hole = ~is_page(K.cached, page)
    if hole | some_are_hidden(K.terms, walk.piece, at, K.C):
        if has_others(walk.piece, at, K.C):
            clear_step(walk, at, W)
        s = seen_alone(walk, s, at, hole)
    top, wide, factor = weights_of(s, scale, top)
    return wide.to(walk.memory.q.dtype), top, scaled_sums(sums, factor) + lane_sums(wide), factor


@gluon.jit
def publish(memory, p, top, W: gl.constexpr):
    """Let the other group have P of this one's step, and the maxima by which it was computed."""
    partition_barrier()  # everybody has multiplied what lies there by Q
    memory.narrow[W].index(0).store(p)
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
    """Wait for Q, of both groups: by what its products become scores; O, the maxima and the sums of no keys."""
    K = walk.K
    C: gl.constexpr = K.C
    scale, sign = scale_of_scores(K.terms, walk.piece)
    async_copy.wait_group(0)
    fence_async_shared()
    rendezvous(MET, W)
    top = gl.full([C.rows], -float("inf"), gl.float32, rows_of(C, C.tokens))
    sums = lane_sums(gl.full([C.rows, C.tokens], 0.0, gl.float32, accumulator(C, C.tokens)))
    return scale, sign, page_of(walk, W), no_output(C)[0], top, sums


@gluon.jit
def walk_left(walk, evens):
    """The left group's half of a piece: O, the maxima, its sums. evens: how many even steps the CTA had before."""
    memory = walk.memory
    C: gl.constexpr = walk.K.C
    mine = (walk.steps + 1) // 2
    scale, sign, own, acc, top, sums = begin_piece(walk, 0)
    page = page_of(walk, 2)
    s = start_other_scores(memory, start_scores(memory, C, evens, 0), evens, 0)
    s = warpgroup_mma_wait(0, deps=[s])
    p, top, sums, _ = own_weights(walk, s, 0, own, scale, sign, top, sums, 0)
    publish(memory, p, top, 0)
    acc = own_output(walk, acc, p, 0)
    fill(walk, page, 2, 0, 0)
    for i in tl.range(1, mine, disable_licm=True):
        n = 2 * i
        own, odd_page, page = page, page_of(walk, n + 1), page_of(walk, n + 2)
        s = start_other_scores(memory, start_scores(memory, C, evens + i, 0), evens + i, 0)
        acc, top, sums = follow(memory, C, acc, top, sums, 0)
        acc = start_output(walk, acc, memory.narrow[1].index(0), 1, 0)
        s = warpgroup_mma_wait(1, deps=[s])
        p, top, sums, factor = own_weights(walk, s, n, own, scale, sign, top, sums, 0)
        publish(memory, p, top, 0)
        acc = warpgroup_mma_wait(0, deps=[acc])
        partition_barrier()  # everybody has read the step before
        fill(walk, odd_page, n + 1, 1, 0)
        acc = own_output(walk, rescaled((acc,), factor, C)[0], p, 0)
        fill(walk, page, n + 2, 0, 0)
    if walk.steps == 2 * mine:
        acc, top, sums = follow(memory, C, acc, top, sums, 0)
        acc = warpgroup_mma_wait(0, deps=[start_output(walk, acc, memory.narrow[1].index(0), 1, 0)])
    return acc, top, sums


@gluon.jit
def walk_right(walk, odds):
    """The right group's half of a piece, as `walk_left`. odds: how many odd steps the CTA had before."""
    memory = walk.memory
    C: gl.constexpr = walk.K.C
    mine = walk.steps // 2
    scale, sign, page, acc, top, sums = begin_piece(walk, 1)
    for i in tl.range(0, mine, disable_licm=True):
        n = 2 * i + 1
        own, even_page, page = page, page_of(walk, n + 1), page_of(walk, n + 2)
        acc, top, sums = follow(memory, C, acc, top, sums, 1)
        acc = start_output(walk, acc, memory.narrow[0].index(0), 0, 1)
        s = start_scores(memory, C, odds + i, 1)
        acc = warpgroup_mma_wait(1, deps=[acc])
        partition_barrier()  # everybody has read the step before
        fill(walk, even_page, n + 1, 0, 1)
        s = warpgroup_mma_wait(0, deps=[start_other_scores(memory, s, odds + i, 1)])
        p, top, sums, factor = own_weights(walk, s, n, own, scale, sign, top, sums, 1)
        publish(memory, p, top, 1)
        acc = own_output(walk, rescaled((acc,), factor, C)[0], p, 1)
        fill(walk, page, n + 2, 1, 1)
    if walk.steps > 2 * mine:
        acc, top, sums = follow(memory, C, acc, top, sums, 1)
        acc = warpgroup_mma_wait(0, deps=[start_output(walk, acc, memory.narrow[0].index(0), 0, 1)])
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
def tell(memory, piece, job):
    """Let the left group know of a piece."""
    numbers = (
        piece.batch, piece.entry, piece.head, piece.first_row, piece.first_query, piece.queries, piece.length, piece.begin,
        piece.end, job.number, job.parts, job.first, job.begins, job.stretch, job.place, job.patience,
    )  # fmt: skip
    for i in gl.static_range(NUMBERS):
        memory.board.index(i).store(gl.full([1], 0, gl.int32, lanes(gl.num_warps())) + numbers[i])
    announce(TOLD)


@gluon.jit
def tell_of_the_end(memory):
    """Let the left group know that there is no piece any more: by a job of no parts."""
    none = gl.to_tensor(0)
    piece = Piece(none, none, none, none, none, none, none, none, none)
    tell(memory, piece, Job(none, none, none, none, none, none, none))


@gluon.jit
def hear(memory):
    """The piece and the job of which the right group tells."""
    meet(TOLD)
    n = ()
    for i in gl.static_range(NUMBERS):
        n += (gl.max(memory.board.index(i).load(lanes(gl.num_warps())), 0),)
    return Piece(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8]), Job(n[9], n[10], n[11], n[12], n[13], n[14], n[15])


@gluon.jit
def take_right(memory, K, piece, job, odds):
    """Tell of a piece, and take it. odds: how many odd steps the CTA had before."""
    tell(memory, piece, job)
    walk = start_piece(memory, K, piece, 1)
    acc, top, sums = walk_right(walk, odds)
    end_piece(walk, job, acc, top, sums, 1)
    return odds + walk.steps // 2


@gluon.jit
def left_group(memory, K):
    """Take the pieces of which the right group tells."""
    evens = gl.to_tensor(0)  # steps that the CTA had before
    piece, job = hear(memory)
    while job.parts > 0:
        walk = start_piece(memory, K, piece, 0)
        acc, top, sums = walk_left(walk, evens)
        end_piece(walk, job, acc, top, sums, 0)
        evens += (walk.steps + 1) // 2
        piece, job = hear(memory)


@gluon.jit
def right_group(memory, K):
    take_pieces(take_right, memory, K, gl.to_tensor(0))
    tell_of_the_end(memory)
