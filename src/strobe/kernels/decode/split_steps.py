"""A multiplier's steps where keys are cut in splits, each of which is found from nothing: see `splits`."""

from strobe.kernels.decode.arguments import Chain, Job, Piece
from strobe.kernels.decode.layouts import lanes
from strobe.kernels.decode.parts import leave_parts
from strobe.kernels.decode.products import (
    lane_sums,
    no_output,
    operand_of,
    output_of,
    rescaled,
    rescaled_sums,
    rows_of,
    weights_of,
)
from strobe.kernels.decode.scores import finite
from strobe.kernels.decode.splits import added, ends_part
from strobe.kernels.gluon import gl, gluon


@gluon.jit
def split_step(W: gl.constexpr, memory, K, job, s, scale, acc, top, sums, part, now, at):
    """The same where keys are cut in splits: one that begins with this step is found from nothing, and the one before it is
    added to its part, which is left if it ends. part: O, maxima and sums of the splits before, returned last."""
    C: gl.constexpr = K.C
    none = no_part(C)
    next_top, wide, factor = split_weights_of(s, scale, gl.where(at % C.split == 0, none[1], top), memory.dtype, C)
    own_sums = lane_sums(wide)
    next_sums = rescaled_sums(sums, factor) + own_sums
    acc = output_of(memory, acc, now - 1)
    p = operand_of(wide, memory.dtype, C)
    if at % C.split == 0:
        part = added_split(part, acc, top, sums)
        if ends_part(job.chain, at, C):
            its, its_job = noted(W, memory)
            leave_parts(K, its, its_job, at - 1, *part)
            part = none
        acc, sums = no_output(C), own_sums
    else:
        acc, sums = rescaled(acc, factor, C), next_sums
    return p, acc, next_top, sums, part


@gluon.jit
def hopeful_split_step(W: gl.constexpr, memory, K, job, s, scale, acc, top, sums, part, worst, now, at, leaves,
                       HOPEFUL: gl.constexpr):  # fmt: skip
    """The same where pieces may be taken again, by the optimistic softmax if HOPEFUL: parts are left only by who `leaves` them.
    worst: the greatest sum of splits that were hopeful, returned last."""
    C: gl.constexpr = K.C
    none = no_part(C)
    begins = at % C.split == 0
    if HOPEFUL:
        next_top = top
        if begins:
            next_top = gl.max(s, 1) * scale
        wide = gl.exp2(gl.fma(s, scale, gl.expand_dims(-finite(next_top), 1)))
        own_sums = lane_sums(wide)
    else:
        next_top, wide, factor = split_weights_of(s, scale, gl.where(begins, none[1], top), memory.dtype, C)
        own_sums = lane_sums(wide)
        next_sums = rescaled_sums(sums, factor) + own_sums
    acc = output_of(memory, acc, now - 1)
    p = operand_of(wide, memory.dtype, C)
    if begins:
        if HOPEFUL:
            worst = worse(worst, top, sums)
        o, part_top, part_total = added_split(taken_up(W, memory, part, acc, C), acc, top, sums)
        if ends_part(job.chain, at, C):
            if leaves:
                its, its_job = noted(W, memory)
                leave_parts(K, its, its_job, at - 1, o, part_top, part_total)
            o, part_top, part_total = none
        part = put_down(W, memory, o, C), part_top, part_total
        acc, sums = no_output(C), own_sums
    elif HOPEFUL:
        sums += own_sums
    else:
        acc, sums = rescaled(acc, factor, C), next_sums
    return p, acc, next_top, sums, part, worst


# ---- parts of a result


@gluon.jit
def no_part(C: gl.constexpr):
    """O, maxima and sums of no keys."""
    S: gl.constexpr = rows_of(C, C.tokens)
    return no_output(C), gl.full([C.rows], -float("inf"), gl.float32, S), gl.full([C.rows], 0.0, gl.float32, S)


@gluon.jit
def added_split(part, acc, top, sums):
    """A part with the split that comes behind it."""
    o, part_top, part_total = part
    return added(o, part_top, part_total, acc, top, gl.convert_layout(gl.sum(sums, 1), top.type.layout))


@gluon.jit
def worse(worst, top, sums):
    """The greater one of `worst` and the sum of each row of a split, inf if its first step had no weights."""
    total = gl.convert_layout(gl.sum(sums, 1), top.type.layout)
    return gl.maximum(worst, gl.where(top == -float("inf"), float("inf"), total))


@gluon.jit
def as_squares(x):
    """[rows, columns], of which a warp's neighbours are those of squares of 8 rows and 8 columns, as it has them of wgmma."""
    return gl.permute(gl.reshape(x, [x.shape[0] // 8, 8, x.shape[1] // 8, 8]), (0, 2, 1, 3))


@gluon.jit
def put_down(W: gl.constexpr, memory, o, C: gl.constexpr):
    """Chunks of O, which wait in shared memory where registers are Q's."""
    if C.sums_wait:
        for c in gl.static_range(len(o)):
            memory.sums.index(W * len(o) + c).store(as_squares(o[c]))
        return ()
    else:
        return o


@gluon.jit
def taken_up(W: gl.constexpr, memory, part, like, C: gl.constexpr):
    """A part of which O was put down."""
    o, top, total = part
    if C.sums_wait:
        for c in gl.static_range(len(like)):
            squares = memory.sums.index(W * len(like) + c).load(as_squares(like[c]).type.layout)
            chunk = gl.reshape(gl.permute(squares, (0, 2, 1, 3)), like[c].shape)
            o += (gl.convert_layout(chunk, like[c].type.layout),)
    return o, top, total


# ---- weights


@gluon.constexpr_function
def reach_of(dtype):
    """log2 of how far a weight may be above those of the first step of its split, so that it fits P."""
    return 15.0 if dtype == gl.float16 else 32.0


@gluon.jit
def split_weights_of(s, scale, top, dtype: gl.constexpr, C: gl.constexpr):
    """Find what `weights_of` finds, or count from a reference that moves to the maximum of a step only if that is far above it.
    So who counts on that it does not move finds the same, as long as no sum is so great that it might have."""
    if C.late:
        most = gl.max(s, 1) * scale
        new_top = gl.where(most > top + reach_of(dtype), most, top)
        shift = finite(new_top)
        return new_top, gl.exp2(gl.fma(s, scale, gl.expand_dims(-shift, 1))), gl.exp2(top - shift)
    else:
        return weights_of(s, scale, top)


# ---- a piece, written down


NOTES = gl.constexpr(22)
"""Numbers of a piece and its job."""


@gluon.jit
def note(W: gl.constexpr, memory, piece, job):
    """Write a piece and its job down, so that no register has to hold them while the group walks along its keys."""
    chain = job.chain
    numbers = (
        piece.batch, piece.entry, piece.head, piece.first_row, piece.first_query, piece.queries, piece.length, piece.begin,
        piece.end, job.number, job.parts, job.first, job.begins, job.stretch, job.place, job.patience,
        chain.begins.to(gl.int32), chain.settled, chain.line, chain.job_begin, chain.begin, chain.end,
    )  # fmt: skip
    for i in gl.static_range(NOTES):
        memory.notes.index(W * NOTES + i).store(gl.full([1], 0, gl.int32, lanes(gl.num_warps())) + numbers[i])


@gluon.jit
def noted(W: gl.constexpr, memory):
    """What `note` wrote down."""
    n = ()
    for i in gl.static_range(NOTES):
        n += (gl.max(memory.notes.index(W * NOTES + i).load(lanes(gl.num_warps())), 0),)
    chain = Chain(n[16] != 0, n[17], n[18], n[19], n[20], n[21])
    piece = Piece(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8])
    return piece, Job(n[9], n[10], n[11], n[12], n[13], n[14], n[15], chain)
