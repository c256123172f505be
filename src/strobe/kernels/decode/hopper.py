"""Attention of many rows over a cache, in Gluon, for Hopper: TMA, wgmma, warp specialisation.

The schedule, the terms, the results and their merging are those of `forward`. The roles that copy are in `copiers`, how a
multiplier gets its queries in `queries`, what it does with a step in `products` or, where keys are cut in splits, in
`split_steps`. Every role finds its CTA's pieces of work from the lengths by itself or, of two groups or of 8 bits, the first
copier does, and tells the others (see `board`). The roles:

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
                    or rows, which cp.async copies,
                    or groups of 8 keys
    q               [groups * chunks, rows of a        a multiplier,  itself
                    group, chunk]                      or who copies
                                                       K or bytes
    notes           [groups * NOTES, 1]                a multiplier   itself: numbers of a piece, where there are splits
    sums            [groups * chunks, squares of 8     a multiplier   itself: O of a part's splits, where registers are Q's
                    rows and 8 columns]

    barrier         arrivals                           says
    full            TMA bytes, or the copier of V,     a step is there
                    or the copier of rows
    v.full, last    TMA bytes                          a step of V is there that must be cleared
    empty           one of each multiplier             a step has been read
    turns           TMA bytes; one of each multiplier  Q is there; it has been read (if it stays in shared memory, or has 8 bits
                                                       beside it)

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
from strobe.kernels.decode.again import ALL, Again, bit_of, chosen_next, is_chosen, make_again, out_of_range, tell
from strobe.kernels.decode.arguments import NUMBERS, Cached, Job, Kernel, Outputs, Piece, Terms
from strobe.kernels.decode.board import Board, make_board, take_all
from strobe.kernels.decode.boxes import first_step
from strobe.kernels.decode.converted import converter, converter_of_keys, converter_of_values, copier_of_bytes, make_bytes
from strobe.kernels.decode.copiers import copier_of_keys, copier_of_rows, copier_of_values
from strobe.kernels.decode.latent import make_latent_memory, take_latent
from strobe.kernels.decode.latent_turns import left_group, make_turns_memory, right_group
from strobe.kernels.decode.pieces import ask_ahead, take_pieces
from strobe.kernels.decode.products import (
    beside,
    lane_sums,
    masked,
    operand_of,
    output_of,
    rescaled,
    rescaled_sums,
    rows_of,
    start_output,
    start_scores,
    wait_output,
    weights_of,
)
from strobe.kernels.decode.queries import asked_halves, asked_in_place, asked_queries, store_queries
from strobe.kernels.decode.results import deliver
from strobe.kernels.decode.schedule import Requests
from strobe.kernels.decode.scores import finite
from strobe.kernels.decode.split_steps import (
    NOTES,
    added_split,
    hopeful_split_step,
    no_part,
    note,
    noted,
    put_down,
    reach_of,
    split_step,
    taken_up,
    worse,
)
from strobe.kernels.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    partition_barrier,
    tensor_descriptor,
    warpgroup_mma_wait,
)


@aggregate
class Memory:
    """The descriptors of K and V, the shared memory of a CTA (see the tables above), and the type of what is multiplied."""

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
    dtype: gl.constexpr


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
    if C.q_in_turn:
        turns = Channel((), make_barriers(1, 1), make_barriers(1, C.groups), 1)
    if C.tells:
        board = make_board(C.groups + max(C.converters, 1))
    if C.split:
        notes = gl.allocate_shared_memory(gl.int32, [C.groups * NOTES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if C.sums_wait:
        squares: gl.constexpr = [C.groups * (C.head_dim_v // C.chunk), C.rows // C.groups // 8, C.chunk // 8, 8, 8]
        sums = gl.allocate_shared_memory(gl.float32, squares, gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    k, v = make_ring(dtype, C.head_dim, 0, C), make_ring(dtype, C.head_dim_v, 1, C)
    return Memory(k_desc, v_desc, q_desc, q, k, v, again, notes, sums, board, bytes, turns, dtype)


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


# ---- multipliers


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
def hopeful_step(memory, s, scale, shift, acc, sums, now, C: gl.constexpr):
    """P of a step's scores, whose exponents are counted from the same maxima as those of the steps before; O and sums."""
    wide = gl.exp2(gl.fma(s, beside(scale), shift))
    sums += lane_sums(wide)
    acc = output_of(memory, acc, now - 1)
    return operand_of(wide, memory.dtype, C), acc, sums


@gluon.jit
def running_step(memory, s, scale, acc, top, sums, now, C: gl.constexpr):
    """The same with a running maximum, which is returned, too."""
    top, wide, factor = weights_of(s, scale, top)
    sums = rescaled_sums(sums, factor) + lane_sums(wide)
    acc = output_of(memory, acc, now - 1)
    p = operand_of(wide, memory.dtype, C)
    return p, rescaled(acc, factor, C), top, sums


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
    elif C.q_in_turn:
        q, scale, power, holes = asked_in_place(W, memory, K, piece, taken, C)
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
    sums, p = lane_sums(wide), operand_of(wide, memory.dtype, C)
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
    if C.asks_q and not C.holds_q:
        memory.turns.release(taken)
    position += steps
    memory.v.wait(position - 1)
    acc = wait_output(start_output(acc, p, block_of(memory.v, position - 1, C), C))
    memory.v.release(position - 1)
    total = gl.convert_layout(gl.sum(sums, 1), rows_of(C, C.tokens))
    broken = False
    if C.optimistic and C.split:
        broken = (plain > 1) & (gl.max(worst, 0) >= 2.0 ** reach_of(memory.dtype))
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
            broken = broken | bit_of(number, job, K.C)
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
    served=None,
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
    requests = Requests(lengths, leftpad, index, cu_q, batch, n_q, capacity, total_q, pages, left, None, served)
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
    elif C.bytes_stages > 0 and C.converters == 1:
        gl.warp_specialize(
            [(multiplier, (memory, K)), (converter, (memory, K)), (copier_of_bytes, (memory, K))],
            [4, 1], [C.converter_registers, C.copier_registers],
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
