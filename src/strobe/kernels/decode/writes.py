"""How a result is written: rows of out and the LSE."""

from strobe.kernels.common.scores import LN2, LOG2E
from strobe.kernels.decode.keys import owners_of, wide
from strobe.kernels.decode.scores import finite
from strobe.kernels.gluon import gl, gluon, partition_barrier


@gluon.constexpr_function
def wide_layout(layout, rows, columns):
    """A layout in which a thread has 16 bytes of a row, not 4 as after a product, for which only lanes of a warp exchange
    numbers; other layouts stay as they are."""
    # an H100, 128 heads, 128 requests of 1k keys: 87 microseconds, not 96
    if not isinstance(layout, gl.NVMMADistributedLayout):
        return layout
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *([0, 1 << bit] for bit in range(5, columns.bit_length() - 1))],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[1 << bit, 0] for bit in range(4, rows.bit_length() - 1)],
        block_bases=[],
        shape=[rows, columns],
    )


@gluon.jit
def rows_of_result(K, piece, row, n: gl.constexpr, layout: gl.constexpr):
    """Query and head of n rows of a piece's tile from row `row` on, and whether they are there."""
    query, head, there = owners_of(piece.first_row + row + gl.arange(0, n, layout), piece, K.C, K.GROUP)
    return piece.first_query + query, head, there


@gluon.jit
def store_rows(K, piece, row, o, column, WIDTH: gl.constexpr):
    """Write rows of out from row `row` of a piece's tile on; o: columns from `column` on. WIDTH: neighbours of a thread."""
    outputs = K.outputs
    query, head, there = rows_of_result(K, piece, row, o.shape[0], gl.SliceLayout(1, o.type.layout))
    column = column + gl.expand_dims(gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout)), 0)
    at = outputs.out + wide(piece.batch, outputs.out_batch)
    at += gl.expand_dims(wide(query, outputs.out_row) + wide(head, outputs.out_head), 1) + column
    mask = gl.max_constancy(gl.expand_dims(there, 1) & (column < K.DIM_V), [1, WIDTH])
    gl.store(gl.multiple_of(at, [1, 2 * WIDTH]), o, mask=mask)  # bytes


@gluon.jit
def factor_and_lse(K, piece, head, there, top, total):
    """By what O of rows is multiplied at last, and their LSE; of each, or of all numbers of one."""
    terms, rescale = K.terms, 1.0
    if terms.sinks is not None:
        sink = gl.load(terms.sinks + head, mask=there, other=0.0).to(gl.float32) * LOG2E
        new_top = gl.maximum(top, sink)
        rescale = gl.exp2(top - finite(new_top))
        total = total * rescale + gl.exp2(sink - finite(new_top))
        top = new_top
    nothing = total == 0.0
    factor = rescale / gl.where(nothing, 1.0, total)
    if terms.v_scale is not None:
        if not terms.V_BY_TOKEN:
            factor *= gl.load(terms.v_scale + piece.batch * terms.v_scale_page + piece.head * terms.v_scale_row)
    return factor, gl.where(nothing, -float("inf"), (top + gl.log2(total)) * LN2)


@gluon.jit
def write(K, piece, row, o, top, total, column, place=None):
    """Write out and the LSE of rows of a piece's tile, from row `row` on; o: columns from `column` on. place: free shared
    memory of its shape, by way of which a thread comes to have more of a row; or None."""
    outputs = K.outputs
    L: gl.constexpr = o.type.layout
    query, head, there = rows_of_result(K, piece, row, o.shape[0], gl.SliceLayout(1, L))
    factor, lse = factor_and_lse(K, piece, head, there, top, total)
    if outputs.lse is not None:
        if column == 0:
            at = outputs.lse + wide(piece.batch, outputs.lse_batch) + wide(head, outputs.lse_head) + query
            gl.store(at, lse, mask=there)
    o = (o * gl.expand_dims(factor, 1)).to(outputs.out.dtype.element_ty)
    if place is not None:
        store_rows(K, piece, row, by_rows(o, place), column, 8)
    elif K.C.writes_wide:
        store_rows(K, piece, row, gl.convert_layout(o, wide_layout(L, o.shape[0], o.shape[1])), column, 8)
    else:
        store_rows(K, piece, row, o, column, 4)


@gluon.jit
def write_all(K, piece, acc, top, total, place=None):
    """Write out and the LSE of a piece's tile, O in chunks of columns. place: see `write`."""
    for c in gl.static_range(len(acc)):
        write(K, piece, 0, acc[c], top, total, c * acc[0].shape[1], place)


@gluon.jit
def by_rows(o, place):
    """The same numbers, of which a thread has 16 bytes of a row."""
    WIDE: gl.constexpr = o.shape[1]
    partition_barrier()  # everybody has read what lies there
    place.store(o)
    partition_barrier()
    return place.load(gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [gl.num_warps(), 1], [1, 0]))
