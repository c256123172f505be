# mypy: ignore-errors
# (Device code is a language of its own: Triton's compiler checks it.)
"""dQ in mma.sync's backward: dS K of a tile of rows, added to an accumulator in global memory."""

from strobe.kernels.gluon import gl, gluon
from strobe.kernels.sm80.layouts import along, left, right
from strobe.kernels.sm80.products import add_product
from strobe.kernels.sm80.tiles import columns_of, first_of


@gluon.jit
def add_dq(K, place, Q: gl.constexpr):
    """What a tile's dS gives to dQ, added to the accumulator from `place` on: all chunks after all products or, piece by piece,
    between them."""
    M = K.memory
    PARTS: gl.constexpr = K.C.parts
    PIECE: gl.constexpr = K.C.widest if K.MASKED else K.C.piece
    of_rows = ()
    for i in gl.static_range(PARTS):
        of_rows += (M.ds[i].permute((1, 0)).load(left(Q)),)
    if K.C.widest > PIECE:
        for c in gl.static_range(len(M.k)):
            add_pieces(K, of_rows, place, c, PIECE, Q)
    else:
        dq = ()
        for c in gl.static_range(len(M.k)):
            dq += products_of(K, of_rows, M.k[c], Q)
        for c in gl.static_range(len(M.k)):
            for i in gl.static_range(PARTS):
                put_dq(K, dq[c * PARTS + i], place, first_of(K.C, False, c), i)


@gluon.jit
def add_pieces(K, of_rows, place, c: gl.constexpr, PIECE: gl.constexpr, Q: gl.constexpr):
    """A chunk's dQ, added in pieces of so many columns."""
    COLUMNS: gl.constexpr = min(PIECE, columns_of(K.C, False, c))
    PIECES: gl.constexpr = columns_of(K.C, False, c) // COLUMNS
    PARTS: gl.constexpr = K.C.parts
    for j in gl.static_range(PIECES):
        dq = products_of(K, of_rows, K.memory.k[c].slice(j * COLUMNS, COLUMNS, dim=1), Q)
        for i in gl.static_range(PARTS):
            put_dq(K, dq[i], place, first_of(K.C, False, c) + j * COLUMNS, i)


@gluon.jit
def products_of(K, of_rows, keys, Q: gl.constexpr):
    """dS K of each part, for some columns of K, which are read once. Each part of dS has a buffer of its own: between writes to
    parts of one buffer the compiler puts barriers."""
    PARTS: gl.constexpr = K.C.parts
    nothing = gl.full([K.C.rows, keys.shape[1]], 0.0, gl.float32, Q)
    of_keys = keys.load(right(Q))
    dq = ()
    for i in gl.static_range(PARTS):
        dq += (add_product(nothing, of_rows[i], of_keys, Q),)
    return dq


@gluon.jit
def put_dq(K, dq, place, FIRST: gl.constexpr, PART: gl.constexpr):
    """Add the columns of a part's dQ from FIRST on to the accumulator: what the lanes of a warp hold in one register lies side
    by side, [rows / 16 / down, 2, columns / 8 / across, 2, down, across, 8, 4], for `down` by `across` warps (see
    `backward_ends.convert`)."""
    place += K.C.tile_q * FIRST + PART * (dq.shape[0] * dq.shape[1])
    if K.C.parts == 1 and (K.MASKED or K.C.itemsize == 4):
        put_by_dims(K, dq, place)
    else:
        put_as_vector(K, dq, place)


@gluon.jit
def put_by_dims(K, dq, place):
    """By addresses of each dim: where a mask is, 2 to 4 % of the speed of a causal backward of 16k. float32 was measured so."""
    ACROSS: gl.constexpr = K.C.across_q
    DOWN: gl.constexpr = K.C.warps // ACROSS
    COLUMNS: gl.constexpr = dq.shape[1] // 8
    x = gl.reshape(dq, [dq.shape[0] // 16, 2, 8, COLUMNS, 4, 2])
    L: gl.constexpr = x.type.layout
    m = gl.arange(0, dq.shape[0] // 16, along(L, 6, 0))
    h = gl.arange(0, 2, along(L, 6, 1))
    lane = gl.arange(0, 8, along(L, 6, 2))
    n = gl.arange(0, COLUMNS, along(L, 6, 3))
    b = gl.arange(0, 4, along(L, 6, 4))
    e = gl.arange(0, 2, along(L, 6, 5))
    UNIT: gl.constexpr = 32 * K.C.warps
    ROW: gl.constexpr = COLUMNS // ACROSS * 2 * UNIT
    at_m = m // DOWN * (2 * ROW) + m % DOWN * (32 * ACROSS)
    at_n = n // ACROSS * (2 * UNIT) + n % ACROSS * 32
    of_rows = at_m[:, None, None, None, None, None] + (h * ROW)[None, :, None, None, None, None]
    of_columns = at_n[None, None, None, :, None, None] + (e * UNIT)[None, None, None, None, None, :]
    of_lanes = (lane * 4)[None, None, :, None, None, None] + b[None, None, None, None, :, None]
    gl.atomic_add(K.accumulator + place + (of_rows + of_columns + of_lanes), x, sem="relaxed")


@gluon.jit
def put_as_vector(K, dq, place):
    """By one address, from which those of a lane differ by constants: where no mask is, 3 % of the speed at head dim 96."""
    ACROSS: gl.constexpr = K.C.across_q
    DOWN: gl.constexpr = K.C.warps // ACROSS
    x = gl.reshape(dq, [dq.shape[0] // 16 // DOWN, DOWN, 2, 8, dq.shape[1] // 8 // ACROSS, ACROSS, 4, 2])
    x = gl.reshape(gl.permute(x, [0, 2, 4, 7, 1, 5, 3, 6]), [dq.shape[0] * dq.shape[1]])
    gl.atomic_add(K.accumulator + place + gl.arange(0, x.shape[0], x.type.layout), x, sem="relaxed")
