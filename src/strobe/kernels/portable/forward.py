"""Flash attention's forward in plain Triton: the algorithm of `cpu/tiled.py`, one program per tile of rows.

A program owns tile_q rows of one query head. The keys that its rows see lie in up to three phases: tiles that need the
mask, tiles that every row sees whole, tiles that need the mask again. Only the masked ones pay for the mask and bounds.

A masked-out value weighs 0, but 0 * NaN = NaN. And a compiler makes one FMA of scale * s - m, while m is a rounded product:
of scores beyond 2^30 or so the largest one's exponent is then anything, not 0. A guard in the loop would cost every user
registers. So a program whose result is not finite, or whose rows have lost all weight, computes it again with care, from finite
values, and gives that to the rows that see no others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strobe.device import Arch
from strobe.kernels.common.call import Buffers, Call, Tensors, results
from strobe.kernels.common.dependent_launch import take_last_turn
from strobe.kernels.common.device_function import device_function
from strobe.kernels.common.documents import SPAN, span_buffers, span_calls
from strobe.kernels.common.philox import kept
from strobe.kernels.common.scores import LN2, score_of
from strobe.kernels.portable import arguments, interpreter
from strobe.kernels.portable.config import Config, choose
from strobe.kernels.portable.primitives import (
    KEYS,
    LENGTHS_AND_BOUNDS,
    PLACE_NUMBERS,
    QUERIES,
    Mask,
    Matrix,
    any_not_finite,
    count_broken_keys,
    finite_part,
    kind_of_block,
    kv_phases,
    load_ids,
    load_tile,
    position,
    product,
    row_position,
    seen_in,
    sequence,
    store_tile,
    store_vector,
    stream,
    tile_positions,
    vector_stream,
    whole_head,
    whole_length,
    within_spans,
)
from strobe.kernels.portable.scores import biased, sink_of, slope_of, through_function
from strobe.kernels.workspace import ENDED, NOTED, SHARES
from strobe.problem import AttentionProblem

interpreter.mend()


@device_function
def _attend_tile(
    acc, row_max, row_sum, q_tile, k, v, p, ids_q, slope, batch, head, n_q, n_kv, mask, score, places, first,
    DIM: tl.constexpr, DIM_V: tl.constexpr, TILE_KV: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr,
    FINITE: tl.constexpr,
):  # fmt: skip
    """`_attend`, for the tile of keys from `first` on."""
    remaining = None
    if MASKED:
        remaining = n_kv - first
    key = first + tl.arange(0, TILE_KV)
    j = position(key, places, KEYS)
    k_tile = load_tile(k, first, remaining, DIM)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    s = score_of(s, p[:, None], j[None, :], score.inner, score.outer, slope)
    i = p[:, None] - (whole_length(n_kv, places, KEYS) - whole_length(n_q, places, QUERIES))
    s = biased(s, i, j[None, :], n_q, n_kv, score, batch, head)
    s = through_function(s, i, j[None, :], score, batch, whole_head(head, places))
    if MASKED:
        ids_kv = load_ids(mask.document_kv, batch, first, n_kv, TILE_KV)
        seen = seen_in(p[:, None], key[None, :], n_q, n_kv, mask, score, ids_q[:, None], ids_kv[None, :], batch, head, places)
        s = tl.where(seen, s, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(s, 1))
    shift = new_max
    if MASKED or score.bias is not None or score.function is not None:
        # A row that has seen nothing yet has the maximum -inf, and -inf - -inf is no number: shift by 0 instead.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(s - shift[:, None])
    if CAREFUL:
        weights = tl.where((s >= shift[:, None]) & (s < float("inf")), 1.0, weights)
    rescale = tl.exp2(row_max - shift)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    if score.dropout is not None:
        keep = kept(tl.load(score.dropout.seed), score.dropout.threshold, batch, whole_head(head, places), i, j[None, :])
        weights = tl.where(keep, weights, 0.0)
    v_tile = load_tile(v, first, remaining, DIM_V)
    if FINITE:
        v_tile = finite_part(v_tile)
    acc = product(weights, v_tile, acc)
    row_max = new_max
    return acc, row_max, row_sum


@device_function
def _attend(
    state, q_tile, k, v, p, ids_q, slope, batch, head, n_q, n_kv, mask, score, places, begin, end,
    DIM: tl.constexpr, DIM_V: tl.constexpr, TILE_KV: tl.constexpr, MASKED: tl.constexpr,
    CAREFUL: tl.constexpr = False, FINITE: tl.constexpr = False,
):  # fmt: skip
    """The online softmax over the keys [begin, end), in tiles. state: (accumulator, row_max, row_sum).

    MASKED: some pairs may not be visible. CAREFUL: the weight of a row's largest score is 1, however large that is.
    FINITE: take values that are not finite as 0.
    """
    acc, row_max, row_sum = state
    for first in tl.range(begin, end, TILE_KV, num_stages=1 if CAREFUL else None):
        if score.blocks is None:
            acc, row_max, row_sum = _attend_tile(
                acc, row_max, row_sum, q_tile, k, v, p, ids_q, slope, batch, head, n_q, n_kv, mask, score, places, first,
                DIM, DIM_V, TILE_KV, MASKED, CAREFUL, FINITE,
            )  # fmt: skip
        else:
            if kind_of_block(score.blocks, tl.min(p) - (n_kv - n_q), first, batch, head) != 0:
                acc, row_max, row_sum = _attend_tile(
                    acc, row_max, row_sum, q_tile, k, v, p, ids_q, slope, batch, head, n_q, n_kv, mask, score, places, first,
                    DIM, DIM_V, TILE_KV, MASKED, CAREFUL, FINITE,
                )  # fmt: skip
    return acc, row_max, row_sum


@device_function
def _rows(
    first, head, batch, start_q, start_kv, n_q, n_kv, q, k, v, out, lse, lse_batch, lse_head,
    left, right, prefix, document_q, document_kv, score, places, group, spans,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, ONE_PHASE: tl.constexpr,
):  # fmt: skip
    """Write out and lse of the TILE_Q rows from `first` on of one head of one sequence. spans: a pointer to those of the batch
    entry where there are documents, or None; places: the same of where rows and keys stand. ONE_PHASE: all tiles of keys are
    masked, which is slower, and less to compile."""
    mask = Mask(left, right, prefix, document_q, document_kv)  # not an argument: Triton 3.6 passes it on only once
    p_first = row_position(first, n_q, n_kv, places)
    last = tl.minimum(first + TILE_Q, n_q) - 1
    p_last = row_position(last, n_q, n_kv, places)
    begin, full_begin, full_end, end = kv_phases(p_first, p_last, n_kv, mask, score, places, TILE_KV)
    if spans is not None:
        begin, end = within_spans(begin, end, spans, first, last, TILE_Q, TILE_KV)
    BY_PAIR: tl.constexpr = mask.document_q is not None or score.visible is not None or score.blocks is not None
    PHASES: tl.constexpr = not (ONE_PHASE or BY_PAIR)
    if not PHASES:
        full_begin = begin
        full_end = begin
    p = tile_positions(first, p_first, n_q, n_kv, places, TILE_Q)
    ids_q = load_ids(mask.document_q, batch, first, n_q, TILE_Q)
    slope = slope_of(score, batch, head)
    q_stream = stream(q, batch, start_q, head, TILE_Q, PADDED)
    k_stream = stream(k, batch, start_kv, head // group, TILE_KV, PADDED)
    v_stream = stream(v, batch, start_kv, head // group, TILE_KV, PADDED_V)
    q_tile = load_tile(q_stream, first, n_q - first, DIM)

    row_max = tl.full((TILE_Q,), float("-inf"), tl.float32)
    row_sum = tl.zeros((TILE_Q,), tl.float32)
    if score.sinks is not None:  # a score without a value
        row_max = tl.zeros((TILE_Q,), tl.float32) + sink_of(score, head)
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    nothing = (tl.zeros((TILE_Q, PADDED_V), tl.float32), row_max, row_sum)
    state = nothing
    if mask.left is not None and PHASES:
        state = _attend(
            state, q_tile, k_stream, v_stream, p, ids_q, slope, batch, head, n_q, n_kv, mask, score, places, begin, full_begin,
            DIM, DIM_V, TILE_KV, True,
        )  # fmt: skip
    if PHASES:
        state = _attend(
            state, q_tile, k_stream, v_stream, p, ids_q, slope, batch, head, n_q, n_kv, mask, score, places, full_begin,
            full_end, DIM, DIM_V, TILE_KV, False,
        )  # fmt: skip
    acc, row_max, row_sum = _attend(
        state, q_tile, k_stream, v_stream, p, ids_q, slope, batch, head, n_q, n_kv, mask, score, places, full_end, end,
        DIM, DIM_V, TILE_KV, True,
    )  # fmt: skip
    if any_not_finite(acc) or _any_lost(row_max, row_sum):
        # Where every pair is visible there is nothing to keep out, and nothing is compiled for it.
        CUTS: tl.constexpr = mask.left is not None or mask.right is not None or mask.prefix is not None or BY_PAIR
        again, row_max, row_sum = _attend(
            nothing, q_tile, k_stream, v_stream, p, ids_q, slope, batch, head, n_q, n_kv, mask, score, places, begin, end,
            DIM, DIM_V, TILE_KV, True, True, CUTS,
        )  # fmt: skip
        if CUTS:
            broken = count_broken_keys(
                v_stream, p, ids_q, batch, head, n_q, n_kv, mask, score, places, begin, end, TILE_Q, DIM_V, PADDED_V, TILE_KV
            )
            again = tl.where(broken > 0, acc, again)
        acc = again

    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    acc = acc / row_sum[:, None]
    if score.dropout is not None:
        acc = acc * score.dropout.scale
    store_tile(stream(out, batch, start_q, head, TILE_Q, PADDED_V), first, n_q - first, acc, DIM_V)
    log_sum = tl.where(empty, float("-inf"), (row_max + tl.log2(row_sum)) * LN2)
    of_lse = Matrix(lse, lse_batch, 1, lse_head)
    store_vector(vector_stream(of_lse, batch, start_q, head, TILE_Q), first, n_q - first, log_sum)


@device_function
def _any_lost(row_max, row_sum):
    """Whether the weights of a row that sees keys sum up to nothing, or to no number."""
    lost = (row_sum == float("inf")) | ((row_sum == 0.0) & (row_max > float("-inf")))
    return tl.max(lost.to(tl.int32)) > 0


@device_function
def _lse_strides(cu_seqlens_q, heads_q, n_q, total_q):
    """(by batch, by head), by `lse_shape`. The numbers in a tuple of the host are specialised for: a length would recompile."""
    if cu_seqlens_q is None:
        return tl.cast(n_q, tl.int64) * heads_q, n_q
    else:
        return tl.cast(total_q, tl.int64) * 0, total_q


@triton.jit(do_not_specialize=(*LENGTHS_AND_BOUNDS, "heads_q", "group"))
def _forward(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, n_q, n_kv, total_q, total_kv,
    left, right, prefix, document_q, document_kv, score, places, heads_q, group, spans,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr,
):  # fmt: skip
    # The last rows first: under a causal mask they see the most keys, and the longest program should not start last.
    tiles = tl.cdiv(n_q, TILE_Q)
    first = (tiles - 1 - tl.program_id(0) % tiles) * TILE_Q
    head = tl.program_id(0) // tiles % heads_q
    batch = tl.program_id(0) // tiles // heads_q
    if spans is not None:
        spans += 3 * batch * tl.cdiv(n_q, SPAN)
    if places is not None:
        places += PLACE_NUMBERS * batch
    lse_batch, lse_head = _lse_strides(cu_seqlens_q, heads_q, n_q, total_q)
    start_q, n_q = sequence(cu_seqlens_q, seqused_q, batch, n_q, total_q)
    start_kv, n_kv = sequence(cu_seqlens_kv, seqused_kv, batch, n_kv, total_kv)
    if first >= n_q:
        return
    _rows(
        first, head, batch, start_q, start_kv, n_q, n_kv, q, k, v, out, lse, lse_batch, lse_head,
        left, right, prefix, document_q, document_kv, score, places, group, spans,
        DIM, DIM_V, PADDED, PADDED_V, TILE_Q, TILE_KV, False,
    )  # fmt: skip


NOTED_ROWS = 64
"""Rows that one note of `redo` stands for."""

_SHARE = 128

WAITING = 4
"""Programs of `_redo` that wait for the launch ahead whatever it has noted so far. They are on two multiprocessors. On an H100,
of the time with all waiting: causal, 1 x 1024, 16 heads of 128 columns 0.95, 1 x 2048, 32 heads 0.95; full, 16 x 256, 8 heads
of 160 0.97; one is level with four. With all blocks noted 1.01, 0.98, 0.99; the causal two with one, noted last, 2.1, 1.01."""


@triton.jit(do_not_specialize=(*LENGTHS_AND_BOUNDS, "heads_q", "group", "number"))
def _redo(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, n_q, n_kv, total_q, total_kv,
    left, right, prefix, document_q, document_kv, score, places, heads_q, group, notes, number, counters, counter, spans,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_KV: tl.constexpr, NOTED_ROWS: tl.constexpr, SHARE: tl.constexpr, WAITING: tl.constexpr,
    NOTED: tl.constexpr, ENDED: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    # The notes are in shares, one for each program: share p of P has the notes p, p + P, ..., SHARE of which are looked at
    # together, so that blocks that are noted together, as those of one head with an outlier, go to different programs. Normally
    # no note is set, and few programs cost less than many. Nothing that a block needs may be computed ahead of the loops then:
    # it would be spilled there, up to 2944 bytes a thread.
    #
    # Where `counters` say whether there is a note, WAITING programs wait for the launch ahead. The others leave at once if
    # there is none when they come, as a multiprocessor on which they waited would have no room for the next launch. Who stays
    # takes one share after the other. (Warps of a program that read different numbers would part ways, and not meet again at
    # the next barrier: what others may change meanwhile is read by atomics, once for all warps.)
    programs = tl.num_programs(0)
    waiting = tl.minimum(programs, WAITING)
    share = tl.program_id(0)
    if counters is not None:
        if share >= waiting:
            if tl.atomic_or(counters + NOTED, 0, sem="relaxed") == 0:
                share = -1
        if share < 0:
            return
    take_last_turn()
    if counters is not None:
        if share < waiting:
            if tl.load(counters + NOTED) == 0:  # it is set back when all that wait have looked
                share = -1
        if share < 0:
            return
        share = tl.atomic_add(counters + SHARES, 1, sem="relaxed")
    blocks = tl.cdiv(n_q, NOTED_ROWS)
    lse_batch, lse_head = _lse_strides(cu_seqlens_q, heads_q, n_q, total_q)
    redone = 0
    while share < programs:
        for begin in tl.range(share, number, programs * SHARE, num_stages=1, disable_licm=True):
            looked_at = begin + programs * tl.arange(0, SHARE)
            if tl.max(tl.load(notes + looked_at, mask=looked_at < number, other=0), 0) != 0:
                for note in tl.range(begin, tl.minimum(begin + programs * SHARE, number), programs, disable_licm=True):
                    if tl.load(notes + note) != 0:
                        batch = note // blocks // heads_q
                        start_q, rows = sequence(cu_seqlens_q, seqused_q, batch, n_q, total_q)
                        start_kv, keys = sequence(cu_seqlens_kv, seqused_kv, batch, n_kv, total_kv)
                        own_spans = spans
                        if spans is not None:
                            own_spans = spans + 3 * batch * blocks
                        own_places = places
                        if places is not None:
                            own_places = places + PLACE_NUMBERS * batch
                        for within in tl.range(0, NOTED_ROWS, TILE_Q, disable_licm=True):
                            _rows(
                                note % blocks * NOTED_ROWS + within, note // blocks % heads_q, batch, start_q, start_kv, rows,
                                keys, q, k, v, out, lse, lse_batch, lse_head, left, right, prefix, document_q, document_kv,
                                score, own_places, group, own_spans, DIM, DIM_V, PADDED, PADDED_V, TILE_Q, TILE_KV,
                                True,
                            )  # fmt: skip
                        tl.store(notes + note, 0)
                        redone += 1
        share = programs if counters is None else tl.atomic_add(counters + SHARES, 1, sem="relaxed")
    if counter is not None:
        if redone != 0:
            tl.atomic_add(counter, redone, sem="relaxed")
    if counters is not None:
        if tl.program_id(0) < waiting:
            if tl.atomic_add(counters + ENDED, 1, sem="relaxed") == waiting - 1:
                tl.store(counters + NOTED, 0)
                tl.store(counters + ENDED, 0)


def buffers(problem: AttentionProblem) -> Buffers:
    """The tensors of a forward; rows of no sequence, or not used, are written by no kernel."""
    return Buffers(results(problem, fill=problem.varlen or problem.seqused), span_buffers(problem, "row_spans"))


def calls(problem: AttentionProblem, tensors: Tensors, arch: Arch) -> list[Call]:
    """The launches of a forward, in order."""
    lengths, config = problem.lengths, choose("forward", problem, arch)
    grid = (triton.cdiv(lengths.seqlen_q, config.tile_q) * problem.heads_q * lengths.batch,)
    forward = Call(_forward, grid, (), _keywords(problem, tensors, config))
    return [*span_calls(tensors, in_turn=False), forward]


def redo_call(problem: AttentionProblem, tensors: Tensors, arch: Arch, counters: torch.Tensor | None = None) -> Call:
    """The launch that writes out and lse of those blocks of 64 rows whose note is not 0, and sets their notes back to 0. It
    takes its turn after the launch that noted them (`common.dependent_launch`), which GPUs before Hopper cannot.

    tensors: those of a forward, and
        notes: int32 [batch * heads_q * ceil(seqlen_q / 64)], where block r of head h of batch entry (or sequence) b has the
            place (b * heads_q + h) * ceil(seqlen_q / 64) + r. As it is all 0 again afterwards, one buffer serves all launches
            of a stream, and all replays of a graph.
        redone, if there is one: int32 [1], to which the number of blocks is added that were redone.

    counters: those of the workspace, if the launch ahead says there whether it left a note.
    """
    number, config = tensors.notes.numel(), choose("redo", problem, arch)
    at_once = 2 if config.num_warps <= 4 else 1  # on a multiprocessor; others would come when these have gone
    keywords = _keywords(problem, tensors, config) | dict(
        notes=tensors.notes, number=number, counters=counters, counter=tensors.redone, NOTED_ROWS=NOTED_ROWS, SHARE=_SHARE,
        WAITING=WAITING, NOTED=NOTED, ENDED=ENDED, SHARES=SHARES, launch_pdl=True,
    )  # fmt: skip
    programs = at_once * (arch.sms or 4)  # on a CPU few, so that a program has several notes
    return Call(_redo, (min(number, programs),), (), keywords)


def _keywords(problem: AttentionProblem, tensors: Tensors, config: Config) -> dict:
    """The arguments that both kernels take."""
    return {
        **arguments.of_problem(problem, tensors),
        "out": arguments.matrix(tensors.out),
        "lse": tensors.lse,
        "heads_q": problem.heads_q,
        "spans": tensors.row_spans,
        **arguments.of_config(config),
    }
