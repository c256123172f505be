"""Products by wgmma, 64 rows at a time, and what becomes of them: scores, weights, sums."""

from strobe.kernels.common.packed_halves import rounded
from strobe.kernels.common.scores import LOG2E
from strobe.kernels.decode.keys import is_page, look_up
from strobe.kernels.decode.scores import changed, finite, is_seen, some_are_hidden
from strobe.kernels.gluon import gl, gluon, warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def accumulator(C, columns):
    """A result of wgmma, [rows, columns]: four warps have 64 rows, and with column_warps a part of the columns."""
    across = C.column_warps
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[C.warps // across, across], instr_shape=[16, columns // across, 16]
    )


@gluon.constexpr_function
def rows_of(C, columns):
    return gl.SliceLayout(1, accumulator(C, columns))


@gluon.jit
def start_scores(q, k, C: gl.constexpr):
    """S = Q K^T."""
    s = gl.full([C.rows, C.tokens], 0.0, gl.float32, accumulator(C, C.tokens))
    for c in gl.static_range(len(q)):
        s = warpgroup_mma(q[c], k[c].permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def start_output(acc, p, v, C: gl.constexpr):
    """O += P V."""
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=accumulator(C, C.chunk), k_width=2)
    new = ()
    for c in gl.static_range(len(v)):
        new += (warpgroup_mma(gl.convert_layout(p, P), v[c], acc[c], is_async=True),)
    return new


@gluon.jit
def wait_output(acc):
    done = ()
    for c in gl.static_range(len(acc)):
        done += (warpgroup_mma_wait(0, deps=[acc[c]]),)
    return done


@gluon.jit
def output_of(memory, acc, position):
    """O, when P V of that step is added to it."""
    # Complete already, but ptxas moves no wait above it: P V stays hidden under the exponentials.
    memory.v.wait(position)
    acc = wait_output(acc)
    memory.v.release(position)
    return acc


@gluon.jit
def no_output(C: gl.constexpr):
    acc = ()
    for _ in gl.static_range(C.head_dim_v // C.chunk):
        acc += (gl.full([C.rows, C.chunk], 0.0, gl.float32, accumulator(C, C.chunk)),)
    return acc


@gluon.jit
def rescaled(acc, factor, C: gl.constexpr):
    new = ()
    for c in gl.static_range(len(acc)):
        new += (acc[c] * gl.expand_dims(gl.convert_layout(factor, rows_of(C, acc[c].shape[1])), 1),)
    return new


@gluon.jit
def scale_of_keys(terms, piece):
    scale = 1.0
    if terms.k_scale is not None:
        scale = gl.load(terms.k_scale + piece.batch * terms.k_scale_page + piece.head * terms.k_scale_row)
    return scale


@gluon.jit
def scale_of_scores(terms, piece):
    """By what products are multiplied to become scores, times log2(e), a positive number, and by what Q is for that: 1, -1 or
    0, as the scale is. Scores that change otherwise are changed one by one."""
    scale = terms.scale * scale_of_keys(terms, piece) * LOG2E
    if (terms.softcap is not None) | (terms.alibi is not None):
        return 0.0 * scale + 1.0, 0.0 * scale + 1.0
    else:
        sign = gl.where(scale > 0.0, 1.0, gl.where(scale < 0.0, -1.0, 0.0))
        return gl.where(scale == 0.0, 1.0, gl.abs(scale)), sign


@gluon.jit
def seen_scores(s, terms, cached, piece, first, k_scale, holes, C: gl.constexpr, GROUP: gl.constexpr):
    """Scores, times log2(e), of products s [rows, tokens] from key `first` on; -inf where nobody sees a key. holes: whether a
    page may not be there."""
    s = gl.reshape(s, [1, C.rows, C.tokens])
    L: gl.constexpr = s.type.layout
    s = changed(s, terms, piece, first, k_scale, C, GROUP, L)
    if holes | some_are_hidden(terms, piece, first, C):
        if cached.PAGE:
            pages = look_up(cached, piece, first, C, gl.SliceLayout(1, L))
            s = gl.where(gl.expand_dims(is_page(cached, pages), 1), s, -float("inf"))
        s = gl.where(is_seen(terms, piece, first, C, GROUP, L), s, -float("inf"))
    return gl.convert_layout(gl.reshape(s, [C.rows, C.tokens]), accumulator(C, C.tokens))


@gluon.jit
def masked(s, K, piece, first, holes, C: gl.constexpr, MASKED: gl.constexpr, power=1.0):
    """Products s [rows, tokens] from key `first` on, changed as terms ask; -inf where nobody sees a key. power: by what they
    are multiplied first, if terms ask for any change."""
    cached, terms = K.cached, K.terms
    if (terms.softcap is not None) | (terms.alibi is not None):
        s = s * power
    s = gl.reshape(s, [1, C.rows, C.tokens])
    L: gl.constexpr = s.type.layout
    if (terms.softcap is not None) | (terms.alibi is not None):
        s = changed(s, terms, piece, first, scale_of_keys(terms, piece), C, K.GROUP, L)
    if MASKED:
        if cached.PAGE:
            if holes:  # to look pages up takes long behind the copies of all CTAs
                pages = look_up(cached, piece, first, C, gl.SliceLayout(1, L))
                s = gl.where(gl.expand_dims(is_page(cached, pages), 1), s, -float("inf"))
        if some_are_hidden(terms, piece, first, C):
            s = gl.where(is_seen(terms, piece, first, C, K.GROUP, L), s, -float("inf"))
    return gl.convert_layout(gl.reshape(s, [C.rows, C.tokens]), accumulator(C, C.tokens))


@gluon.jit
def weights(s, top):
    """The maximum of each row with the scores of a step, its P, and the factor of what was summed before."""
    new_top = gl.maximum(top, gl.max(s, 1))
    shift = finite(new_top)
    return new_top, gl.exp2(s - gl.expand_dims(shift, 1)), gl.exp2(top - shift)


@gluon.jit
def weights_of(s, scale, top):
    """The maximum of each row with the scores of a step, its P, and the factor of what was summed before."""
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    shift = finite(new_top)
    return new_top, gl.exp2(gl.fma(s, beside(scale), gl.expand_dims(-shift, 1))), gl.exp2(top - shift)


@gluon.jit
def beside(scale):
    """A number for all rows, or one for each, as it meets scores."""
    if len(scale.shape) > 0:
        return gl.expand_dims(scale, 1)
    else:
        return scale


@gluon.jit
def operand_of(p, dtype: gl.constexpr, C: gl.constexpr):
    """P as it is multiplied, rounded in pairs where TMA copies: an H100, 128 rows, 32 requests of 8k keys over pages of 64: 382
    microseconds, not 411. With cp.async that was slower over pages of 16."""
    if C.box > 0:
        return rounded(p, dtype)
    else:
        return p.to(dtype)


@gluon.jit
def lane_sums(p):
    """Row sums within each lane: [rows, columns] -> [rows, 4], a column for each lane of the quad that has the row."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def rescaled_sums(sums, factor):
    """Sums of each lane of a row, of whose exponentials the reference has moved."""
    return sums * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout)), 1)
