"""Attention of a few queries over a cache, in Gluon, for Ampere and later: cp.async, ldmatrix, mma.sync.

The grid is persistent, and finds its own work from the lengths (`schedule`). All warps of a CTA do the same:

    warps       rows / 16 of them share the rows of a tile, and all others the keys of a step: a warp has 16 rows and
                tokens / token_warps keys, and a state of the softmax (maximum, sum, O) of its own, so that a step needs no
                exchange between warps
    a tile      up to `rows` rows that share a key head: queries times the query heads of its group

    shared memory   shape                       holds
    k_ring          [stages, tokens, head_dim]  steps i ... i + stages - 1 of K, those beyond i still being copied;
    v_ring          [stages, tokens, dim_v]     the same of V, if it is not the first columns of K; at the end of a piece
                                                what the warps found, to be added up, in the wider of both rings
    narrow ring     [stages, tokens, narrow]    the columns of K beyond those of V, where V is the others
    stats           2 x [token_warps, rows]     the maxima and the sums of each warp's rows

A step is two groups of cp.async, of K and of V. After the wait for a group a barrier says that everybody's copies are there,
and that everybody has read what is copied over next. Where pages are looked up, the page numbers of a step are loaded one step
before its copies begin.

Keys that are none (beyond a length, of a page that is not there) are copied as zeros and masked: whatever lies there, NaN too,
stays there. (Of one request the first keys of a CTA are asked for before the length is known, and are masked alone.)

Where one request is all, each of its key heads is shared by as many CTAs: see `take_share`. What they found is merged as parts
of a job are or, in a cluster, meets in the shared memory of all (`common.cluster`).

Here is what is mma.sync's own; keys of 8 bits have a loop of their own (`eight_bits`). Beside it stands what it shares with
Hopper's kernels: a CTA's pieces of work (`pieces`), where keys lie (`keys`), which of them count for how much (`scores`),
writing and merging results (`results`).
"""

import math

from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from strobe.kernels.common.cluster import begin_cluster, read_arguments
from strobe.kernels.common.dependent_launch import take_turn
from strobe.kernels.decode.arguments import NUMBERS, Cached, Job, Kernel, Outputs, Piece, Terms
from strobe.kernels.decode.eight_bits import walk_8_bits
from strobe.kernels.decode.keys import (
    as_half,
    copy_keys,
    copy_values,
    holds_queries,
    load_queries,
    look_up,
    of_8_bits,
    same_or_looked_up,
)
from strobe.kernels.decode.layouts import copy_layout, product_layout, result_layout, ring_layout
from strobe.kernels.decode.notes import NOTED, Notes
from strobe.kernels.decode.parts import PATIENCE
from strobe.kernels.decode.pieces import ask_ahead, take_pieces
from strobe.kernels.decode.results import deliver, deliver_share, nothing, take_splits
from strobe.kernels.decode.schedule import Requests, keys_of, queries_of, units_of
from strobe.kernels.decode.scores import finite, scale_of_values, scores_of
from strobe.kernels.decode.writes import write_all
from strobe.kernels.gluon import gl, gluon, partition_barrier, reinterpret

CHUNK = gl.constexpr(64)
"""Columns of Q that are loaded at a time where it has many: the width of a swizzle."""


@gluon.constexpr_function
def meet_shape(C, ROWS):
    """The wider ring as a place for what all warps found: chunks of columns, so wide that whole ones fill the ring. (Triton 3.8
    sees memory as another type only if that is equally large.)"""
    rows = ROWS if C.rows == 2 * ROWS == 16 else C.rows
    room = C.ring_bytes(max(C.head_dim, C.head_dim_v)) // (4 * C.token_warps * rows)
    columns = math.gcd(C.head_dim_v, room)
    return [room // columns, C.token_warps, rows, columns]


@gluon.jit
def products_of(rings, slot, q, outputs, piece, C: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr):
    """Q K^T of a step. Where registers do not hold Q beside O, it comes from the L1 cache: whole, or 64 columns at a time."""
    L: gl.constexpr = product_layout(C)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    s = gl.full([C.token_warps, C.rows, C.tokens // C.token_warps], 0.0, gl.float32, L)
    k = rings[0].index(slot)
    if holds_queries(C):
        s = mma_v2(q, k.permute((0, 2, 1)).load(RIGHT).to(q.dtype), s)
    elif C.head_dim <= 256:
        q = load_queries(outputs, piece, 0, C.head_dim, LEFT, C, GROUP, DIM)
        s = mma_v2(q, k.permute((0, 2, 1)).load(RIGHT).to(q.dtype), s)
    else:
        CHUNKS: gl.constexpr = C.head_dim // CHUNK
        for chunk in gl.static_range(CHUNKS):
            q = load_queries(outputs, piece, chunk * CHUNK, CHUNK, LEFT, C, GROUP, DIM)
            s = mma_v2(q, k.slice(chunk * CHUNK, CHUNK, 2).permute((0, 2, 1)).load(RIGHT).to(q.dtype), s)
    if C.narrow > 0:
        q = load_queries(outputs, piece, C.head_dim, C.narrow, LEFT, C, GROUP, DIM)
        s = mma_v2(q, rings[2].index(slot).permute((0, 2, 1)).load(RIGHT).to(q.dtype), s)
    return s


@gluon.jit
def walk(rings, K, piece, asked):
    """Walk along the keys of a piece: each warp's O, maxima and sums. asked: the piece, or as much of it as is known before its
    request's length is, in whose stead the first pages are looked up, and the first keys are copied."""
    if of_8_bits(K.C):
        return walk_8_bits(rings, K, piece, asked)
    else:
        return walk_16_bits(rings, K.outputs, K.terms, K.cached, piece, asked, K.C, K.GROUP, K.DIM, K.DIM_V)


@gluon.jit
def walk_16_bits(rings, outputs, terms, cached, piece, asked, C: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
                 DIM_V: gl.constexpr):  # fmt: skip
    """The same of keys that no other loop has: of 16 bits, or of 8 in many columns."""
    entry = piece.entry
    L: gl.constexpr = product_layout(C)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    width: gl.constexpr = 16 // C.kv_bytes
    K_COPY: gl.constexpr = copy_layout(C, C.head_dim, width)
    V_COPY: gl.constexpr = copy_layout(C, C.head_dim_v, width)
    k_scale = 1.0
    if terms.k_scale is not None:
        if not terms.K_BY_TOKEN:
            k_scale = gl.load(terms.k_scale + piece.batch * terms.k_scale_page + piece.head * terms.k_scale_row)

    K_KEYS: gl.constexpr = gl.SliceLayout(2, K_COPY)
    V_KEYS: gl.constexpr = gl.SliceLayout(2, V_COPY)
    S_KEYS: gl.constexpr = gl.SliceLayout(1, L)
    SHARE: gl.constexpr = C.shares > 0
    begin = piece.begin // C.tokens * C.tokens
    STAGES: gl.constexpr = C.stages
    k_pages = ()
    for i in gl.static_range(STAGES):  # all are under way before the first copy waits for its own
        k_pages += (look_up(cached, asked, begin + i * C.stride, C, K_KEYS, SHARE),)
    if SHARE:
        s_pages = look_up(cached, asked, begin, C, S_KEYS, SHARE)
        copy_keys(rings, 0, cached, asked, begin, k_pages[0], K_COPY, C, DIM, SHARE)
        q = load_queries(outputs, piece, 0, C.head_dim, LEFT, C, GROUP, DIM)
    for i in gl.static_range(C.stages - 1):
        first = begin + i * C.stride
        if not SHARE or i > 0:
            copy_keys(rings, i, cached, piece, first, k_pages[i], K_COPY, C, DIM)
        pages = same_or_looked_up(cached, piece, k_pages[i], first, C, V_KEYS)
        copy_values(rings, i, cached, piece, first, pages, V_COPY, C, DIM_V)
    ahead: gl.constexpr = (C.stages - 1) * C.stride
    k_pages = k_pages[C.stages - 1]
    v_pages = same_or_looked_up(cached, piece, k_pages, begin + ahead, C, V_KEYS)
    if not SHARE:
        q = load_queries(outputs, piece, 0, C.head_dim if holds_queries(C) else CHUNK, LEFT, C, GROUP, DIM)
    OF_P: gl.constexpr = gl.bfloat16 if terms.V_BY_TOKEN else gl.float16 if C.kv_bytes == 1 else q.dtype
    if C.kv_bytes == 1 and C.head_dim <= 128 and q.dtype == gl.bfloat16:
        q, power = as_half(q)
        k_scale = k_scale * gl.convert_layout(power, L)
    acc = gl.full([C.token_warps, C.rows, C.head_dim_v], 0.0, gl.float32, L)
    row_max = gl.full([C.token_warps, C.rows], -float("inf"), gl.float32, gl.SliceLayout(2, L))
    row_sum = gl.full([C.token_warps, C.rows], 0.0, gl.float32, gl.SliceLayout(2, L))
    under_way: gl.constexpr = (C.stages - 1) * (1 if C.narrow > 0 else 2) - 1
    steps = (piece.end - begin + C.stride - 1) // C.stride
    for i in range(steps):
        first = begin + i * C.stride
        now, next = i % C.stages, (i + C.stages - 1) % C.stages
        async_copy.wait_group(under_way)
        partition_barrier()
        copy_keys(rings, next, cached, piece, first + ahead, k_pages, K_COPY, C, DIM)
        k_pages = look_up(cached, piece, first + ahead + C.stride, C, K_KEYS)
        s = products_of(rings, now, q, outputs, piece, C, GROUP, DIM)
        if SHARE:
            of_scores, s_pages = s_pages, look_up(cached, piece, first + C.stride, C, S_KEYS)
        else:
            of_scores = look_up(cached, piece, first, C, S_KEYS)
        s = scores_of(s, terms, cached, piece, entry, first, of_scores, k_scale, C, GROUP, L)
        new_max = gl.maximum(row_max, gl.max(s, 2))
        shift = finite(new_max)
        p = gl.exp2(s - gl.expand_dims(shift, 2))
        rescale = gl.exp2(row_max - shift)
        row_sum = row_sum * rescale + gl.sum(p, 2)
        row_max = new_max
        acc = acc * gl.expand_dims(rescale, 2)
        if terms.V_BY_TOKEN:  # they may leave the range of float16
            p = p * gl.expand_dims(scale_of_values(terms, cached, piece, entry, first, C, gl.SliceLayout(1, L)), 1)
        if C.narrow == 0:
            async_copy.wait_group(under_way)
            partition_barrier()
            copy_values(rings, next, cached, piece, first + ahead, v_pages, V_COPY, C, DIM_V)
            v_pages = same_or_looked_up(cached, piece, k_pages, first + ahead + C.stride, C, V_KEYS)
        v = rings[1].index(now).load(RIGHT).to(OF_P)
        acc = mma_v2(gl.convert_layout(p.to(OF_P), LEFT), v, acc)
    async_copy.wait_group(0)
    return acc, row_max, row_sum


@gluon.jit
def take(memory, K, piece, job, state):
    """What all warps find along the keys of a piece is added up and delivered."""
    if K.C.split:
        COLUMNS: gl.constexpr = meet_shape(K.C, K.ROWS)[3]
        return take_splits(find, memory, K, piece, job, nothing(result_layout(K.C, COLUMNS), COLUMNS, K), state)
    else:
        found, state = find(memory, K, piece, state)
        deliver(K, piece, job, found[0], found[1], found[2])
        partition_barrier()  # everybody has read what the warps found, where K goes next
        return state


@gluon.jit
def find(memory, K, piece, state):
    """What all warps find along the keys of a piece, added up."""
    rings, stats = memory
    acc, row_max, row_sum = walk(rings, K, piece, piece)
    return gather_warps(in_ring(rings, K.C, K.ROWS), stats, acc, row_max, row_sum, K.C, K.ROWS), state


@gluon.jit
def take_share(memory, K):
    """What a CTA does that shares a key head of a request with others, or has it whole: its steps, by turns, and in a cluster
    its share of the result. Whose turn it is does not depend on lengths, so pages and keys are asked for while its request's is
    on its way."""
    C: gl.constexpr = K.C
    requests, rank = K.requests, gl.program_id(0) % C.shares
    rings, stats, meet = memory
    head, batch, first = gl.program_id(0) // C.shares, gl.program_id(1), 0 * rank
    first_query, queries = queries_of(requests, batch, batch < requests.batch)
    begin, end, length = keys_of(requests, batch, batch < requests.batch, queries, True)
    if requests.cu_q is not None:
        end = gl.where(queries > 0, end, begin)
    entry = batch
    if requests.index is not None:
        entry = gl.load(requests.index + batch)
    parts = gl.minimum(units_of(begin, end, C), C.shares)
    origin = (begin // C.tokens + rank) * C.tokens
    begin = gl.maximum(begin, origin)
    piece = Piece(batch, entry, head, first, first_query, queries, length, begin, end)
    asked = Piece(batch, entry, head, first, first_query, queries, length, begin, requests.capacity)
    acc, row_max, row_sum = walk(rings, K, piece, asked)
    if C.clustered or rank < parts:  # others have no keys
        o, top, total = gather_warps(meeting_place(rings, meet, C, K.ROWS), stats, acc, row_max, row_sum, C, K.ROWS)
        if C.clustered:
            gl.static_assert(len(o) == 1)
            deliver_share(K, piece, rank, o[0], top, total)
        elif C.shares == 1:
            write_all(K, piece, o, top, total)
        else:
            number = batch * K.heads_kv + head
            of_job = number * C.shares
            job = Job(number, parts, of_job, of_job, 0 * rank + 1, 2 * (of_job + rank), 0 * rank + PATIENCE)
            deliver(K, piece, job, o, top, total)


@gluon.jit
def in_chunks(x, COLUMNS: gl.constexpr):
    """x [.., .., columns] in chunks of COLUMNS, which each thread has a part of."""
    if x.shape[2] == COLUMNS:
        return (x,)
    else:
        halves = gl.reshape(x, [x.shape[0], x.shape[1], 2, x.shape[2] // 2])
        first, second = gl.split(gl.permute(halves, (0, 1, 3, 2)))
        return in_chunks(first, COLUMNS) + in_chunks(second, COLUMNS)


@gluon.jit
def rows_in_use(x, C: gl.constexpr, ROWS: gl.constexpr):
    """x [.., rows, columns] without rows that are not in use: half of 16, of which each thread has some."""
    if C.rows == 2 * ROWS and C.rows == 16:
        halves = gl.reshape(x, [x.shape[0], 2, ROWS, x.shape[2]])
        return gl.split(gl.permute(halves, (0, 2, 3, 1)))[0]
    else:
        return x


@gluon.jit
def in_ring(rings, C: gl.constexpr, ROWS: gl.constexpr):
    """The wider ring as a place where warps meet, once everybody has read its last step."""
    SHAPE: gl.constexpr = meet_shape(C, ROWS)
    WIDER: gl.constexpr = 1 if C.head_dim_v > C.head_dim else 0
    meet = reinterpret(rings[WIDER], gl.float32, SHAPE, meet_layout(C, SHAPE[3]))
    partition_barrier()
    return meet


@gluon.jit
def meeting_place(rings, meet, C: gl.constexpr, ROWS: gl.constexpr):
    """Where warps meet: at a place of its own, `meet`, or in the wider ring."""
    if C.meets_apart:
        return meet
    else:
        return in_ring(rings, C, ROWS)


@gluon.constexpr_function
def meet_layout(C, columns):
    unit = 8 if C.rows == 16 else 4  # by 8 a warp's 8 rows hit all banks; for more rows a register is missing
    return ring_layout(columns, unit)


@gluon.jit
def gather_warps(meet, stats, acc, row_max, row_sum, C: gl.constexpr, ROWS: gl.constexpr):
    """What all warps of a CTA found together: O in chunks of columns, [ROWS, columns] each, not divided yet, the maximum and
    the sum of each row. A thread weighs what it adds up, so the warps meet once. meet: where, [chunks, warps, ROWS,
    columns]."""
    SHAPE: gl.constexpr = meet.shape
    R: gl.constexpr = result_layout(C, SHAPE[3])
    W: gl.constexpr = gl.SliceLayout(2, R)
    M: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, R))
    chunks = in_chunks(rows_in_use(acc, C, ROWS), SHAPE[3])
    for c in gl.static_range(len(chunks)):
        meet.index(c).store(chunks[c])
    stats[0].store(row_max)
    stats[1].store(row_sum)
    partition_barrier()
    tops = stats[0].slice(0, ROWS, 1).load(W)
    top = gl.max(tops, 0)
    weights = gl.exp2(tops - gl.expand_dims(finite(top), 0))
    total = gl.sum(stats[1].slice(0, ROWS, 1).load(W) * weights, 0)
    o = ()
    for c in gl.static_range(len(chunks)):
        o += (gl.sum(meet.index(c).slice(0, ROWS, 1).load(R) * gl.expand_dims(weights, 2), 0),)
    return o, gl.convert_layout(top, M), gl.convert_layout(total, M)


@gluon.jit(do_not_specialize=NUMBERS)
def decode_kernel(
    q, k, v, out, lse, lengths, page_table, index, leftpad, cu_q, tree, alibi, sinks, k_scale, v_scale, parts, sums, arrivals,
    q_batch, q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head, out_batch, out_row, out_head, lse_batch, lse_head,
    table_row, tree_batch, tree_row, tree_column, alibi_batch, k_scale_page, k_scale_row, v_scale_page, v_scale_row, batch,
    heads_kv, n_q, capacity, total_q, pages, tiles, scale, softcap, left, right,
    C: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, ROWS: gl.constexpr,
    BY_ROW: gl.constexpr, K_BY_TOKEN: gl.constexpr, V_BY_TOKEN: gl.constexpr, IN_TURN: gl.constexpr,
    notes=None, counters=None, served=None,
):  # fmt: skip
    if C.cluster > 1:
        begin_cluster(C.cluster, ROWS, C.head_dim_v, C.posts)
    if C.shares > 0:
        read_arguments(lengths, q_batch, v_head, out_head, tiles)
    if IN_TURN:
        take_turn()
    noted = None
    if notes is not None:
        noted = Notes(notes, counters)
    requests = Requests(lengths, leftpad, index, cu_q, batch, n_q, capacity, total_q, pages, left, noted, served)
    cached = Cached(k, v, page_table, k_page, k_row, k_head, v_page, v_row, v_head, table_row, pages, PAGE)
    terms = Terms(tree, tree_batch, tree_row, tree_column, alibi, alibi_batch, sinks, k_scale, v_scale, k_scale_page,
                  k_scale_row, v_scale_page, v_scale_row, scale, softcap, left, right, BY_ROW, K_BY_TOKEN,
                  V_BY_TOKEN)  # fmt: skip
    outputs = Outputs(q, q_batch, q_row, q_head, out, out_batch, out_row, out_head, lse, lse_batch, lse_head, parts, sums,
                      arrivals)  # fmt: skip
    K = Kernel(requests, outputs, terms, cached, heads_kv, tiles, C, GROUP, DIM, DIM_V, ROWS)
    if C.shares == 0:
        ask_ahead(K)
    each: gl.constexpr = C.tokens // C.token_warps
    width: gl.constexpr = 16 // C.kv_bytes
    k_ring = gl.allocate_shared_memory(k.dtype.element_ty, [C.stages, C.token_warps, each, C.head_dim],
                                       ring_layout(C.head_dim, width))  # fmt: skip
    if C.narrow > 0:  # V is the first columns of K
        rings = (k_ring, k_ring, gl.allocate_shared_memory(
            k.dtype.element_ty, [C.stages, C.token_warps, each, C.narrow], ring_layout(C.narrow, width)))  # fmt: skip
    else:
        rings = (k_ring, gl.allocate_shared_memory(
            k.dtype.element_ty, [C.stages, C.token_warps, each, C.head_dim_v], ring_layout(C.head_dim_v, width)))  # fmt: skip
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    stats = (gl.allocate_shared_memory(gl.float32, [C.token_warps, C.rows], PLAIN),
             gl.allocate_shared_memory(gl.float32, [C.token_warps, C.rows], PLAIN))  # fmt: skip

    if C.meets_apart:
        meet = gl.allocate_shared_memory(gl.float32, [1, C.token_warps, ROWS, C.head_dim_v], meet_layout(C, C.head_dim_v))
        take_share((rings, stats, meet), K)
    elif C.shares > 0:
        take_share((rings, stats, None), K)
    elif notes is None or gl.load(counters + NOTED) != 0:
        take_pieces(take, (rings, stats), K, gl.to_tensor(0))
