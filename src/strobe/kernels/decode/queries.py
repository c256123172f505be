"""How a group of warps of wgmma gets its rows of Q: loaded and stored, copied by cp.async, or asked for by TMA."""

from strobe.kernels.decode.boxes import misses_a_page, rows_layout
from strobe.kernels.decode.keys import largest, load_queries, power_of, wide
from strobe.kernels.decode.products import accumulator, rows_of, scale_of_scores
from strobe.kernels.gluon import cp_async, fence_async_shared, gl, gluon, mbarrier, partition_barrier, tma_load


@gluon.jit
def rows_of_queries(outputs, piece, FIRST: gl.constexpr, COLUMNS: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr,
                    DIM: gl.constexpr):  # fmt: skip
    """Columns of the rows of a tile of Q from FIRST on, zeros beyond the last one."""
    WIDTH: gl.constexpr = 8 if DIM % 8 == 0 else 2
    q = load_queries(outputs, piece, FIRST, COLUMNS, rows_layout(COLUMNS, C.warps), C, GROUP, DIM, WIDTH)
    return gl.reshape(q, [C.rows, COLUMNS])


@gluon.jit
def copy_queries(place, outputs, piece, FIRST: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr):
    """Start copying columns from FIRST on of the rows of a tile of Q to a place in shared memory; zeros beyond the last row."""
    COLUMNS: gl.constexpr = place.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, C.rows, gl.SliceLayout(1, L))
    at = outputs.q + piece.batch.to(gl.int64) * outputs.q_batch + FIRST
    column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, L)), 0)
    if GROUP % C.rows == 0:  # all rows are there, and of one query: so addresses take fewer instructions
        query, head = piece.first_query + piece.first_row // GROUP, piece.head * GROUP + piece.first_row % GROUP
        at += wide(query, outputs.q_row) + wide(head, outputs.q_head)
        at += gl.expand_dims(wide(row, outputs.q_head), 1) + column
        cp_async(place, gl.multiple_of(at, [1, 16]))  # bytes
    else:
        row += piece.first_row
        query, head = piece.first_query + row // GROUP, piece.head * GROUP + row % GROUP
        at += gl.expand_dims(wide(query, outputs.q_row) + wide(head, outputs.q_head), 1) + column
        mask = gl.max_constancy(gl.expand_dims(row < piece.queries * GROUP, 1) & (column >= 0), [1, 8])
        cp_async(place, gl.multiple_of(at, [1, 16]), mask=mask)  # bytes


@gluon.jit
def ask_for_queries(descriptor, place, barrier, requests, piece, C: gl.constexpr, GROUP: gl.constexpr):
    """Start copying the rows of a tile of Q to `place`, [groups of warps * chunks, rows of a group, chunk], by TMA; zeros
    beyond the last query, or those of the next request. Rows of absent heads hold anything."""
    CHUNKS: gl.constexpr = C.head_dim // C.chunk
    GROUPS: gl.constexpr = C.groups
    QUERIES: gl.constexpr = C.rows // GROUPS // GROUP
    query, head = piece.first_query + piece.first_row // GROUP, piece.head * (GROUP - C.absent)
    batch = piece.batch
    if requests.cu_q is not None:
        batch = 0 * batch
    for w in gl.static_range(GROUPS):
        for c in gl.static_range(CHUNKS):
            box = place.index(w * CHUNKS + c).reshape(descriptor.block_type.shape)
            tma_load(descriptor, [batch, query + w * QUERIES, head, c * C.chunk], barrier, box)


@gluon.jit
def ask_in_turn(memory, K, piece, taken):
    """The same when the piece before has been read; taken: how many pieces the CTA took before."""
    C: gl.constexpr = K.C
    barrier = memory.turns.acquire(taken)
    mbarrier.expect(barrier, C.rows * C.head_dim * 2)
    ask_for_queries(memory.q_desc, memory.q, barrier, K.requests, piece, C, K.GROUP)


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
def asked_in_place(W: gl.constexpr, memory, K, piece, taken, C: gl.constexpr):
    """The same where Q stays in shared memory, until who reads it releases its turn. taken: how many pieces the CTA took
    before."""
    CHUNKS: gl.constexpr = C.head_dim // C.chunk
    holes = misses_a_page(K.cached, piece)
    scale, sign = scale_of_scores(K.terms, piece)
    memory.turns.wait(taken)
    q = ()
    for c in gl.static_range(CHUNKS):
        q += (memory.q.index(W * CHUNKS + c),)
    if sign != 1.0:
        L: gl.constexpr = gl.SliceLayout(0, rows_layout(C.chunk, C.warps))
        for c in gl.static_range(CHUNKS):
            q[c].store((q[c].load(L).to(gl.float32) * sign).to(memory.q.dtype))
        fence_async_shared()
        partition_barrier()
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
