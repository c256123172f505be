"""Few rows of one request whose bits do not depend on the batch: its fixed splits (see `splits`), one for each CTA of a
cluster.

What a CTA finds of its split is, to the bit, what `hopper` finds of it, by the same products and sums. It has a multiprocessor
to itself, and room for all keys of its split: so four warps ask for all of them at once, the first before the request's length
is known, and no key waits for another. The CTAs of a key head meet in the shared memory of all (`common.cluster`): each has its
share of the rows of all splits, and adds them up to chains, and these, in their order.

    shared memory   shape                   holds
    q               [1, rows, dim]          the rows of Q
    k, v            [steps, tokens, dim]    the keys and values of the split
    found, stats    [rows, dim], [2, rows]  O, and the maximum and the sum of each row, as they change hands

Keys that are none are copied as zeros; they are masked, and so are those of the first step that lie beyond the length.
"""

from strobe.kernels.common.channel import swizzled
from strobe.kernels.common.cluster import begin_cluster, read_arguments
from strobe.kernels.common.dependent_launch import take_turn
from strobe.kernels.decode.arguments import NUMBERS, Cached, Kernel, Outputs, Piece, Terms
from strobe.kernels.decode.boxes import rows_layout
from strobe.kernels.decode.copiers import copy_rows
from strobe.kernels.decode.keys import is_key, look_up, rows_at
from strobe.kernels.decode.layouts import result_layout
from strobe.kernels.decode.products import (
    accumulator,
    lane_sums,
    masked,
    no_output,
    operand_of,
    rescaled,
    rescaled_sums,
    rows_of,
    start_output,
    start_scores,
    wait_output,
)
from strobe.kernels.decode.queries import store_queries
from strobe.kernels.decode.results import deliver_share
from strobe.kernels.decode.schedule import Requests, keys_of
from strobe.kernels.decode.split_steps import split_weights_of
from strobe.kernels.gluon import aggregate, async_copy, fence_async_shared, gl, gluon, partition_barrier, warpgroup_mma_wait


@aggregate
class Memory:
    """The shared memory of a CTA: see the table above."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    found: gl.shared_memory_descriptor
    stats: gl.shared_memory_descriptor


@gluon.jit
def make_memory(dtype: gl.constexpr, C: gl.constexpr):
    q = gl.allocate_shared_memory(dtype, [1, C.rows, C.head_dim], swizzled(dtype, C.head_dim))
    k = gl.allocate_shared_memory(dtype, [C.stages, C.tokens, C.head_dim], swizzled(dtype, C.head_dim))
    v = gl.allocate_shared_memory(dtype, [C.stages, C.tokens, C.head_dim_v], swizzled(dtype, C.head_dim_v))
    # by 8 a warp's 8 rows hit all banks
    found = gl.allocate_shared_memory(gl.float32, [C.rows, C.head_dim_v], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    stats = gl.allocate_shared_memory(gl.float32, [2, C.rows], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Memory(q, k, v, found, stats)


@gluon.jit
def split_of_cta(K):
    """The first key of this CTA's split, its piece, and as much of that as is known before the request's length is."""
    C: gl.constexpr = K.C
    requests, rank = K.requests, gl.program_id(0) % C.shares
    head, batch, first = gl.program_id(0) // C.shares, gl.program_id(1), 0 * rank
    begin, end, length = keys_of(requests, batch, batch < requests.batch, requests.n_q, True)
    entry = batch
    if requests.index is not None:
        entry = gl.load(requests.index + batch)
    origin = (begin // C.split + rank) * C.split
    begin = gl.maximum(begin, origin)
    piece = Piece(batch, entry, head, first, first, requests.n_q, length, begin, gl.minimum(end, origin + C.split))
    asked = Piece(batch, entry, head, first, first, requests.n_q, length, begin, requests.capacity)
    return origin, piece, asked


@gluon.jit
def copy_keys(block, base, cached, piece, first, pages, page_stride, row_stride, COLUMNS: gl.constexpr, C: gl.constexpr):
    """Start copying keys or values of the step from key `first` on, which lie in `pages`, in one group."""
    KEYS: gl.constexpr = gl.SliceLayout(2, rows_layout(C.chunk, C.warps))
    inside = is_key(cached, piece, first, pages, C, KEYS)
    copy_rows((block,), base, rows_at(cached, first, pages, piece.entry, page_stride, row_stride, C, KEYS), inside, COLUMNS)


@gluon.jit
def copy_split(memory, K, origin, piece, asked):
    """Start copying all keys and values of a split, each step of them in a group."""
    C: gl.constexpr = K.C
    KEYS: gl.constexpr = gl.SliceLayout(2, rows_layout(C.chunk, C.warps))
    STEPS: gl.constexpr = C.stages
    cached = K.cached
    k_base = cached.k + piece.head.to(gl.int64) * cached.k_head
    v_base = cached.v + piece.head.to(gl.int64) * cached.v_head
    pages = ()
    for i in gl.static_range(STEPS):
        pages += (look_up(cached, asked, origin + i * C.tokens, C, KEYS, True),)
    for i in gl.static_range(STEPS):
        copy_keys(memory.k.index(i), k_base, cached, asked if i == 0 else piece, origin + i * C.tokens, pages[i], cached.k_page,
                  cached.k_row, K.DIM, C)  # fmt: skip
    for i in gl.static_range(STEPS):
        copy_keys(memory.v.index(i), v_base, cached, piece, origin + i * C.tokens, pages[i], cached.v_page, cached.v_row,
                  K.DIM_V, C)  # fmt: skip


@gluon.jit
def wait_for_copies(UNDER_WAY: gl.constexpr):
    """Wait until the tensor cores may read what all have copied but for so many groups."""
    async_copy.wait_group(UNDER_WAY)
    fence_async_shared()
    partition_barrier()


@gluon.jit
def walk(memory, K, origin, piece):
    """What is found of a split: O, the maximum and the sum of each row."""
    C: gl.constexpr = K.C
    S: gl.constexpr = rows_of(C, C.tokens)
    STEPS: gl.constexpr = C.stages
    q, scale, _, holes = store_queries(0, memory, K, piece, C)
    top = gl.full([C.rows], -float("inf"), gl.float32, S)
    sums = lane_sums(gl.full([C.rows, C.tokens], 0.0, gl.float32, accumulator(C, C.tokens)))
    p, factors = (), ()
    for i in gl.static_range(STEPS):
        wait_for_copies(2 * STEPS - 1 - i)
        s = warpgroup_mma_wait(0, deps=[start_scores(q, (memory.k.index(i),), C)])
        s = masked(s, K, piece, origin + i * C.tokens, holes, C, True)
        top, wide, factor = split_weights_of(s, scale, top, memory.q.dtype, C)
        sums = rescaled_sums(sums, factor) + lane_sums(wide)
        p += (operand_of(wide, memory.q.dtype, C),)
        factors += (factor,)
    wait_for_copies(0)
    acc = no_output(C)
    for i in gl.static_range(STEPS):
        acc = wait_output(start_output(rescaled(acc, factors[i], C), p[i], (memory.v.index(i),), C))
    return acc[0], top, gl.convert_layout(gl.sum(sums, 1), S)


@gluon.jit
def rows_in_use(memory, o, top, total, C: gl.constexpr, ROWS: gl.constexpr):
    """The rows that are in use of what was found, as CTAs of a cluster exchange them."""
    L: gl.constexpr = gl.SliceLayout(0, result_layout(C, C.head_dim_v))
    M: gl.constexpr = gl.SliceLayout(1, L)
    memory.found.store(o)
    memory.stats.index(0).store(top)
    memory.stats.index(1).store(total)
    partition_barrier()
    stats = memory.stats
    return memory.found.slice(0, ROWS, 0).load(L), stats.index(0).slice(0, ROWS).load(M), stats.index(1).slice(0, ROWS).load(M)


@gluon.jit(do_not_specialize=NUMBERS)
def split_clusters_kernel(
    q, k, v, out, lse, lengths, page_table, index, leftpad, cu_q, tree, alibi, sinks, k_scale, v_scale, parts, sums, arrivals,
    q_batch, q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head, out_batch, out_row, out_head, lse_batch, lse_head,
    table_row, tree_batch, tree_row, tree_column, alibi_batch, k_scale_page, k_scale_row, v_scale_page, v_scale_row, batch,
    heads_kv, n_q, capacity, total_q, pages, tiles, scale, softcap, left, right,
    C: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, ROWS: gl.constexpr,
    BY_ROW: gl.constexpr, K_BY_TOKEN: gl.constexpr, V_BY_TOKEN: gl.constexpr, IN_TURN: gl.constexpr,
):  # fmt: skip
    begin_cluster(C.cluster, ROWS, C.head_dim_v, C.posts, True)
    read_arguments(lengths, q_batch, v_head, out_head, tiles)
    memory = make_memory(k.dtype.element_ty, C)
    take_turn()
    requests = Requests(lengths, leftpad, index, cu_q, batch, n_q, capacity, total_q, pages, left)
    cached = Cached(k, v, page_table, k_page, k_row, k_head, v_page, v_row, v_head, table_row, pages, PAGE)
    terms = Terms(tree, tree_batch, tree_row, tree_column, alibi, alibi_batch, sinks, k_scale, v_scale, k_scale_page,
                  k_scale_row, v_scale_page, v_scale_row, scale, softcap, left, right, BY_ROW, K_BY_TOKEN,
                  V_BY_TOKEN)  # fmt: skip
    outputs = Outputs(q, q_batch, q_row, q_head, out, out_batch, out_row, out_head, lse, lse_batch, lse_head, parts, sums,
                      arrivals)  # fmt: skip
    K = Kernel(requests, outputs, terms, cached, heads_kv, tiles, C, GROUP, DIM, DIM_V, ROWS)
    origin, piece, asked = split_of_cta(K)
    copy_split(memory, K, origin, piece, asked)
    o, top, total = walk(memory, K, origin, piece)
    o, top, total = rows_in_use(memory, o, top, total, C, ROWS)
    deliver_share(K, piece, gl.program_id(0) % C.shares, o, top, total)
