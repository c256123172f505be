"""Attention over a cache whose values are columns of its keys (MLA), in Gluon, for Hopper: TMA, and wgmma of 64 rows.

All eight warps of a CTA do the same; four have half of a step's keys and half of the columns of O each, so the weights meet in
shared memory. There is room for two steps alone: products of one step do not overlap with those of the next, whose copy would
come too late.

    shared memory   shape                                holds
    k               [stages * chunks, tokens, chunk]     steps of the columns that are values, in chunks; at the end of a piece
                                                         its result
    narrow          [stages, tokens, narrow]             the other columns; at the end of a piece the maximum and the sum of
                                                         each row
    q, q_narrow     [rows, chunk] each, [rows, narrow]   the rows of Q
    p               [rows, tokens]                       the weights of a step

    barrier         arrivals                             says
    full            TMA bytes                            a step is there

A barrier of the CTA, one for each step, says that a step has been read; then its place is filled again.
"""

import triton.language as tl

from strobe.kernels.common.channel import make_barriers, swizzled
from strobe.kernels.decode.boxes import clear_values, first_step, has_others, misses_a_page, pages_of_boxes, place_of_box
from strobe.kernels.decode.layouts import result_layout, ring_layout
from strobe.kernels.decode.products import (
    accumulator,
    no_output,
    rescaled,
    rows_of,
    scale_of_keys,
    seen_scores,
    wait_output,
    weights,
)
from strobe.kernels.decode.queries import rows_of_queries
from strobe.kernels.decode.results import deliver, nothing, take_splits
from strobe.kernels.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    reinterpret,
    tensor_descriptor,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@aggregate
class LatentMemory:
    """The descriptors of both parts of K, and the shared memory of a CTA: see the tables above."""

    k_desc: tensor_descriptor
    narrow_desc: tensor_descriptor
    q: gl.tuple
    q_narrow: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    narrow: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor


@gluon.constexpr_function
def chunks_shape(C):
    return [C.stages * (C.head_dim // C.chunk), C.tokens, C.chunk]


@gluon.constexpr_function
def result_shape(C):
    return [1, C.rows, C.head_dim_v]


@gluon.constexpr_function
def stats_shape(C):
    return [2, C.rows]


@gluon.jit
def make_latent_memory(k_desc, narrow_desc, C: gl.constexpr):
    """The caller fences."""
    dtype: gl.constexpr = k_desc.dtype
    L: gl.constexpr = swizzled(dtype, C.chunk)
    N: gl.constexpr = swizzled(dtype, C.narrow)
    q = ()
    for _ in gl.static_range(C.head_dim // C.chunk):
        q += (gl.allocate_shared_memory(dtype, [C.rows, C.chunk], L),)
    narrow = gl.allocate_shared_memory(dtype, [C.stages, C.tokens, C.narrow], N)
    return LatentMemory(
        k_desc,
        narrow_desc,
        q,
        gl.allocate_shared_memory(dtype, [C.rows, C.narrow], N),
        gl.allocate_shared_memory(dtype, chunks_shape(C), L),
        narrow,
        gl.allocate_shared_memory(dtype, [C.rows, C.tokens], swizzled(dtype, C.tokens)),
        make_barriers(C.stages, 1),
        reinterpret(narrow, gl.float32, stats_shape(C), gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )


@gluon.jit
def copy_latent(memory, turn, cached, page, head, first, go, C: gl.constexpr):
    """Start copying the step from key `first` on, which is one box, if `go`; turn: how many steps the CTA copied before it."""
    slot = turn % C.stages
    CHUNKS: gl.constexpr = C.head_dim // C.chunk
    barrier = memory.full.index(slot)
    mbarrier.expect(barrier, C.tokens * (C.head_dim + C.narrow) * 2, pred=go)
    page, row = place_of_box(cached, page, first)
    for c in gl.static_range(CHUNKS):
        box = memory.k.index(slot * CHUNKS + c).reshape(memory.k_desc.block_type.shape)
        tma_load(memory.k_desc, [page, head, row, c * C.chunk], barrier, box, pred=go)
    box = memory.narrow.index(slot).reshape(memory.narrow_desc.block_type.shape)
    tma_load(memory.narrow_desc, [page, head, row, C.head_dim], barrier, box, pred=go)


@gluon.jit
def chunks_of_step(memory, turn, C: gl.constexpr):
    chunks = ()
    for c in gl.static_range(C.head_dim // C.chunk):
        chunks += (memory.k.index(turn % C.stages * (C.head_dim // C.chunk) + c),)
    return chunks


@gluon.jit
def latent_scores(memory, k, turn, C: gl.constexpr):
    """S = Q K^T."""
    s = gl.full([C.rows, C.tokens], 0.0, gl.float32, accumulator(C, C.tokens))
    for c in gl.static_range(len(k)):
        s = warpgroup_mma(memory.q[c], k[c].permute((1, 0)), s, use_acc=c > 0, is_async=True)
    s = warpgroup_mma(memory.q_narrow, memory.narrow.index(turn % C.stages).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def latent_output(memory, acc, v):
    """O += P V."""
    new = ()
    for c in gl.static_range(len(v)):
        new += (warpgroup_mma(memory.p, v[c], acc[c], is_async=True),)
    return wait_output(new)


@gluon.jit
def walk_latent(memory, K, piece, turn):
    """Walk along the keys of a piece, one step at least: O in chunks, the maximum and the sum of each row, and how many steps
    the CTA has copied."""
    C: gl.constexpr = K.C
    STAGES: gl.constexpr = C.stages
    ahead: gl.constexpr = STAGES * C.tokens
    first, steps = first_step(piece, C)
    for i in tl.range(0, gl.minimum(steps, STAGES), disable_licm=True):
        at = first + i * C.tokens
        pages = pages_of_boxes(K.cached, piece, at, C)
        copy_latent(memory, turn + i, K.cached, pages[0], piece.head, at, True, C)
    for c in gl.static_range(len(memory.q)):
        memory.q[c].store(rows_of_queries(K.outputs, piece, c * C.chunk, C.chunk, C, K.GROUP, K.DIM))
    memory.q_narrow.store(rows_of_queries(K.outputs, piece, C.head_dim, C.narrow, C, K.GROUP, K.DIM))
    fence_async_shared()
    partition_barrier()
    holes = misses_a_page(K.cached, piece)
    k_scale = scale_of_keys(K.terms, piece)
    acc = no_output(C)
    top = gl.full([C.rows], -float("inf"), gl.float32, rows_of(C, C.tokens))
    sums = gl.full([C.rows, C.tokens], 0.0, gl.float32, accumulator(C, C.tokens))
    for i in tl.range(0, steps, disable_licm=True):
        now = turn + i
        at = first + i * C.tokens
        pages = pages_of_boxes(K.cached, piece, at + ahead, C)
        mbarrier.wait(memory.full.index(now % STAGES), (now // STAGES) & 1)
        k = chunks_of_step(memory, now, C)
        s = seen_scores(latent_scores(memory, k, now, C), K.terms, K.cached, piece, at, k_scale, holes, C, K.GROUP)
        top, p, factor = weights(s, top)
        sums = sums * gl.expand_dims(factor, 1) + p
        acc = rescaled(acc, factor, C)
        memory.p.store(p.to(memory.p.dtype))
        if has_others(piece, at, C):
            for c in gl.static_range(len(k)):
                clear_values(k[c], piece, at, C)
        fence_async_shared()
        partition_barrier()
        acc = latent_output(memory, acc, k)
        partition_barrier()  # everybody has read this step, and P
        copy_latent(memory, now + STAGES, K.cached, pages[0], piece.head, at + ahead, i + STAGES < steps, C)
    return acc, top, gl.sum(sums, 1), turn + steps


@gluon.jit
def gather(memory, acc, top, total, C: gl.constexpr, ROWS: gl.constexpr):
    """What the warps of a CTA found, [ROWS, dim_v], as `forward.gather_warps` gives it: by way of the ring of K."""
    R: gl.constexpr = result_layout(C, C.head_dim_v)
    M: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, R))
    W: gl.constexpr = C.chunk
    meet = reinterpret(memory.k, gl.float32, result_shape(C), ring_layout(C.head_dim_v, 4))
    partition_barrier()  # everybody has read the last step of K
    for c in gl.static_range(len(acc)):
        meet.slice(c * W, W, 2).store(gl.reshape(acc[c], [1, C.rows, W]))
    memory.stats.index(0).store(top)
    memory.stats.index(1).store(total)
    partition_barrier()
    o = gl.sum(meet.slice(0, ROWS, 1).load(R), 0)
    top, total = memory.stats.index(0).slice(0, ROWS).load(M), memory.stats.index(1).slice(0, ROWS).load(M)
    fence_async_shared()  # K comes there next
    return o, top, total


@gluon.jit
def take_latent(memory, K, piece, job, turn):
    """What is found along the keys of a piece is delivered; turn: how many steps the CTA has copied."""
    C: gl.constexpr = K.C
    if C.split:
        return take_splits(find, memory, K, piece, job, nothing(result_layout(C, C.head_dim_v), C.head_dim_v, K), turn)
    else:
        found, turn = find(memory, K, piece, turn)
        deliver(K, piece, job, found[0], found[1], found[2])
        partition_barrier()  # everybody has read the result, where K goes next
        return turn


@gluon.jit
def find(memory, K, piece, turn):
    """What is found along the keys of a piece."""
    acc, top, total, turn = walk_latent(memory, K, piece, turn)
    o, top, total = gather(memory, acc, top, total, K.C, K.ROWS)
    return ((o,), top, total), turn
