"""Attention forward for Hopper to few keys, in Gluon: cross attention to a prompt, say. Keys of a head are one block.

Here bytes bind, not products: each row of Q is read and each row of O written once, for little work. So a CTA is four warps
that do everything, one after the other, for 64 query rows at a time, and several CTAs share a multiprocessor: while one waits
for its rows, others compute. It holds K and V of its head, and goes through a part of that head's rows.

    shared memory   shape                          holds
    k, v            [1, keys, head_dim], in parts  all keys: a power of two of them, and a smaller one
    q               [stages, 64, head_dim]         the rows of this tile and of the next one
    o               [1, 64, head_dim_v]            rows on their way out

    barrier         arrivals      says
    kv_full         TMA bytes     K and V are there
    q_full[stage]   TMA bytes     the rows of a tile are there

With one block there is nothing to be optimistic about: its maximum is the row's. Nothing overflows, so there is no note and no
second launch. (s - m) * scale, not s * scale - m: of huge scores the largest weighs 1.
"""

import triton.language as tl

from strobe.kernels.common.channel import at, invalidate, make_barriers, make_chunks, swizzled
from strobe.kernels.common.dependent_launch import take_turn
from strobe.kernels.common.descriptors import one_or_two
from strobe.kernels.common.scores import LN2
from strobe.kernels.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
)
from strobe.kernels.sm90.forward import no_output, rescaled, start_output, wait_output
from strobe.kernels.sm90.layouts import ROWS, accumulator, columns_of, rows_of


@aggregate
class Memory:
    """The shared memory of a CTA: see the table above. Each of q, k, v, o is a tuple of chunks; k and v have those of each part
    of the keys, part after part."""

    q: gl.tuple
    k: gl.tuple
    v: gl.tuple
    o: gl.tuple
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor


@gluon.jit
def make_memory(dtype: gl.constexpr, C: gl.constexpr):
    """The caller fences."""
    return Memory(
        make_chunks(dtype, C.stages, ROWS, C.wide, C.narrow),
        make_parts(dtype, C.wide, C.narrow, C),
        make_parts(dtype, C.wide_v, C.narrow_v, C),
        make_chunks(dtype, 1, ROWS, C.wide_v, C.narrow_v),
        make_barriers(1, 1),
        make_barriers(C.stages, 1),
    )


@gluon.jit
def make_parts(dtype: gl.constexpr, wide: gl.constexpr, narrow: gl.constexpr, C: gl.constexpr):
    """[1, keys, wide] of shared memory for each part of the keys, and [1, keys, narrow] if `narrow` is not 0."""
    made = ()
    for i in gl.static_range(len(C.parts)):
        made += make_chunks(dtype, 1, C.parts[i], wide, narrow)
    return made


# ---- copies


@gluon.jit
def copy(descriptors, chunks, barrier, batch, head, row, pred):
    """Start the copy of rows of one head, of which the barrier was told, if pred. Rows beyond the last come as 0."""
    for c in gl.static_range(len(descriptors)):
        tma_load(descriptors[c], [batch, head, row, c * chunks[0].shape[1]], barrier,
                 chunks[c].reshape(descriptors[c].block_type.shape), pred=pred)  # fmt: skip


@gluon.jit
def copy_parts(descriptors, rest, chunks, barrier, batch, head, BOX: gl.constexpr, C: gl.constexpr):
    """Start the copy of all keys of a head, or of their values: in boxes of BOX, and one of `rest` if fewer are left over."""
    for i in gl.static_range(len(C.parts)):
        part = chunks[i * len(descriptors) : (i + 1) * len(descriptors)]
        copy_part(descriptors if C.parts[i] >= BOX else rest, part, barrier, batch, head, C.first(i), C.parts[i],
                  BOX)  # fmt: skip


@gluon.jit
def copy_part(descriptors, chunks, barrier, batch, head, first, KEYS: gl.constexpr, BOX: gl.constexpr):
    ROWS_OF_BOX: gl.constexpr = min(KEYS, BOX)
    for b in gl.static_range(KEYS // ROWS_OF_BOX):
        boxes = ()
        for c in gl.static_range(len(chunks)):
            boxes += (in_boxes(chunks[c], KEYS // ROWS_OF_BOX, ROWS_OF_BOX).index(b),)
        copy(descriptors, boxes, barrier, batch, head, first + b * ROWS_OF_BOX, True)


@gluon.jit
def in_boxes(chunk, NUMBER: gl.constexpr, ROWS_OF_BOX: gl.constexpr):
    """The chunk of a part as the TMA sees it."""
    SHAPE: gl.constexpr = [NUMBER, ROWS_OF_BOX, chunk.shape[2]]
    return reinterpret(chunk, chunk.dtype, SHAPE, swizzled(chunk.dtype, chunk.shape[2]))


# ---- products and softmax


@gluon.jit
def part_of(chunks, i: gl.constexpr, CHUNKS: gl.constexpr):
    """The chunks of a part of the keys."""
    found = ()
    for c in gl.static_range(CHUNKS):
        found += (chunks[i * CHUNKS + c].index(0),)
    return found


@gluon.jit
def start_scores(q, k):
    """S = Q K^T of one part of the keys."""
    KEYS: gl.constexpr = k[0].shape[0]
    s = gl.full([ROWS, KEYS], 0.0, gl.float32, accumulator(KEYS))
    for c in gl.static_range(len(q)):
        s = warpgroup_mma(q[c], k[c].permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def seen(s, first: gl.constexpr, n_kv):
    """Scores of the keys from `first` on; -inf beyond the last one."""
    key = first + gl.arange(0, s.shape[1], columns_of(s.shape[1]))
    return gl.where((key < n_kv)[None, :], s, float("-inf"))


@gluon.jit
def weights(s, m, scale):
    """P = 2^(scale (S - m))."""
    shift = gl.where(m == float("-inf"), 0.0, m)
    return gl.exp2((s - gl.convert_layout(shift, rows_of(s.shape[1]))[:, None]) * scale)


@gluon.jit
def scores(q, memory, n_kv, C: gl.constexpr):
    """Q K^T of all parts; -inf where there is no key."""
    PARTS: gl.constexpr = len(C.parts)
    started = ()
    for i in gl.static_range(PARTS):
        started += (start_scores(q, part_of(memory.k, i, C.products)),)
    s = wait_output(started)
    LAST: gl.constexpr = PARTS - 1
    masked = ()
    for i in gl.static_range(PARTS):
        masked += (seen(s[i], C.keys - C.parts[LAST], n_kv) if i == LAST else s[i],)
    return masked


@gluon.jit
def attend(s, memory, scale, dtype: gl.constexpr, C: gl.constexpr):
    """(maximum, sum) of each row, and O, not yet divided by the sum."""
    L: gl.constexpr = rows_of(C.wide_v)
    m = gl.convert_layout(gl.max(s[0], 1), L)
    for i in gl.static_range(1, len(s)):
        m = gl.maximum(m, gl.convert_layout(gl.max(s[i], 1), L))
    row_sum = gl.full([ROWS], 0.0, gl.float32, L)
    acc = no_output(C)
    for i in gl.static_range(len(s)):
        p = weights(s[i], m, scale)
        acc = start_output(acc, p.to(dtype), part_of(memory.v, i, C.products_v))
        row_sum += gl.convert_layout(gl.sum(p, 1), L)
    return m, row_sum, wait_output(acc)


# ---- entry


NUMBERS = ("heads", "group", "tiles", "share", "n_q", "n_kv")
"""Arguments that the kernel is not specialised for."""


@gluon.jit(do_not_specialize=NUMBERS)
def short_kernel(
    q_wide, q_narrow, k_wide, k_narrow, k_rest_wide, k_rest_narrow, v_wide, v_narrow, v_rest_wide, v_rest_narrow,
    o_wide, o_narrow, lse, heads, group, tiles, share, n_q, n_kv, scale, C: gl.constexpr,
):  # fmt: skip
    """tiles: of 64 rows that a head has; share: how many of them a CTA goes through. The grid: heads of all entries, times
    shares. scale: times log2(e)."""
    STAGES: gl.constexpr = C.stages
    dtype: gl.constexpr = q_wide.dtype
    memory = make_memory(dtype, C)
    fence_async_shared()
    q_desc = one_or_two(q_wide, q_narrow)
    o_desc = one_or_two(o_wide, o_narrow)
    batch_heads = gl.num_programs(0) // ((tiles + share - 1) // share)
    batch_head = gl.program_id(0) % batch_heads
    first = gl.program_id(0) // batch_heads * share
    last = gl.minimum(first + share, tiles)
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // group
    first_row = batch_head.to(gl.uint32).to(gl.int64) * n_q.to(gl.uint32)
    partition_barrier()
    take_turn()

    kv_full = memory.kv_full.index(0)
    mbarrier.expect(kv_full, C.kv_bytes)
    for i in gl.static_range(STAGES):
        mbarrier.expect(memory.q_full.index(i), C.q_bytes, pred=first + i < last)
    for i in gl.static_range(STAGES):
        copy(q_desc, at(memory.q, i), memory.q_full.index(i), batch, head, (first + i) * ROWS, first + i < last)
    k_desc = one_or_two(k_wide, k_narrow)
    copy_parts(k_desc, one_or_two(k_rest_wide, k_rest_narrow), memory.k, kv_full, batch, kv_head,
               C.box(C.wide), C)  # fmt: skip
    v_desc = one_or_two(v_wide, v_narrow)
    copy_parts(v_desc, one_or_two(v_rest_wide, v_rest_narrow), memory.v, kv_full, batch, kv_head,
               C.box(C.wide_v), C)  # fmt: skip
    mbarrier.wait(kv_full, 0)
    for tile in tl.range(first, last):
        turn = tile - first
        stage = turn % STAGES
        q = at(memory.q, stage)
        q_full = memory.q_full.index(stage)
        mbarrier.wait(q_full, (turn // STAGES) & 1)
        s = scores(q, memory, n_kv, C)
        mbarrier.expect(q_full, C.q_bytes, pred=tile + STAGES < last)
        partition_barrier()  # all warps have read Q
        copy(q_desc, q, q_full, batch, head, (tile + STAGES) * ROWS, tile + STAGES < last)
        m, row_sum, acc = attend(s, memory, scale, dtype, C)

        row = tile * ROWS + gl.arange(0, ROWS, rows_of(C.wide_v))
        m = gl.where(row_sum == 0.0, 0.0, m)
        gl.store(lse + first_row + row, (m * scale + gl.log2(row_sum)) * LN2, mask=row < n_q)
        o = rescaled(acc, gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum))
        tma_store_wait(0)  # the O of the tile before has left
        partition_barrier()
        for c in gl.static_range(len(o)):
            memory.o[c].index(0).store(o[c].to(dtype))
        fence_async_shared()
        partition_barrier()
        for c in gl.static_range(len(o)):
            chunk = memory.o[c].index(0).reshape(o_desc[c].block_type.shape)
            tma_store(o_desc[c], [batch, head, tile * ROWS, c * C.wide_v], chunk)
    tma_store_wait(0)
    invalidate(memory.kv_full)
    invalidate(memory.q_full)
