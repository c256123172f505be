"""The products of Hopper's backward, and what waits for them: S and dP, which are transposed, dK, dV and dQ."""

from strobe.kernels.gluon import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from strobe.kernels.sm90.backward_tiles import HALF
from strobe.kernels.sm90.layouts import accumulator, columns_of

# ---- S and dP


@gluon.jit
def start_products(a, b):
    """Start a b^T, [64, rows of b], of chunks of 64 rows of a and some of b: scores and dP, or their transposes."""
    return start_products_held(a, (), b)


@gluon.jit
def start_products_held(a, held, b):
    """Start a b^T as `start_products` does; `held` of a is in registers and not read from shared memory."""
    COLUMNS: gl.constexpr = b[0].shape[0]
    s = gl.full([64, COLUMNS], 0.0, gl.float32, accumulator(COLUMNS))
    for c in gl.static_range(len(a)):
        if c < len(held):
            s = add_held(s, held[c], a[c], b[c], c > 0)
        else:
            s = warpgroup_mma(a[c], b[c].permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def add_held(s, held, a, b, ADD: gl.constexpr):
    """Start s + a b^T, or without ADD a b^T; the first columns of a are held, or all."""
    HELD: gl.constexpr = held.shape[1]
    s = warpgroup_mma(held, b.slice(0, HELD, dim=1).permute((1, 0)), s, use_acc=ADD, is_async=True)
    if a.shape[1] > HELD:
        a = a.slice(HELD, a.shape[1] - HELD, dim=1)
        s = warpgroup_mma(a, b.slice(HELD, b.shape[1] - HELD, dim=1).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def half_of(chunks, w: gl.constexpr):
    """Group w's rows of chunks of 128."""
    halves = ()
    for c in gl.static_range(len(chunks)):
        halves += (chunks[c].slice(w * HALF, HALF),)
    return halves


@gluon.jit
def hold(chunks, COLUMNS: gl.constexpr, TILE_Q: gl.constexpr):
    """Load so many of the first columns of chunks of 64 rows into registers, by chunks."""
    held = ()
    for c in gl.static_range(len(chunks)):
        held += hold_part(chunks[c], columns_within(chunks[c].shape[1], COLUMNS - c * chunks[0].shape[1]), TILE_Q)
    return held


@gluon.constexpr_function
def columns_within(width, columns):
    return max(0, min(width, columns))


@gluon.jit
def hold_part(chunk, COLUMNS: gl.constexpr, TILE_Q: gl.constexpr):
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(TILE_Q), k_width=2)
    if COLUMNS == 0:
        return ()
    else:
        return (chunk.slice(0, COLUMNS, dim=1).load(LAYOUT),)


@gluon.jit
def subtract(s, FIRST: gl.constexpr, stage, memory, C: gl.constexpr):
    """Subtract from scores or dP the statistics of their rows, if they are folded: by a product with the rows of
    `memory.statistics` from FIRST on."""
    if C.folded:
        parts = memory.statistics.index(stage).slice(FIRST, C.tile_q)
        return warpgroup_mma(memory.ones[0].index(0), parts.permute((1, 0)), s, is_async=True)
    else:
        return s


@gluon.jit
def to_subtract(FIRST: gl.constexpr, stage, memory, C: gl.constexpr):
    """The statistics that `subtract` leaves to be subtracted: none, 0, if they are folded."""
    if C.folded:
        return 0.0
    else:
        return memory.statistics.index(stage).slice(FIRST, C.tile_q).load(columns_of(C.tile_q))[None, :]


# ---- dK, dV and dQ


@gluon.jit
def no_result(wide: gl.constexpr, narrow: gl.constexpr):
    """Zeros, by chunks, with which dK or dV of 64 keys begins, or dQ of 64 rows."""
    zeros = (gl.full([HALF, wide], 0.0, gl.float32, accumulator(wide)),)
    if narrow > 0:
        zeros += (gl.full([HALF, narrow], 0.0, gl.float32, accumulator(narrow)),)
    return zeros


@gluon.jit
def start_sum(acc, weights, rows):
    """Start acc += weights [64, rows] rows, by chunks. The weights are in registers, in the order of an accumulator's."""
    new = ()
    for c in gl.static_range(len(rows)):
        new += (warpgroup_mma(operand(weights, rows[c].shape[1]), rows[c], acc[c], is_async=True),)
    return new


@gluon.jit
def operand(weights, columns: gl.constexpr):
    """The weights as a product's operand in registers: they are already in its order."""
    return gl.convert_layout(weights, gl.DotOperandLayout(operand_index=0, parent=accumulator(columns), k_width=2))


@gluon.jit
def start_dq(i: gl.constexpr, K, parity, at_k):
    """Start the i-th share of a tile's dQ = dS K: of 128 rows 64, of 64 rows some of the columns."""
    COLUMNS: gl.constexpr = K.C.share_columns[i]
    dq = gl.full([64, COLUMNS], 0.0, gl.float32, accumulator(COLUMNS))
    rows = K.memory.ds.index(parity)
    if K.C.tile_q > HALF:
        rows = rows.slice(i * 64, 64, dim=1)
    share = K.memory.k.part(at_k)
    share = share[0].slice(i * 64, 64, dim=1) if K.C.wide > 64 and i < 2 else share[min(i, len(share) - 1)]
    return warpgroup_mma(rows.permute((1, 0)), share, dq, use_acc=False, is_async=True)


@gluon.jit
def finished(results, pending: gl.constexpr):
    """Wait until no more than `pending` products are under way, and return these results, which are then done."""
    done = ()
    for c in gl.static_range(len(results)):
        done += (warpgroup_mma_wait(pending, deps=[results[c]]),)
    return done
