"""The walk along keys of 8 bits, e4m3 or e5m2, as ldmatrix loads them, which moves 16 bits at least.

Of K a thread gets four columns of a key, where the product takes two and two that are 8 apart: which columns these are is all
the same, if Q has them in the same order (a layout with `k_width` 4). Of V it gets two columns of two keys, and takes two keys
of a column, so the even and the odd columns of O are products by themselves. Both become float16 on their way.

A step takes nearly the instructions of 16 bits for half the bytes, so there are fewer of them than in `forward.walk`: steps
are counted around the ring, which keys are copied is one comparison for each (`keys.is_key`), and those beyond a piece are
copied as zeros (`keys.is_copied`).

A barrier stands between copies into a ring and reads of it, though they are of other places, which Triton does not tell apart.
Where work is dealt out, K is copied as V is read, and V as K is, so that those that a step has anyway are enough: then K is
copied over what this step has read.
"""

from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from strobe.kernels.common.packed_halves import unpacked
from strobe.kernels.decode.keys import (
    as_half,
    copy_keys,
    copy_values,
    is_page,
    load_queries,
    look_up,
    on_one_page,
    same_or_looked_up,
)
from strobe.kernels.decode.layouts import copy_layout, product_layout, ring_layout
from strobe.kernels.decode.scores import finite, scale_of_values, scores_of
from strobe.kernels.gluon import gl, gluon, partition_barrier, reinterpret


@gluon.jit
def products_of_8_bits(k_ring, slot, q, C: gl.constexpr):
    """Q K^T of a step."""
    L: gl.constexpr = product_layout(C)
    k = k_ring.index(slot).permute((0, 2, 1)).load(gl.DotOperandLayout(1, L, 4)).to(gl.float16)
    return mma_v2(q, k, gl.full([C.token_warps, C.rows, C.tokens // C.token_warps], 0.0, gl.float32, L))


@gluon.jit
def values_in_pairs(v_ring, slot, KIND: gl.constexpr, C: gl.constexpr):
    """V of a step in float16, the even columns and the odd ones."""
    SHAPE: gl.constexpr = [v_ring.shape[0], v_ring.shape[1], v_ring.shape[2], C.head_dim_v // 2]
    pairs = reinterpret(v_ring, gl.int16, SHAPE, ring_layout(C.head_dim_v // 2, 8)).index(slot)
    return unpacked(pairs.load(gl.DotOperandLayout(1, product_layout(C), 2)), KIND)


@gluon.jit
def by_lanes(x):
    """[warps, rows, keys] as [warps, rows, squares, lanes of the quad that has the row, neighbours]."""
    return gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 8, 4, 2])


@gluon.jit
def lane_sums(p):
    """Row sums within each lane: [warps, rows, keys] -> [warps, rows, 4]."""
    return gl.sum(gl.sum(by_lanes(p), 4), 2)


@gluon.jit
def row_maxima(s, layout: gl.constexpr):
    """The maximum of each row, neighbours apart until the last, so that four chains of comparisons are under way, not one."""
    return gl.convert_layout(gl.max(gl.max(gl.max(by_lanes(s), 2), 3), 2), layout)


@gluon.jit
def walk_8_bits(rings, K, piece, asked):
    """Walk along the keys of a piece, or of what is asked for in its stead: see `forward.walk`."""
    C: gl.constexpr = K.C
    cached, terms, outputs, entry = K.cached, K.terms, K.outputs, piece.entry
    L: gl.constexpr = product_layout(C)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, L, 2)
    # two columns at a time: four would be in registers that are not those of the product, and float16 moved at every step
    OF_Q: gl.constexpr = gl.DotOperandLayout(0, L, 4)
    K_COPY: gl.constexpr = copy_layout(C, C.head_dim, 16)
    V_COPY: gl.constexpr = copy_layout(C, C.head_dim_v, 16)
    K_KEYS: gl.constexpr = gl.SliceLayout(2, K_COPY)
    V_KEYS: gl.constexpr = gl.SliceLayout(2, V_COPY)
    S_KEYS: gl.constexpr = gl.SliceLayout(1, L)
    ROWS: gl.constexpr = gl.SliceLayout(2, L)
    ONE_PAGE: gl.constexpr = on_one_page(C, cached.PAGE)
    STAGES: gl.constexpr = C.stages
    SHARE: gl.constexpr = C.shares > 0
    CROSSED: gl.constexpr = 0 if SHARE else 1
    k_scale = 1.0
    if terms.k_scale is not None:
        if not terms.K_BY_TOKEN:
            k_scale = gl.load(terms.k_scale + piece.batch * terms.k_scale_page + piece.head * terms.k_scale_row)

    begin = piece.begin // C.tokens * C.tokens
    k_pages = ()
    for i in gl.static_range(STAGES):  # all are under way before the first copy waits for its own
        k_pages += (look_up(cached, asked, begin + i * C.stride, C, K_KEYS, SHARE),)
    if SHARE:
        s_pages = look_up(cached, asked, begin, C, S_KEYS, SHARE)
        copy_keys(rings, 0, cached, asked, begin, k_pages[0], K_COPY, C, K.DIM, SHARE)
        q = load_queries(outputs, piece, 0, C.head_dim, OF_Q, C, K.GROUP, K.DIM)
    for i in gl.static_range(STAGES - 1):
        first = begin + i * C.stride
        if not SHARE or i > 0:
            copy_keys(rings, i, cached, piece, first, k_pages[i], K_COPY, C, K.DIM)
        pages = same_or_looked_up(cached, piece, k_pages[i], first, C, V_KEYS)
        copy_values(rings, i, cached, piece, first, pages, V_COPY, C, K.DIM_V)
    ahead: gl.constexpr = (STAGES - 1) * C.stride
    if CROSSED:
        copy_keys(rings, STAGES - 1, cached, piece, begin + ahead, k_pages[STAGES - 1], K_COPY, C, K.DIM)
    v_pages = same_or_looked_up(cached, piece, k_pages[STAGES - 1], begin + ahead, C, V_KEYS)
    k_pages = k_pages[STAGES - 1]
    if not SHARE:
        q = load_queries(outputs, piece, 0, C.head_dim, OF_Q, C, K.GROUP, K.DIM)
    if q.dtype == gl.bfloat16:
        q, power = as_half(q)
        k_scale = k_scale * gl.convert_layout(power, L)
    even = gl.full([C.token_warps, C.rows, C.head_dim_v // 2], 0.0, gl.float32, L)
    odd = even
    row_max = gl.full([C.token_warps, C.rows], -float("inf"), gl.float32, ROWS)
    sums = lane_sums(gl.full([C.token_warps, C.rows, C.tokens // C.token_warps], 0.0, gl.float32, L))
    OF_P: gl.constexpr = gl.bfloat16 if terms.V_BY_TOKEN else gl.float16
    under_way: gl.constexpr = 2 * (STAGES - 1) - 1 + CROSSED
    now, next = 0 * begin, 0 * begin + STAGES - 1
    for i in range((piece.end - begin + C.stride - 1) // C.stride):
        first = begin + i * C.stride
        async_copy.wait_group(under_way)
        partition_barrier()
        if CROSSED:
            copy_values(rings, next, cached, piece, first + ahead, v_pages, V_COPY, C, K.DIM_V)
        else:
            copy_keys(rings, next, cached, piece, first + ahead, k_pages, K_COPY, C, K.DIM)
            k_pages = look_up(cached, piece, first + ahead + C.stride, C, K_KEYS)
        s = products_of_8_bits(rings[0], now, q, C)
        if CROSSED:
            k_pages = look_up(cached, piece, first + ahead + C.stride, C, K_KEYS)
        if SHARE:
            of_scores, s_pages = s_pages, look_up(cached, piece, first + C.stride, C, S_KEYS)
        else:
            of_scores = look_up(cached, piece, first, C, S_KEYS)
        s = scores_of(s, terms, cached, piece, entry, first, of_scores, k_scale, C, K.GROUP, L, ONE_PAGE)
        top = row_maxima(s, ROWS)
        if ONE_PAGE:  # a page that is not there hides all keys that the warp has
            there = gl.expand_dims(is_page(cached, of_scores), 1)
            top = gl.max(gl.where(there, gl.expand_dims(top, 2), -float("inf")), 2)
        new_max = gl.maximum(row_max, top)
        shift = finite(new_max)
        away = gl.expand_dims(shift, 2)
        if ONE_PAGE:
            away = gl.where(there, away, float("inf"))
        p = gl.exp2(s - away)
        rescale = gl.exp2(row_max - shift)
        sums = sums * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(2, sums.type.layout)), 2) + lane_sums(p)
        row_max = new_max
        if terms.V_BY_TOKEN:  # they may leave the range of float16
            p = p * gl.expand_dims(scale_of_values(terms, cached, piece, entry, first, C, S_KEYS), 1)
        p = gl.convert_layout(p.to(OF_P), LEFT)
        async_copy.wait_group(under_way)
        partition_barrier()
        if CROSSED:
            copy_keys(rings, now, cached, piece, first + ahead + C.stride, k_pages, K_COPY, C, K.DIM)
            v_pages = same_or_looked_up(cached, piece, k_pages, first + ahead + C.stride, C, V_KEYS)
        else:
            copy_values(rings, next, cached, piece, first + ahead, v_pages, V_COPY, C, K.DIM_V)
            v_pages = same_or_looked_up(cached, piece, k_pages, first + ahead + C.stride, C, V_KEYS)
        even_v, odd_v = values_in_pairs(rings[1], now, cached.v.dtype.element_ty, C)
        even = mma_v2(p, even_v.to(OF_P), even * gl.expand_dims(rescale, 2))
        odd = mma_v2(p, odd_v.to(OF_P), odd * gl.expand_dims(rescale, 2))
        now, next = gl.where(now == STAGES - 1, 0, now + 1), now
    async_copy.wait_group(0)
    acc = gl.reshape(gl.join(even, odd), [C.token_warps, C.rows, C.head_dim_v])
    return acc, row_max, gl.convert_layout(gl.sum(sums, 2), ROWS)
