"""Mistakes made in the decode kernel, one at a time: the simulator finds each in every order."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
import torch
from broken import altered_over
from decode_launch import run
from requests_at_random import draw
from test_decode_kernel import (
    ASKED_Q,
    BY_WAY_OF_Q,
    CUT,
    FAR_CUT,
    FEW_JOBS,
    FIXED,
    OPTIMISTIC,
    far_scores,
    latent,
    long_latent,
    of_two_tiles,
    of_unequal_lengths,
    one_job,
    queries_below_zero,
    with_8_bits,
)
from test_head_dims import two_groups, wide_queries_below_zero

import strobe
from strobe.kernels.decode import wide_heads
from strobe.kernels.decode.choice import of_converted, of_one_group, of_split_clusters, of_wgmma
from strobe.kernels.decode.shares import of_shares
from strobe.sim import (
    BarrierMisuse,
    Deadlock,
    DoubleWrite,
    IllegalOperation,
    MissingFence,
    OutOfBounds,
    Race,
    Unfinished,
    Uninitialised,
)

ORDERS = ("in_order", "random", "late", "early")
SHARED = SCHEDULE, *PARTS = [
    f"strobe.kernels.decode.{name}"
    for name in ("schedule", "layouts", "keys", "scores", "splits", "writes", "parts", "results", "pieces")
]
"""What the kernels share, in the order in which they import each other."""
EIGHT_BITS, FORWARD, BOXES, PRODUCTS, QUERIES, LATENTS, TURNS, AGAIN, BOARD, CONVERTED, COPIERS, STEPS, HOPPER, CLUSTERS = (
    f"strobe.kernels.decode.{name}"
    for name in (
        "eight_bits",
        "forward",
        "boxes",
        "products",
        "queries",
        "latent",
        "latent_turns",
        "again",
        "board",
        "converted",
        "copiers",
        "split_steps",
        "hopper",
        "split_clusters",
    )
)
OF_HOPPER = BOXES, PRODUCTS, QUERIES, LATENTS, TURNS, AGAIN, BOARD, CONVERTED, COPIERS, STEPS, HOPPER
"""What Hopper's kernel is made of beside that, in the same order."""
LATENT = {"latent": True}
NUMBERS = (AssertionError,)
TOO_EARLY = (Race, Uninitialised)


@dataclass(frozen=True)
class Bug:
    """`text` of a module becomes `becomes`, and a simulation of a case raises one of `errors`."""

    what: str
    module: str
    text: str
    becomes: str
    errors: tuple[type[BaseException], ...] = NUMBERS
    case: dict = field(default_factory=dict)
    launches: int = 1

    def __str__(self) -> str:
        return self.what


def kernel(what, text, becomes, errors=NUMBERS, launches=1, **case) -> Bug:
    """In mma.sync's kernel, or in what it shares with the others."""
    return Bug(what, module_with(text, (*PARTS, FORWARD)), text, becomes, errors, case, launches)


def module_with(text: str, modules: Sequence[str]) -> str:
    """The one of some modules in which a text stands."""
    [module] = [name for name in modules if text in Path(str(importlib.import_module(name).__file__)).read_text()]
    return module


def eight_bits(what, text, becomes, errors=NUMBERS, **case) -> Bug:
    return Bug(what, EIGHT_BITS, text, becomes, errors, case)


def hopper(what, text, becomes, errors=NUMBERS, **case) -> Bug:
    """In the kernel of many rows, or in what it shares with Hopper's others."""
    return Bug(what, module_with(text, (BOXES, PRODUCTS, QUERIES, COPIERS, STEPS, HOPPER)), text, becomes, errors, case)


def converted(what, text, becomes, errors=NUMBERS) -> Bug:
    return Bug(what, CONVERTED, text, becomes, errors)


def latent_bug(what, text, becomes, errors=NUMBERS) -> Bug:
    return Bug(f"latent: {what}", LATENTS, text, becomes, errors, LATENT)


def again(what, text, becomes, errors=NUMBERS) -> Bug:
    return Bug(what, AGAIN, text, becomes, errors)


def board(what, text, becomes, errors=NUMBERS) -> Bug:
    return Bug(what, BOARD, text, becomes, errors)


def turns(what, text, becomes, errors=NUMBERS, **case) -> Bug:
    return Bug(what, TURNS, text, becomes, errors, case)


def schedule(what, text, becomes, errors=NUMBERS, **case) -> Bug:
    return Bug(what, SCHEDULE, text, becomes, errors, case)


WAIT_K = "        async_copy.wait_group(under_way)\n        partition_barrier()\n        copy_keys(rings, next"
WAIT_V = "            async_copy.wait_group(under_way)\n            partition_barrier()\n            copy_values(rings, next"
INSIDE = "inside = (keys >= piece.begin) & (keys < piece.end)"
SEEN = "seen = (keys >= piece.begin) & (keys < piece.end)"
HIDDEN = "hidden = (first < piece.begin) | (first + C.tokens > piece.end)"
A_WARPS = "there = (keys + keys_of_warp(C) > piece.begin) & (keys < piece.end)"
EACH = "there = (keys >= piece.begin) & (keys < piece.end)"
LAST = "    elif there == job.parts:\n"
RESET = LAST + '        gl.atomic_xchg(arrivals, 0, sem="relaxed", scope="gpu")\n'
ARRIVAL = 'gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") + 1'

TILES = {"n_q": 40, "group": 8, "heads_kv": 1, "room": 65, "lengths": [65, 1, 0, 43]}

WHOLE_JOBS = {"batch": 7, "lengths": [190] * 7, "by_turns": True}
"""Of which seven CTAs have two each."""

BUGS = [
    kernel("K is not waited for", WAIT_K, WAIT_K.partition("\n")[2], TOO_EARLY),
    kernel("V is not waited for", WAIT_V, WAIT_V.partition("\n")[2], TOO_EARLY),
    kernel("a group too few is waited for", WAIT_K, WAIT_K.replace("under_way", "under_way + 1"), TOO_EARLY),
    kernel("copies under way at the end", "    async_copy.wait_group(0)\n", "", (Unfinished, Race)),
    kernel("copies over what is read", "(i + C.stages - 1) % C.stages", "i % C.stages", TOO_EARLY),
    kernel("the step after the next", "now, next = i % C.stages", "now, next = (i + 1) % C.stages", TOO_EARLY),
    kernel("values beyond the end are read", INSIDE, "inside = keys >= piece.begin", page=None),
    kernel("keys ahead of the leftpad are seen", SEEN, "seen = keys < piece.end", leftpad=True, page=None),
    kernel("keys beyond the end are seen", SEEN, "seen = keys >= piece.begin", page=None, mask=None, n_q=1),
    kernel("a step with keys ahead of the leftpad counts as seen", HIDDEN, "hidden = first + C.tokens > piece.end",
           leftpad=True, page=None),
    kernel("a step with keys beyond the end counts as seen", HIDDEN, "hidden = first < piece.begin", page=None,
           mask=None, n_q=1),
    kernel("a step in which some queries see less counts as seen", "own + terms.right + 1", "own + terms.right + 200",
           lengths=[256, 1, 0, 128]),
    kernel("a step to the left of some windows counts as seen", "(first < piece.length - 1 - terms.left)", "(first < 0)",
           mask=strobe.Window(62, 3), lengths=[256, 1, 0, 130]),
    kernel("a step with drafted keys counts as seen", "(first + C.tokens > own)", "(first < 0)", tree=True, mask=strobe.Full(),
           lengths=[256, 1, 0, 128]),
    kernel("page numbers are not checked", "        inside = inside & is_page(cached, pages)\n", "        pass\n",
           honest=False),
    kernel("keys of pages that are not there are seen",
           "gl.where(gl.expand_dims(is_page(cached, pages), 1), s, -float(\"inf\"))", "s", honest=False),
    kernel("pages beyond the table are looked up", EACH, "there = keys >= 0", (OutOfBounds,), lengths=[257, 257], batch=2,
           room=257, page=1),
    kernel("pages beyond the table are looked up for a warp", A_WARPS, "there = keys >= 0", (OutOfBounds,), lengths=[257, 257],
           batch=2, room=257),
    kernel("the page of a warp's next keys", "(first + first_keys_in(C, layout)) % PAGE",
           "(first + first_keys_in(C, layout) + 1) % PAGE", page=128),
    kernel("stretches overlap", "start_of(team + 1, line.stretch, line.total)\n",
           "start_of(team + 1, line.stretch, line.total) + 1\n",
           (Race, DoubleWrite, AssertionError)),
    kernel("a tile ends a query too early", "own + last // GROUP + terms.right + 1", "own + last // GROUP + terms.right",
           **TILES),
    kernel("a tile ends where its last row begins to see", "gl.minimum(first_row + C.rows, queries * GROUP) - 1", "first_row",
           **TILES),
    kernel("a tile begins a query too late", "own + first_row // GROUP - terms.left",
           "own + first_row // GROUP - terms.left + 1", **{**TILES, "mask": strobe.Window(5, 0)}),
    kernel("a tile twice", "tiles - 1 - i // 2", "tiles - i // 2 - 2", (DoubleWrite, AssertionError, Race), **TILES),
    kernel("another row of the page", "(first + keys_in(C, layout)) % PAGE",
           "(first + keys_in(C, layout) + 1) % PAGE", page=3),
    kernel("the sums are not rescaled", "row_sum = row_sum * rescale + gl.sum(p, 2)", "row_sum = row_sum + gl.sum(p, 2)"),
    kernel("O is not rescaled", "        acc = acc * gl.expand_dims(rescale, 2)\n", ""),
    kernel("warps are added up without their weights", "load(R) * gl.expand_dims(weights, 2), 0)", "load(R), 0)"),
    kernel("a chunk of O twice", "in_chunks(first, COLUMNS) + in_chunks(second", "in_chunks(first, COLUMNS) + in_chunks(first",
           head_dim=128, head_dim_v=128, n_q=6, tokens=128, stages=3),
    kernel("the pages of a warp change places", "gl.where(own // PAGE == n, page", "gl.where(own // PAGE != n, page", page=16,
           tokens=128),
    kernel("the first page of a warp's few counts for its first key alone", "(keys + PAGE > piece.begin)",
           "(keys >= piece.begin)", leftpad=True, tokens=128),
    kernel("the maximum of one warp", "top = gl.max(tops, 0)", "top = gl.min(tops, 0)"),
    kernel("parts are added up without their weights", "gl.sum(os * gl.expand_dims(weights, 2), 0)",
           "gl.sum(os, 0)"),
    kernel("everybody merges", LAST, LAST.replace("== job.parts", ">= 1"), (Race, DoubleWrite, AssertionError)),
    kernel("the first to come merges", LAST, LAST.replace("== job.parts", "== 1"), (Race, AssertionError)),
    kernel("an arrival that releases nothing", ARRIVAL, ARRIVAL.replace("acq_rel", "acquire"), (Race,)),
    kernel("an arrival that acquires nothing", ARRIVAL, ARRIVAL.replace("acq_rel", "release"), (Race,)),
    kernel("arrivals are not set back", RESET, LAST, (Race, AssertionError), launches=2),
    kernel("a part too few is merged", "for i in range(0, job.parts, AT_ONCE)",
           "for i in range(0, job.parts - AT_ONCE, AT_ONCE)"),
    kernel("rows beyond the last are written", "row % GROUP, row < piece.queries * GROUP\n", "row % GROUP, row >= 0\n",
           (DoubleWrite, OutOfBounds, Race)),
    kernel("the LSE is that of base 2", "(top + gl.log2(total)) * LN2", "(top + gl.log2(total))"),
    kernel("a query sees the next one's key", "(keys <= position + terms.right)", "(keys <= position + 1)"),
    kernel("a query sees a key too many to the left", "(keys >= position - terms.left)",
           "(keys >= position - terms.left - 1)", mask=strobe.Window(40, 0)),
    kernel("the tree is read across", "query * terms.tree_row", "query * terms.tree_column", tree=True),
    kernel("the tree counts from the first key", "drafted = keys - (piece.length - piece.queries)", "drafted = keys",
           tree=True),
    kernel("the sink weighs twice", "+ gl.exp2(sink - finite(new_top))", "+ 2 * gl.exp2(sink - finite(new_top))", sinks=True),
    kernel("slopes of the first head", "alibi_batch + head, mask", "alibi_batch + 0 * head, mask", alibi=True),
    schedule("the room of starts is not counted", "units + number * start)", "units)", start=3),
    kernel("a stretch that begins behind a job's units has a piece of it", "ours = count > 0", "ours = count > -9",
           (AssertionError, Race, DoubleWrite), start=3),
    kernel("a turn is left out", "x + turn, next", "x + 2 * turn, next", **WHOLE_JOBS),
    kernel("a CTA has its whole jobs one after the other", "x, last = team * line.room, line.total", "last = line.total",
           (AssertionError, DoubleWrite), **WHOLE_JOBS),
    kernel("a request begins with the job whose turn it is", "b * line.span, x)", "x, x)",
           (AssertionError, DoubleWrite, Race, IllegalOperation, OutOfBounds), **WHOLE_JOBS),
    kernel("a job begins behind its first unit", "job_begins + room, x + count", "job_begins + room + 1, x + count",
           (AssertionError, Race, DoubleWrite, IllegalOperation, OutOfBounds), start=3),
    schedule("requests begin where there is room for two starts", "jobs * (units + line.start)",
             "jobs * (units + 2 * line.start)",
             (AssertionError, Race, DoubleWrite, IllegalOperation, OutOfBounds), start=3),
    schedule("the last request is left out", "total += gl.sum(jobs * units, 0)",
             "total += gl.sum(gl.where(b < requests.batch - 1, jobs * units, 0), 0)"),
    kernel("of requests that are alike each has room for one more", "gl.where(line.room > 0, line.room, units + line.start)",
           "gl.where(line.room > 0, line.room + 1, units + line.start)",
           (AssertionError, Race, DoubleWrite), lengths=[257, 193], batch=2, room=257),
    schedule("the room of those that are alike is that of the shortest", "most = gl.maximum(most, gl.max(units, 0))",
             "most = gl.maximum(most, gl.min(gl.where(b < requests.batch, units, 99), 0))", (AssertionError, Race, DoubleWrite),
             lengths=[257, 10], batch=2, room=257),
    schedule("requests that are alike begin one further", "begins = number * line.span", "begins = number * line.span + 1",
             (AssertionError, Race, DoubleWrite, IllegalOperation), lengths=[100] * 4),
    schedule("two parts have one place", "gl.where(part == 0, within, 0)", "0 * within", (DoubleWrite,)),
    schedule("a part too many", "stretch) - first + 1, first", "stretch) - first + 2, first",
             (DoubleWrite, AssertionError)),
    schedule("lengths are not clamped", "    length = gl.minimum(gl.maximum(length, 0), requests.capacity)\n", "",
             (OutOfBounds,),
             lie=True),
    schedule("rows that see nothing have no job", "// C.unit - begin // C.unit, 1)", "// C.unit - begin // C.unit, 0)",
             (AssertionError, ZeroDivisionError, IllegalOperation)),
]  # fmt: skip

WAIT_K_OF_8_BITS, WAIT_V_OF_8_BITS = (
    f"        async_copy.wait_group(under_way)\n        partition_barrier()\n        if CROSSED:\n            {copy}(rings"
    for copy in ("copy_values", "copy_keys")
)
COPY_V = "        if CROSSED:\n            copy_values(rings, next, cached, piece, first + ahead"
PAGES_OF_V = "k_pages, K_COPY, C, K.DIM)\n            v_pages = same_or_looked_up(cached, piece, k_pages, first"
COUNT = "count = gl.where(is_page(cached, pages), count, 0)"
EIGHT_BITS_BUGS = [
    eight_bits("K is not waited for", WAIT_K_OF_8_BITS, WAIT_K_OF_8_BITS.partition("\n")[2], TOO_EARLY),
    eight_bits("a group too few is waited for", "2 * (STAGES - 1) - 1 + CROSSED", "2 * (STAGES - 1) + CROSSED", TOO_EARLY),
    eight_bits("K is copied over another step", "copy_keys(rings, now, ", "copy_keys(rings, next, ", TOO_EARLY),
    eight_bits("pages that are not there count", "gl.where(there, away, float(\"inf\"))", "away", page=32, honest=False),
    eight_bits("V is not waited for", WAIT_V_OF_8_BITS, WAIT_V_OF_8_BITS.partition("\n")[2], TOO_EARLY),
    eight_bits("copies under way at the end", "    async_copy.wait_group(0)\n", "", (Unfinished, Race)),
    eight_bits("copies over what is read", "0 * begin + STAGES - 1", "0 * begin", TOO_EARLY),
    eight_bits("a stage too many", "now == STAGES - 1", "now == STAGES", (OutOfBounds, *TOO_EARLY)),
    eight_bits("values of another step", COPY_V, COPY_V.replace("first + ahead", "first"), page=None),
    eight_bits("values of other pages", PAGES_OF_V, PAGES_OF_V.replace("piece, k_pages", "piece, v_pages")),
    eight_bits("even columns are not rescaled", "even * gl.expand_dims(rescale, 2)", "even"),
    eight_bits("odd columns are not rescaled", "odd * gl.expand_dims(rescale, 2)", "odd"),
    eight_bits("even and odd columns change places", "gl.join(even, odd)", "gl.join(odd, even)"),
    eight_bits("the sums are not rescaled", "sums * gl.expand_dims(", "sums + 0 * gl.expand_dims("),
    eight_bits("the sum of one lane of four", "gl.sum(sums, 2)", "gl.max(sums, 2)"),
    kernel("values beyond the end are read", "gl.maximum(piece.end - piece.begin, 0)", "(piece.end - piece.begin + C.tokens)",
           page=None),
    kernel("values ahead of the leftpad are read", "(keys - piece.begin).to(gl.uint32) < count.to(gl.uint32)",
           "keys - piece.begin < count", leftpad=True, page=None),
    kernel("page numbers are not checked", COUNT, "pass", honest=False),
]  # fmt: skip

LONG = {"lengths": [510, 1, 0, 130], "room": 520}
EVEN = {"lengths": [512, 1, 0, 192], "room": 520}
S_OF_STEP = "    s = warpgroup_mma_wait(len(acc), deps=[s])\n    memory.k.release(now)\n"
O_OF_STEP = "    acc = wait_output(acc)\n    memory.v.release(position)\n"
V_OF_STEP = "    memory.v.wait(now - 1)\n    acc = start"
CLEARED = """        fence_async_shared()
        partition_barrier()
        mbarrier.arrive(full"""
GROUPED = {"head_dim": 128, "head_dim_v": 128, "page": 48}
TWO_CHUNKS = {"grouped": False, "chunk": 64}
K_ALONE = "    else:\n        mbarrier.expect(barrier, C.tokens * C.head_dim"
COPY_K = "k_page, k_row, piece.head, at, C)\n    if C.q_in_turn"
COPY_V = "v_page, v_row, piece.head, at, C)\n    if clears"
NARROW = "memory.narrow.index(turn % C.stages).permute((1, 0)), s, is_async=True)\n    return warpgroup_mma_wait(0, deps=[s])"


def swapped(lines):
    """Two lines in the other order."""
    first, second = lines.splitlines(keepends=True)
    return second + first


HOPPER_BUGS = [
    hopper("K is not waited for", "    memory.k.wait(now)\n", "", TOO_EARLY),
    hopper("the first K is not waited for", "    memory.k.wait(position)\n    s = ", "    s = ",
           (*TOO_EARLY, Deadlock, BarrierMisuse)),
    hopper("V is not waited for", V_OF_STEP + "_output(acc, p", "    acc = start_output(acc, p", TOO_EARLY),
    hopper("the last V is not waited for", "    memory.v.wait(position - 1)\n", "", (*TOO_EARLY, Deadlock)),
    hopper("a place is filled that is not empty", "memory.k.acquire(position)\n    if",
           "memory.k.full.index(memory.k.slot(position))\n    if", (Race, BarrierMisuse), **LONG),
    hopper("K is released while S reads it", S_OF_STEP, swapped(S_OF_STEP), (Race, Unfinished), **LONG),
    hopper("V is released while O reads it", O_OF_STEP, swapped(O_OF_STEP), (Race, Unfinished), **LONG),
    hopper("K is not released", "    memory.k.release(now)\n", "", (Deadlock,), **LONG),
    hopper("V is not released", "    memory.v.release(position)\n", "", (Deadlock,), **LONG),
    hopper("positions are not counted from piece to piece", "    position += steps\n    memory.v.wait",
           "    position += steps - 1\n    memory.v.wait",
           (*TOO_EARLY, Deadlock, BarrierMisuse, Unfinished, AssertionError)),
    hopper("the first S is used too early", "warpgroup_mma_wait(0, deps=[start_scores(q, block_of(memory.k, position, C), C)])",
           "start_scores(q, block_of(memory.k, position, C), C)", (Unfinished,)),
    hopper("nobody waits for S", S_OF_STEP, S_OF_STEP.partition("\n")[2], (Unfinished,)),
    hopper("O is used too early", "(warpgroup_mma_wait(0, deps=[acc[c]]),)", "(warpgroup_mma_wait(1, deps=[acc[c]]),)",
          (Unfinished, Race)),
    hopper("K is that of the step after", COPY_K, COPY_K.replace("at,", "at + C.tokens,"), page=256, **LONG),
    hopper("V is that of the step after", COPY_V, COPY_V.replace("at,", "at + C.tokens,"), page=256, **LONG),
    hopper("half of K's bytes are expected", K_ALONE + " * 2)", K_ALONE + ")",
           (BarrierMisuse, Deadlock, *TOO_EARLY)),
    hopper("half of V's bytes are expected", "C.tokens * C.head_dim_v * 2)", "C.tokens * C.head_dim_v)",
           (BarrierMisuse, Deadlock, *TOO_EARLY)),
    hopper("another row of the page", "row = row % cached.PAGE", "row = (row + 1) % cached.PAGE", page=32),
    hopper("the first chunk of columns twice", "[page, head, row, COLUMN], barrier", "[page, head, row, 0], barrier",
          head_dim=96, head_dim_v=96),
    hopper("the first group of each page twice", "page * of_page + row // GROUP", "page * of_page", **GROUPED),
    hopper("pages are not a page apart", "page * of_page + row", "page + row", **GROUPED),
    hopper("all keys of a group are the first one", "first + i // PANELS * GROUP + gl.expand_dims(gl.arange(0, GROUP, ",
          "first + i // PANELS * GROUP + 0 * gl.expand_dims(gl.arange(0, GROUP, ", **GROUPED),
    hopper("pages beyond the table are looked up", "return (first + C.box > piece.begin) & (first < piece.end)",
          "return first + C.box > piece.begin", (OutOfBounds,), lengths=[257, 257], batch=2, room=257),
    hopper("nobody notices that a page is missing", "& ~is_page(cached, pages)", "& (pages < -9)", honest=False),
    hopper("values beyond the end stay", "(keys >= piece.begin) & (keys < piece.end)", "keys >= piece.begin"),
    hopper("values ahead of the leftpad stay", "(keys >= piece.begin) & (keys < piece.end)", "keys < piece.end", leftpad=True,
          page=None),
    hopper("no values are cleared", "clears = has_others(piece, at, C)", "clears = at < 0"),
    hopper("values are told before they are cleared", "gl.where(clears, C.stages, memory.v.slot(position))",
           "memory.v.slot(position)", (*TOO_EARLY, Deadlock, BarrierMisuse, DoubleWrite)),
    hopper("values are cleared before they are there", "        mbarrier.wait(barrier, cleared & 1)\n", "",
           (*TOO_EARLY, BarrierMisuse)),
    hopper("what is cleared is not counted", "        cleared += 1\n", "", (*TOO_EARLY, Deadlock, BarrierMisuse)),
    hopper("values are cleared without a fence", CLEARED, CLEARED.partition("\n")[2], (MissingFence,)),
    hopper("Q has no fence", "memory.q.dtype))\n    fence_async_shared()\n", "memory.q.dtype))\n", (MissingFence,)),
    hopper("O is not rescaled", "return p, rescaled(acc, factor, C), top, sums", "return p, acc, top, sums"),
    hopper("the sums are not rescaled", "sums = rescaled_sums(sums, factor) + lane_sums(wide)", "sums += lane_sums(wide)"),
    hopper("a step in which some queries see less counts as plain", "own + terms.right + 1", "own + terms.right + 200", **EVEN),
    hopper("a step to the left of some windows counts as plain",
           "plain & (first + C.tokens >= piece.length - 1 - terms.left)", "plain", mask=strobe.Window(190, 3), **EVEN),
    hopper("a step with drafted keys counts as plain", "end = gl.minimum(end, own)", "end += 0 * own", tree=True,
           mask=strobe.Full(), **LONG),
    hopper("a step counts as plain though a page is missing", "plain = ~holes", "plain = holes == holes", honest=False,
           page=256, **LONG),
    hopper("the first step is taken twice", "gl.to_tensor(1), plain_steps", "gl.to_tensor(0), plain_steps",
           (*NUMBERS, *TOO_EARLY, Deadlock, BarrierMisuse, Unfinished), **LONG),
    hopper("maxima are not those of scores", "gl.maximum(top, gl.max(s, 1) * scale)", "gl.maximum(top, gl.max(s, 1))"),
    latent_bug("a step is not waited for",
               "        mbarrier.wait(memory.full.index(now % STAGES), (now // STAGES) & 1)\n", "", TOO_EARLY),
    latent_bug("P has no fence", "        fence_async_shared()\n        partition_barrier()\n        acc", "        acc",
               (MissingFence,)),
    latent_bug("Q has no fence", "K.DIM))\n    fence_async_shared()\n", "K.DIM))\n", (MissingFence,)),
    latent_bug("scores are used too early", NARROW, NARROW.replace("wait(0", "wait(1"), (Unfinished,)),
    latent_bug("columns of another place", "[page, head, row, C.head_dim], barrier", "[page, head, row, 0], barrier"),
    latent_bug("O is not rescaled", "        acc = rescaled(acc, factor, C)\n", ""),
    latent_bug("the sums are not rescaled", "sums * gl.expand_dims(factor, 1) + p", "sums + p"),
    latent_bug("values beyond the end stay", "        if has_others(piece, at, C):\n", "        if at < first:\n"),
    latent_bug("the parts of O change places", "meet.slice(c * W, W, 2)", "meet.slice((len(acc) - 1 - c) * W, W, 2)"),
    latent_bug("K comes to where the result was without a fence", "    fence_async_shared()  # K comes there next\n", "",
               (MissingFence, Race)),
]  # fmt: skip

ASKED_Q_BUGS = [
    hopper("Q is asked for while the one before is read",
           "    mbarrier.wait(memory.k.empty.index(memory.k.slot(before)), memory.k.phase(before), pred=near)\n", "    pass\n",
           (Race, *NUMBERS)),
    hopper("Q is not waited for", "    memory.k.wait(position)\n    q = ()", "    q = ()", TOO_EARLY),
    hopper("Q's bytes are not expected", "(C.tokens + C.rows) * C.head_dim * 2)", "C.tokens * C.head_dim * 2)",
           (BarrierMisuse, Deadlock, *TOO_EARLY)),
    hopper("the first Q alone is asked for", "        if position == begun:\n", "        if position == 0:\n",
           (Deadlock, BarrierMisuse, *NUMBERS)),
    hopper("both groups have the rows of one", "query + w * QUERIES", "query"),
    hopper("half of Q is there twice", "head, c * C.chunk], barrier", "head, 0], barrier"),
    hopper("Q is that of other heads", "piece.head * (GROUP - C.absent)\n    batch", "piece.head * GROUP\n    batch"),
    kernel("rows of absent heads are written", "there & (row % GROUP < GROUP - C.absent)", "there",
           (DoubleWrite, OutOfBounds, Race)),
    hopper("Q has no sign", "        if sign != 1.0:\n", "        if sign == 5.0:\n"),
]  # fmt: skip

TURN_OF_Q = "memory.turns.acquire(taken)"
TURN_WAITED, TURN_OVER = "    memory.turns.wait(taken)\n    q = ()\n", "        memory.turns.release(taken)\n    position"
SIGNED = "* sign).to(memory.q.dtype))\n        fence_async_shared()\n"
Q_IN_TURN_BUGS = [
    hopper("Q is copied over rows that are yet to be read", TURN_OF_Q, "memory.turns.full.index(0)",
           (*TOO_EARLY, *NUMBERS, BarrierMisuse, Deadlock)),
    hopper("Q in turn is not waited for", TURN_WAITED, "    q = ()\n", TOO_EARLY),
    hopper("Q is given back as it comes", TURN_WAITED, "    memory.turns.release(taken)\n" + TURN_WAITED,
           (*TOO_EARLY, *NUMBERS, BarrierMisuse, Deadlock)),
    hopper("nobody gives Q back", TURN_OVER, "        pass\n    position", (Deadlock,)),
    hopper("each step asks for Q", "        if at <= piece.begin:\n", "        if at >= 0:\n", (Race, Deadlock, BarrierMisuse)),
    hopper("turns of Q are not counted", "            before += 1\n", "            before += 0\n",
           (Deadlock, BarrierMisuse, *TOO_EARLY, *NUMBERS)),
    hopper("Q in turn has no sign", "    if sign != 1.0:\n        L:", "    if sign == 5.0:\n        L:"),
    hopper("Q that has a sign has no fence", SIGNED, SIGNED.partition("\n")[0] + "\n", (MissingFence,)),
]  # fmt: skip

LOOKED = """0, sem="acquire", scope="gpu") == job.parts - 1
"""
SET_BACK = """    if last:
        gl.atomic_xchg(arrivals, 0, sem="relaxed", scope="gpu")
"""

FEW_JOBS_BUGS = [
    kernel("a block of columns is merged twice", "turn % ACROSS * COLUMNS", "turn % ACROSS * 0", (DoubleWrite, Race, *NUMBERS)),
    kernel("blocks of columns are not counted", "turns * (K.C.result_columns // K.C.merged_columns), turns)", "turns, turns)"),
]  # fmt: skip

PANELS_BUGS = [
    hopper("values of the first panel alone are cleared", "clear_values(values[c], piece", "clear_values(values[0], piece"),
    kernel("each panel of a part is written over the first", "acc[c], top, total, c * acc[0].shape[1])",
           "acc[c], top, total, 0)", (DoubleWrite, *TOO_EARLY)),
    hopper("each panel of Q is the first", "rows_of_queries(K.outputs, piece, c * C.chunk, C.chunk",
           "rows_of_queries(K.outputs, piece, 0, C.chunk"),
]  # fmt: skip

JOINED_BUGS = [
    kernel("parts are added that are not there yet", LOOKED, LOOKED.replace("== job.parts - 1", ">= 0"),
           (DoubleWrite, *TOO_EARLY, *NUMBERS)),
    kernel("a part is read that was not handed in", "(row < rows) & (part != own)", "row < rows", (*TOO_EARLY, *NUMBERS)),
    kernel("who adds parts does not set the counter back", SET_BACK, "", (DoubleWrite, Race, *NUMBERS)),
    kernel("one part is added for all", "place = place_of(part, job.first", "place = place_of(0 * part + 1, job.first",
           (*TOO_EARLY, *NUMBERS)),
]  # fmt: skip

ABREAST_BUGS = [
    kernel("heads abreast are one head", "head * C.heads_abreast + member // C.abreast", "head * C.heads_abreast",
           (DoubleWrite, Race, *NUMBERS)),
    kernel("heads abreast are jobs of their own", "heads = heads_kv // C.heads_abreast", "heads = heads_kv",
           (OutOfBounds, DoubleWrite, Race, *NUMBERS)),
    schedule("heads abreast have one place for their parts", ") * C.team + gl.program_id(0) % C.team", ") * C.team",
             (DoubleWrite, Race, *NUMBERS)),
    schedule("a stretch for each CTA of a team", "teams = gl.num_programs(0) // C.team", "teams = gl.num_programs(0)"),
    kernel("a CTA takes its part for another one's", "gl.program_id(0) // K.C.team - job.first", "gl.program_id(0) - job.first",
           (*TOO_EARLY, *NUMBERS)),
    kernel("parts lie closer than those abreast leave them", "2 * C.team  # places", "2  # places", (*TOO_EARLY, *NUMBERS)),
]  # fmt: skip

TILES_ABREAST_BUGS = [
    kernel("a CTA's head is its tile's number", "member // C.abreast", "member % C.heads_abreast",
           (DoubleWrite, Race, *NUMBERS)),
    kernel("tiles abreast are one tile", ") * C.abreast + member % C.abreast", ") * C.abreast", (DoubleWrite, Race, *NUMBERS)),
]  # fmt: skip

BY_WAY_OF_Q_BUGS = [
    hopper("both groups' results pass through one place", "memory.q.index(W * (own.C.head_dim // own.C.chunk))",
           "memory.q.index(0)", (Race, MissingFence, *NUMBERS)),
    kernel("a chunk of columns is written over the first", "by_rows(o, place), column, 8)", "by_rows(o, place), 0, 8)",
           (DoubleWrite, *NUMBERS)),
    kernel("rows that are no queries are written", "GROUP, row < piece.queries * GROUP\n", "GROUP, row >= 0\n",
            (DoubleWrite, OutOfBounds, Race)),
]  # fmt: skip

UNDER_WAY_BUGS = [
    hopper("a copier waits for the step that it is to copy",
           "gl.maximum(position - C.under_way, 0), pred=position >= C.under_way", "position", (Deadlock,)),
    hopper("a copier waits for the first step before it asks for it", "pred=position >= C.under_way", "pred=position >= 0",
           (Deadlock,)),
]  # fmt: skip

TOLD_OF = """            again.broken.index(W).store(gl.full([1], 0, gl.int32, lanes(gl.num_warps())) + broken)
            mbarrier.arrive(again.told.index(0), count=1)
"""
AGAIN_BUGS = [
    again("results may be anything", " == 0.0)\n", " != 9.0)\n"),
    again("nothing is broken", "return gl.min(right.to(gl.int32), 0) == 0", "return gl.min(right.to(gl.int32), 0) > 1"),
    again("a group tells before it has written", TOLD_OF, swapped(TOLD_OF), (*TOO_EARLY, Deadlock)),
    again("what groups tell is not waited for", "            mbarrier.wait(again.told.index(0), 0)\n", "",
          (*TOO_EARLY, Deadlock)),
    again("the first group alone is asked", "gl.static_range(GROUPS)", "gl.static_range(1)", (*NUMBERS, Deadlock)),
    again("all pieces have one bit", "gl.minimum(number, LAST_BIT - 1)", "0 * number", (DoubleWrite, Race, *NUMBERS)),
    hopper("what is taken again is taken with hope", "plain = gl.where(hopeful, plain, 1)", "plain += 0 * steps"),
    hopper("both groups deliver again", "is_chosen(mine, number", "is_chosen(chosen, number", (DoubleWrite, Race, *NUMBERS)),
    hopper("pieces of K are not counted", "return (position, before), number + 1, chosen",
           "return (position, before), number, chosen", (Deadlock, BarrierMisuse, *NUMBERS)),
    hopper("a masked step is taken with hope", "elif C.optimistic and not MASKED:", "elif C.optimistic:"),
]  # fmt: skip

WRITTEN = """    for i in gl.static_range(NUMBERS):
        place = board.numbers.index(n % PIECES * NUMBERS + i)
        place.store(gl.full([1], 0, gl.int32, lanes(gl.num_warps())) + numbers[i])
"""
OF_PIECE = "    mbarrier.arrive(board.told.index(n % PIECES), count=1)\n"
BOARD_BUGS = [
    board("a piece is told of before it is written", WRITTEN + OF_PIECE, OF_PIECE + WRITTEN, (*TOO_EARLY, Deadlock)),
    board("a piece is not waited for", "    mbarrier.wait(board.told.index(n % PIECES), n // PIECES & 1)\n", "",
          (*TOO_EARLY, BarrierMisuse, Deadlock)),
    board("a piece is written over one that nobody has read",
          "    mbarrier.wait(board.heard.index(n % PIECES), n // PIECES & 1 ^ 1)\n", "", (Race, BarrierMisuse, Deadlock)),
    board("pieces that were told of are not counted", "        n += 1\n", "        n += 0\n",
          (Deadlock, BarrierMisuse, *TOO_EARLY)),
    hopper("one role less has to read a piece", "make_board(C.groups + max(C.converters, 1))", "make_board(C.groups)",
           (Race, BarrierMisuse, Deadlock)),
    hopper("nobody is told of the end", "            tell_of_the_end(memory.board, told)\n", "", (Deadlock, BarrierMisuse)),
    hopper("the end is not counted", "            told += 1\n", "            told += 0\n", (Deadlock, Race, BarrierMisuse)),
]  # fmt: skip

FILLED = "memory.v.acquire(position)\n        copy_rows"
TOLD = "position - LAG, start, 2 * LAG)\n        v_rows"
ONE_GROUP_BUGS = [
    hopper("a copy is not waited for", "    async_copy.wait_group(UNDER_WAY)\n", "", (*TOO_EARLY, Unfinished)),
    hopper("K is told a step too early", TOLD, TOLD.replace("LAG,", "LAG + 1,"),
           (*TOO_EARLY, Unfinished, Deadlock, BarrierMisuse)),
    hopper("the last V is told while it is being copied", "2 * (LAG - i) - 2", "2 * (LAG - i) - 1", (*TOO_EARLY, Unfinished)),
    hopper("what is copied has no fence", "(UNDER_WAY)\n    fence_async_shared()\n", "(UNDER_WAY)\n", (MissingFence,)),
    hopper("a step is told that is none", "pred=position >= start)", "pred=position >= start - 1)",
           (*TOO_EARLY, Unfinished, Deadlock, BarrierMisuse)),
    hopper("a place is filled that is not empty", FILLED, "copy_rows", (Race, BarrierMisuse, Deadlock)),
    hopper("what is no key is copied", "is_key(cached, piece, at, pages, C, KEYS)", "pages == pages", (*NUMBERS, OutOfBounds)),
    hopper("pages are those of the step before", "pages = look_up(cached, piece, at + C.tokens, C, KEYS)",
           "pages = look_up(cached, piece, at, C, KEYS)", (*NUMBERS, OutOfBounds)),
    hopper("rows of V are where those of K are", "copy_rows(memory.v.block(position), v_base, v_rows",
           "copy_rows(memory.v.block(position), v_base, k_rows", (*NUMBERS, OutOfBounds), head_dim_v=80),
    hopper("all panels are the first one", "gl.arange(c * WIDE, (c + 1) * WIDE, ", "gl.arange(0, WIDE, ", head_dim=160,
           head_dim_v=160),
]  # fmt: skip
WAITED = "    memory.bytes.wait(position)\n"
CONVERTED_BUGS = [
    converted("bytes are not waited for", WAITED, "", (*TOO_EARLY, Unfinished)),
    converted("fewer bytes are expected than come", "C.tokens * (C.head_dim + C.head_dim_v)", "C.tokens * C.head_dim",
              (*TOO_EARLY, BarrierMisuse, Unfinished)),
    converted("what is converted has no fence", "    fence_async_shared()\n", "", (MissingFence,)),
    converted("a place is filled that is not empty", "full, place = channel.acquire(position)",
              "full, place = channel.full.index(channel.slot(position))", (Race, BarrierMisuse, Deadlock)),
    converted("bytes are copied over others that are yet to be converted", "bytes.acquire(position)",
              "bytes.full.index(bytes.slot(position))", (*TOO_EARLY, *NUMBERS, BarrierMisuse, Deadlock, Unfinished)),
    converted("bytes are given back before they are loaded", WAITED, WAITED + "    memory.bytes.release(position)\n",
              (*TOO_EARLY, BarrierMisuse, Deadlock)),
    hopper("Q is copied over rows that are yet to be read", TURN_OF_Q, "memory.turns.full.index(0)",
           (*TOO_EARLY, *NUMBERS, BarrierMisuse, Deadlock)),
    converted("values that are no key's stay", "v, True, piece", "v, False, piece"),
    converted("pieces are taken again though they were not chosen", "job, K.C):\n        first,",
              "job, K.C) | True:\n        first,", (*NUMBERS, Deadlock, BarrierMisuse, Race)),
]  # fmt: skip
MANY_ROWS = {
    "head_dim": 128,
    "head_dim_v": 128,
    "group": 8,
    "heads_kv": 1,
    "n_q": 13,
    "batch": 4,
    "lengths": [120] * 4,
    "room": 128,
}
ONE_GROUP = {"head_dim": 128, "head_dim_v": 128, "group": 8, "heads_kv": 1, "room": 520, "lengths": [510, 1, 0, 330]}

NEXT_PART, NEXT_SPLIT = "            part = none\n", "        acc, sums = no_output(C), own_sums\n    else:\n"


def splits(what, text, becomes, errors=NUMBERS) -> Bug:
    return Bug(what, "strobe.kernels.decode.splits", text, becomes, errors)


SPLIT_BUGS = [
    hopper("a split goes on where the one before ended", "gl.where(at % C.split == 0, none[1], top)", "top"),
    hopper("a split begins a step late", "at % C.split == 0:", "at % C.split == C.tokens:"),
    hopper("what was found of a split is found of the next one, too", NEXT_SPLIT,
           NEXT_SPLIT.replace("acc, sums = no_output(C),", "sums =")),
    hopper("the sums of a split are those of the next one, too", NEXT_SPLIT,
           NEXT_SPLIT.replace("own_sums", "next_sums + sums")),
    hopper("a part goes on where the one before ended", NEXT_PART, "            pass\n"),
    hopper("the last split is left out", "acc, top, total = added_split(taken_up(W, memory, part, acc, C), acc, top, sums)\n",
           "acc, top, total = taken_up(W, memory, part, acc, C)\n", (*NUMBERS, *TOO_EARLY)),
    splits("splits of whose chain others have the first are added up", "(end <= chain.settled) | ", "", (*NUMBERS, *TOO_EARLY)),
    splits("a chain does not end", " | (end % C.chain == 0)", "", (*NUMBERS, *TOO_EARLY)),
    splits("no chain has a part of several splits", "(first < gl.minimum(beyond, end)).to(gl.int32)", "0 * first",
           (*NUMBERS, *TOO_EARLY)),
    splits("a CTA has a split more of a chain", "+ 1) * job.stretch - chain.line\n", "+ 1) * job.stretch - chain.line + 1\n"),
    splits("a split of others is left out", "gl.maximum(end - single, 0)", "gl.maximum(end - single - 1, 0)"),
    splits("the other chain begins where the first one does", "parts_of_chain(job, middle, chain.end)",
           "parts_of_chain(job, middle + 1, chain.end)"),
    splits("splits have one place", "of_others = chain.line + split - team * stretch", "of_others = 0 * split",
           (DoubleWrite, *NUMBERS, *TOO_EARLY, Race)),
    splits("chains have one place", "(split // PER_CHAIN - chain.job_begin // PER_CHAIN)", "0 * split",
           (DoubleWrite, *NUMBERS, *TOO_EARLY)),
    kernel("chains are added up as one", "if (i + k == 0) | (i + k == own.of_first):", "if i + k == 0:"),
    kernel("the other chain is left out", "if own.number > own.of_first:", "if own.number < 0:"),
    kernel("the first of two whole chains is left out", "    if piece.begin < begins:\n", "    if piece.begin < 0:\n"),
]  # fmt: skip

FAR_SPLIT_BUGS = [
    hopper("a reference moves with every maximum", "most > top + reach_of(dtype)", "most > top"),
    hopper("a reference never moves", "most > top + reach_of(dtype)", "most == most + 1.0"),
    hopper("no split is broken", ">= 2.0 ** reach_of(memory.dtype)", ">= 2.0 ** 100"),
    hopper("the last split alone may be broken", "return gl.maximum(worst, gl.where",
           "return gl.maximum(0.0 * total, gl.where"),
    hopper("who is not to deliver leaves parts", "            if leaves:\n", "            if at > 0:\n", (Race, DoubleWrite)),
    hopper("both groups' sums wait at one place", "memory.sums.index(W * len(o) + c).store", "memory.sums.index(c).store",
           (*TOO_EARLY, *NUMBERS)),
    splits("a whole job's first chain is where a part is", "    if own_places(C):\n", "    if job.parts == 0:\n",
           (*NUMBERS, *TOO_EARLY, DoubleWrite)),
]  # fmt: skip

CHOSEN = "    if is_chosen(chosen, number, job, K.C):\n        position = copy_keys"
COPIED_AGAIN = "            copy_pieces(memory, K, position, chosen)\n"
ROWS_AGAIN_BUGS = [
    hopper("what is taken again is not copied again", COPIED_AGAIN, "            pass\n", (Deadlock,)),
    hopper("the first steps of all are told once more", "(start, start, 0 * chosen", "(start, 0 * start, 0 * chosen",
           (*TOO_EARLY, BarrierMisuse, Deadlock)),
    hopper("pieces that are copied are not counted", "return position, start, number + 1, chosen",
           "return position, start, number, chosen", (Deadlock, BarrierMisuse, *NUMBERS)),
    hopper("all pieces are copied again", CHOSEN, CHOSEN.replace(":", " | True:"),
           (Deadlock, BarrierMisuse, Unfinished, *NUMBERS)),
]  # fmt: skip

AFTER_LEFT = """        acc = warpgroup_mma_wait(0, deps=[acc])
        partition_barrier()  # everybody has read the step before
        fill(walk, odd_page, n + 1, 1, 0)
"""
AFTER_RIGHT = """        acc = warpgroup_mma_wait(1, deps=[acc])
        partition_barrier()  # everybody has read the step before
        fill(walk, even_page, n + 1, 0, 1)
"""


def fill_first_of(lines: str) -> str:
    """What fills a place ahead of what waits until it has been read."""
    wait, barrier, *fills = lines.splitlines(keepends=True)
    return "".join([*fills, wait, barrier])


TURNS_BUGS = [
    turns("half of K is not waited for", "    mbarrier.wait(memory.full[3 * ODDS].index(0), turn & 1)\n", "", TOO_EARLY),
    turns("the rest of K is not waited for", "    mbarrier.wait(memory.full[1 + ODDS].index(0), turn & 1)\n", "", TOO_EARLY),
    turns("half of K of the turn before", "full[3 * ODDS].index(0), turn & 1", "full[3 * ODDS].index(0), (turn + 1) & 1",
          (*TOO_EARLY, Deadlock)),
    turns("the rest of K of the turn before", "full[1 + ODDS].index(0), turn & 1", "full[1 + ODDS].index(0), (turn + 1) & 1",
          (*TOO_EARLY, Deadlock)),
    turns("half of the bytes are expected", "C.tokens * COLUMNS * 2", "C.tokens * COLUMNS",
          (BarrierMisuse, Deadlock, *TOO_EARLY)),
    turns("P is not waited for", "    meet(EVEN + 1 - W)\n", "", (*TOO_EARLY, Deadlock, BarrierMisuse, MissingFence)),
    turns("P has no fence", "store(top)\n    fence_async_shared()\n", "store(top)\n", (MissingFence,)),
    turns("P is told of before it is there", "    memory.narrow[W].index(0).store(p)\n",
          "    announce(EVEN + W)\n    memory.narrow[W].index(0).store(p)\n",
          (*TOO_EARLY, Deadlock, BarrierMisuse, MissingFence)),
    turns("P lies where the other one's does", "memory.narrow[W].index(0).store(p)", "memory.narrow[1 - W].index(0).store(p)",
          (*TOO_EARLY, MissingFence, *NUMBERS)),
    turns("the maxima of the own step", "memory.tops.index(1 - W)", "memory.tops.index(W)", (*TOO_EARLY, *NUMBERS)),
    turns("O does not follow the other one's maxima", "return rescaled((acc,), factor, C)[0], new_top", "return acc, new_top"),
    turns("the sums do not follow the other one's maxima", "new_top, scaled_sums(sums, factor)\n", "new_top, sums\n"),
    turns("the sums do not follow the own maxima", "scaled_sums(sums, factor) + lane_sums(wide)", "sums + lane_sums(wide)"),
    turns("the left O does not follow its own maxima", "walk, rescaled((acc,), factor, C)[0], p, 0)", "walk, acc, p, 0)"),
    turns("the right O does not follow its own maxima", "walk, rescaled((acc,), factor, C)[0], p, 1)", "walk, acc, p, 1)"),
    turns("the left group fills what it still reads", AFTER_LEFT, fill_first_of(AFTER_LEFT), (Race, BarrierMisuse)),
    turns("the right group fills what it still reads", AFTER_RIGHT, fill_first_of(AFTER_RIGHT), (Race, BarrierMisuse)),
    turns("O of the own step is not waited for", "warpgroup_mma_wait(0, deps=[start_output(walk, acc, gl.",
          "warpgroup_mma_wait(1, deps=[start_output(walk, acc, gl.", (Unfinished, Race)),
    turns("S is used too early", "s = warpgroup_mma_wait(1, deps=[s])", "s = warpgroup_mma_wait(2, deps=[s])",
          (Unfinished, Race)),
    turns("the right S is used too early", "warpgroup_mma_wait(0, deps=[start_other_scores(memory, s, odds + i, 1)])",
          "warpgroup_mma_wait(1, deps=[start_other_scores(memory, s, odds + i, 1)])", (Unfinished, Race)),
    turns("a step too few is filled", "go = step < walk.steps", "go = step < walk.steps - 1",
          (Deadlock, *TOO_EARLY, BarrierMisuse)),
    turns("the page of another step", "odd_page, page = page, page_of(walk, n + 1)", "odd_page, page = page, page_of(walk, n)"),
    turns("columns of another part", "PART * C.chunk], barrier", "0 * C.chunk], barrier"),
    turns("the narrow part is not copied", "    if W != ODDS:\n        copy_part(", "    if W == 2:\n        copy_part(",
          (Deadlock, *TOO_EARLY)),
    turns("Q is not waited for", "    async_copy.wait_group(0)\n", "", (Unfinished, *TOO_EARLY)),
    turns("Q has no fence", "wait_group(0)\n    fence_async_shared()\n", "wait_group(0)\n", (MissingFence,)),
    turns("the same half of Q twice", "piece, W * C.chunk, C, K.GROUP", "piece, 0 * C.chunk, C, K.GROUP"),
    hopper("queries of the first tile", "        row += piece.first_row\n", ""),
    hopper("queries of the first tile, of one query", "piece.head * GROUP + piece.first_row % GROUP", "piece.head * GROUP",
          heads=128),
    hopper("rows of other requests", "row < piece.queries * GROUP, 1)", "row < 2 * piece.queries * GROUP, 1)", (OutOfBounds,)),
    turns("Q is not met for", "    fence_async_shared()\n    rendezvous(MET, W)\n", "    fence_async_shared()\n",
          (*TOO_EARLY, MissingFence, Deadlock, BarrierMisuse)),
    turns("values beyond the end stay", "        if has_others(walk.piece, at, K.C):\n", "        if at < walk.first:\n"),
    turns("one half's values beyond the end stay", "for half in tl.range(2):", "for half in tl.range(1):"),
    turns("a page that is none is seen", "hole = ~is_page(K.cached, page)", "hole = page < page", honest=False),
    turns("the left group looks at the page of another step", "n, own, scale, sign, top, sums, 0)",
          "n, page, scale, sign, top, sums, 0)", honest=False),
    turns("the right group looks at the page of another step", "n, own, scale, sign, top, sums, 1)",
          "n, page, scale, sign, top, sums, 1)", honest=False),
    turns("products have the other sign", "    if sign < 1.0:\n", "    if sign < -1.0:\n", scale=-0.1),
    turns("a piece is told of before it is on the board", "memory.board.index(i).store",
          "announce(TOLD) if i == 0 else None\n        memory.board.index(i).store", (*TOO_EARLY, Deadlock, BarrierMisuse)),
    turns("a piece is not waited for", "    meet(TOLD)\n", "", (*TOO_EARLY, Deadlock, BarrierMisuse)),
    turns("nobody tells of the end", "    tell_of_the_end(memory)\n", "", (Deadlock,)),
    turns("the last odd step is left out", "if walk.steps == 2 * mine:", "if walk.steps == 2 * mine + 1:",
          (*NUMBERS, Deadlock, *TOO_EARLY, BarrierMisuse)),
    turns("steps are not counted from piece to piece", "= walk_right(walk, odds)", "= walk_right(walk, odds * 0)",
          (*TOO_EARLY, Deadlock, BarrierMisuse), ctas=2),
    turns("the sums of one group", "total += memory.sums.index(1 - W)", "total += memory.sums.index(W)"),
    turns("the sums are not met for", "store(total)\n    rendezvous(MET, W)\n", "store(total)\n",
          (*TOO_EARLY, Deadlock, BarrierMisuse)),
    turns("both halves at one place", "o.out + W * K.DIM_V", "o.out + 0 * K.DIM_V", (DoubleWrite, Race)),
    turns("both groups count one job's arrivals", "o.arrivals + W * 2 * jobs", "o.arrivals",
          (Race, DoubleWrite, *NUMBERS, Deadlock)),
    turns("parts of both halves at one place", "o.parts + W * places", "o.parts + 0 * places", (DoubleWrite, Race)),
    schedule("those abreast have one place for their parts", ") * C.team + gl.program_id(0) % C.team",
             ") * C.team", (DoubleWrite, Race)),
    kernel("those abreast have one tile", "own_tiles) * C.abreast + member % C.abreast",
           "own_tiles) * C.abreast", (DoubleWrite, Race, *NUMBERS)),
    kernel("few rows of few parts are merged", "merge_rows(K, piece, job, turn * size, rows, K.C.merged_of_few)",
           "merge_rows(K, piece, job, turn * size, rows, K.C.merged_rows)"),
]  # fmt: skip


CLUSTER = {
    "batch": 1, "lengths": [1900], "room": 2000, "n_q": 1, "group": 4, "head_dim": 128, "head_dim_v": 128, "mask": None,
}  # fmt: skip
BEGIN = "        begin_cluster(C.cluster, ROWS, C.head_dim_v, C.posts)\n"
CLUSTER_BUGS = [
    kernel("nobody says that it has begun", BEGIN, "        pass\n", (Race,)),
    kernel("the steps of the next CTA", "(begin // C.tokens + rank)", "(begin // C.tokens + rank + 1)"),
    kernel("steps that lie side by side are copied", "ahead: gl.constexpr = (C.stages - 1) * C.stride",
           "ahead: gl.constexpr = (C.stages - 1) * C.tokens"),
    kernel("values of the first step are copied before its end is known",
           "copy_values(rings, i, cached, piece,", "copy_values(rings, i, cached, asked,", lengths=[1000]),
    kernel("pages are asked for beyond the room", "length, begin, requests.capacity)",
           "length, begin, requests.capacity + 4096)", (OutOfBounds, IllegalOperation)),
    kernel("the steps of all begin in the window", "begin = gl.maximum(begin, origin)", "origin = gl.maximum(begin, origin)",
           mask=strobe.Window(700, 0)),
    kernel("scores look at the pages of the step before", "s_pages, look_up(cached, piece, first + C.stride,",
           "s_pages, look_up(cached, piece, first,", honest=False, ctas=8, page=64, lengths=[768]),
    kernel("parts are not weighed", "gl.sum(total_of * weight_of, 0)", "gl.sum(total_of, 0)"),
    kernel("nothing minus nothing", "top_of - gl.expand_dims(finite(top), 0)", "top_of - gl.expand_dims(top, 0)", lengths=[0]),
    kernel("both halves of a row at one place", "column += rank * SHARE % COLUMNS", "column += 0 * rank",
           (DoubleWrite, Race, *NUMBERS)),
    kernel("rows of the next share", "K.outputs, rank * SHARE // COLUMNS,", "K.outputs, rank * SHARE // COLUMNS + 1,",
           (DoubleWrite, Race, *NUMBERS)),
    kernel("both halves write the LSE", "mask=there & (column == 0))", "mask=there & (gl.abs(column - 32) == 32))",
           (DoubleWrite, Race)),
]  # fmt: skip


SPLITS_OF_CLUSTER = {"shares": 8, "stages": 2, "split": 128, "chain": 512, "posts": True}


def split_cluster(what, text, becomes, errors=NUMBERS, **case) -> Bug:
    return Bug(what, CLUSTERS, text, becomes, errors, case)


SPLIT_CLUSTER_BUGS = [
    split_cluster("nobody says that it has begun", "    begin_cluster(C.cluster, ROWS, C.head_dim_v, C.posts, True)\n", "",
                  (Race,)),
    split_cluster("the split of the next CTA", "(begin // C.split + rank)", "(begin // C.split + rank + 1)"),
    split_cluster("values of the first step are copied before its end is known", "v_base, cached, piece,",
                  "v_base, cached, asked,",
                  lengths=[520]),
    split_cluster("a step is read too early", "2 * STEPS - 1 - i", "2 * STEPS - i", (*TOO_EARLY, Unfinished)),
    split_cluster("values are read too early", "    wait_for_copies(0)\n", "    wait_for_copies(1)\n",
                  (*TOO_EARLY, Unfinished)),
    split_cluster("what is copied has no fence", "    fence_async_shared()\n", "", (MissingFence,)),
    split_cluster("O is not rescaled", "rescaled(acc, factors[i], C)", "acc"),
    kernel("chains of a cluster are added up as one", "            before, chain = chain, none\n", "            pass\n"),
    kernel("the first chain of a cluster is left out", "return added_numbers(*before, *chain)", "return chain"),
    kernel("all rows of a share are its first one", "row + column // COLUMNS, column % COLUMNS", "row, column % COLUMNS",
           (DoubleWrite, Race, *NUMBERS)),
]  # fmt: skip


SEVERAL = {"batch": 2, "lengths": [600, 300]}
EVENLY = {"shares": 12, "clustered": False, "stages": 3}
EVENLY_BUGS = [
    kernel("more parts than CTAs are waited for", "gl.minimum(units_of(begin, end, C), C.shares)", "units_of(begin, end, C)",
           lengths=[1900]),
    kernel("those without keys deliver, too", "if C.clustered or rank < parts:", "if C.clustered or rank >= 0:",
           (DoubleWrite, Race, *NUMBERS)),
    kernel("parts of all key heads at one place", "2 * (of_job + rank), 0", "2 * rank, 0", (DoubleWrite, Race, *NUMBERS)),
    kernel("a part at the place behind its own", "2 * (of_job + rank), 0", "2 * (of_job + rank) + 1, 0"),
    kernel("parts of all requests at one place", "number = batch * K.heads_kv + head", "number = head",
           (DoubleWrite, Race, Deadlock, *NUMBERS), **SEVERAL),
    kernel("the length of the first request", "keys_of(requests, batch, batch < requests.batch,",
           "keys_of(requests, first, batch < requests.batch,", **SEVERAL),
    kernel("the entry of the first request", "entry = batch\n", "entry = first\n", page=None, **SEVERAL),
    kernel("the pages of the first request", "asked = Piece(batch, entry,", "asked = Piece(first, entry,", **SEVERAL),
    kernel("the rows of the first request", "piece = Piece(batch, entry, head,", "piece = Piece(first, entry, head,",
           (DoubleWrite, Race, *NUMBERS), **SEVERAL),
]  # fmt: skip


def broken(bug: Bug, entry: str, folder: Path) -> ModuleType:
    """A kernel's module, over all that it imports, with a mistake in it or in one of them."""
    line = [*SHARED, EIGHT_BITS, FORWARD] if entry == FORWARD else [*SHARED, *OF_HOPPER]
    line += [CLUSTERS] if entry == CLUSTERS else []
    return altered_over(line[line.index(bug.module) :], ((bug.text, bug.becomes),), folder)


CASE = {
    "head_dim": 64, "head_dim_v": 64, "group": 2, "heads_kv": 2, "batch": 4, "n_q": 3, "page": 16, "room": 257, "ragged": False,
    "tree": False, "leftpad": False, "mask": strobe.Causal(), "softcap": 0.0, "alibi": False, "sinks": False,
    "lengths": [250, 1, 0, 130],
}  # fmt: skip


USUAL = {"tokens": 64, "stages": 2, "start": 0, "by_turns": False}
"""The config of a case that does not name another."""


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, tmp_path):
    case = {**CASE, **bug.case}
    honest, lie = case.pop("honest", True), case.pop("lie", False)
    config = {name: case.pop(name, usual) for name, usual in USUAL.items()}
    call = draw(1, torch.float16, honest, **case)
    if lie:
        lengths = torch.tensor([10**6, 1, -9, 130], dtype=torch.int32)
        call = call._replace(cache=strobe.Cache(**{**vars(call.cache), "lengths": lengths}))
    module = broken(bug, FORWARD, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, ctas=7, order=order, seed=number, kernel=module, launches=bug.launches, **config)


def poison_ahead(cache):
    """NaN ahead of the leftpad of a contiguous cache."""
    for b, pad in enumerate(cache.leftpad.tolist()):
        entry = b if cache.index is None else int(cache.index[b])
        cache.k[entry, :pad] = cache.v[entry, :pad] = torch.nan


def of_8_bits(call):
    """The call over its cache in e4m3."""
    k, v = (x.to(torch.float8_e4m3fn) for x in (call.cache.k, call.cache.v))
    return call._replace(cache=strobe.Cache(**{**vars(call.cache), "k": k, "v": v}))


@pytest.mark.parametrize("bug", EIGHT_BITS_BUGS, ids=str)
def test_it_is_found_over_a_cache_of_8_bits(bug, tmp_path):
    case = {**CASE, **bug.case}
    call = draw(1, torch.float16, case.pop("honest", True), **case)
    if case["leftpad"]:
        poison_ahead(call.cache)
    call, module = of_8_bits(call), broken(bug, FORWARD, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, ctas=7, order=order, seed=number, kernel=module, tokens=64, stages=2)


@pytest.mark.parametrize("bug", HOPPER_BUGS, ids=str)
def test_it_is_found_with_wgmma(bug, tmp_path):
    case = {**CASE, **bug.case}
    honest, of_latent = case.pop("honest", True), case.pop("latent", False)
    call = latent(48) if of_latent else draw(1, torch.float16, honest, **case)
    if case["leftpad"] and case["page"] is None:
        poison_ahead(call.cache)
    module = broken(bug, HOPPER, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, ctas=2 if of_latent else 5, order=order, seed=number, kernel=module, choose=of_wgmma, stages=2)


@pytest.mark.parametrize("bug", BY_WAY_OF_Q_BUGS, ids=str)
def test_it_is_found_where_results_pass_through_the_place_of_q(bug, tmp_path):
    call, module = draw(1, torch.float16, **{**CASE, **MANY_ROWS}), broken(bug, HOPPER, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, ctas=4, order=order, seed=number, kernel=module, choose=of_wgmma, stages=2, groups=2, **BY_WAY_OF_Q,
                **TWO_CHUNKS)  # fmt: skip


@pytest.mark.parametrize("bug", UNDER_WAY_BUGS, ids=str)
def test_it_is_found_where_few_steps_are_under_way(bug, tmp_path):
    call, module = draw(1, torch.float16, **{**CASE, **MANY_ROWS}), broken(bug, HOPPER, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, ctas=4, order=order, seed=number, kernel=module, choose=of_wgmma, stages=2, groups=2, under_way=1)


@pytest.mark.parametrize("bug", ASKED_Q_BUGS, ids=str)
def test_it_is_found_where_the_copier_asks_for_q(bug, tmp_path):
    call, module = queries_below_zero(), broken(bug, HOPPER, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, ctas=3, order=order, seed=number, kernel=module, choose=of_wgmma, stages=4, **ASKED_Q,
                **TWO_CHUNKS)  # fmt: skip


@pytest.mark.parametrize("bug", Q_IN_TURN_BUGS, ids=str)
def test_it_is_found_where_q_comes_in_turn(bug, tmp_path):
    call, module = wide_queries_below_zero(), broken(bug, HOPPER, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, ctas=3, order=order, seed=number, kernel=module, choose=wide_heads.of_wgmma, **two_groups(call, 32))


@pytest.mark.parametrize("bug", PANELS_BUGS, ids=str)
def test_it_is_found_with_three_panels(bug, tmp_path):
    """Of one job that is cut in parts, which all of its CTAs merge."""
    case = {**CASE, "batch": 1, "lengths": [500], "room": 512, "n_q": 8, "group": 8, "heads_kv": 1, "page": 64, "head_dim": 160,
            "head_dim_v": 160}  # fmt: skip
    call, module = draw(1, torch.float16, **case), broken(bug, HOPPER, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, ctas=6, order=order, seed=number, kernel=module, choose=wide_heads.of_wgmma, asks_q=False, absent=0)


@pytest.mark.parametrize("bug", JOINED_BUGS, ids=str)
def test_it_is_found_where_parts_are_joined(bug, tmp_path):
    call, module = of_unequal_lengths(), broken(bug, HOPPER, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, ctas=7, order=order, seed=number, launches=2, kernel=module, choose=of_wgmma, joins=True, **ASKED_Q)


@pytest.mark.parametrize("bug", ABREAST_BUGS, ids=str)
def test_it_is_found_where_key_heads_are_abreast(bug, tmp_path):
    """Of jobs in two parts, which the last to come adds up, and of more, which are merged."""
    call, module = of_unequal_lengths(heads_kv=2), broken(bug, HOPPER, tmp_path)
    asked = {**ASKED_Q, "kernel": module, "choose": of_wgmma, "heads_abreast": 2, "joins": True, "launches": 2}
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            for ctas in (4, 14):
                run(call, ctas=ctas, order=order, seed=number, **asked)


@pytest.mark.parametrize("bug", TILES_ABREAST_BUGS, ids=str)
def test_it_is_found_where_tiles_and_key_heads_are_abreast(bug, tmp_path):
    module = broken(bug, HOPPER, tmp_path)
    asked = {"kernel": module, "choose": of_wgmma, "groups": 2, "abreast": 2, "heads_abreast": 2}
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(of_two_tiles(), ctas=8, order=order, seed=number, **asked)


@pytest.mark.parametrize("bug", FEW_JOBS_BUGS, ids=str)
def test_it_is_found_where_columns_are_merged(bug, tmp_path):
    module = broken(bug, HOPPER, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(one_job(), ctas=20, order=order, seed=number, kernel=module, choose=of_wgmma, **FEW_JOBS)


@pytest.mark.parametrize("bug", [*AGAIN_BUGS, *BOARD_BUGS], ids=str)
def test_it_is_found_where_pieces_are_taken_again(bug, tmp_path):
    call, module = far_scores(torch.float16, 64), broken(bug, HOPPER, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, ctas=2, order=order, seed=number, kernel=module, choose=of_wgmma, stages=2, groups=2, **OPTIMISTIC)


@pytest.mark.parametrize("bug", SPLIT_BUGS, ids=str)
def test_it_is_found_with_splits(bug, tmp_path):
    """By the numbers, or as bits depend on how many CTAs there are."""
    call, module = draw(21, torch.bfloat16, n_q=4, deterministic=True, **FIXED), broken(bug, HOPPER, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            one, *others = (
                run(call, ctas=ctas, order=order, seed=number, kernel=module, choose=of_one_group, **CUT)
                for ctas in (1, 2, 3, 20)
            )
            assert all(torch.equal(x, y) for other in others for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("bug", FAR_SPLIT_BUGS, ids=str)
def test_it_is_found_where_scores_of_splits_leave_the_range(bug, tmp_path):
    """By the numbers, or as bits depend on whether the optimistic softmax was tried."""
    call, module = far_scores(torch.float16, 64, deterministic=True), broken(bug, HOPPER, tmp_path)
    usual = run(call, ctas=1, choose=of_one_group, stages=4, **FAR_CUT)
    config = {"choose": of_wgmma, "groups": 2, "stages": 2, **OPTIMISTIC, **FAR_CUT}
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            for ctas in (1, 2, 3, 5):
                found = run(call, ctas=ctas, order=order, seed=number, kernel=module, **config)
                assert all(torch.equal(x, y) for x, y in zip(usual, found, strict=True))


@pytest.mark.parametrize("bug", ROWS_AGAIN_BUGS, ids=str)
def test_it_is_found_where_rows_are_copied_again(bug, tmp_path):
    call, module = far_scores(torch.float16, 64, deterministic=True), broken(bug, HOPPER, tmp_path)
    config = {"choose": of_one_group, "stages": 3, **OPTIMISTIC, **FAR_CUT}
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, ctas=2, order=order, seed=number, kernel=module, **config)


@pytest.mark.parametrize("bug", ONE_GROUP_BUGS, ids=str)
def test_it_is_found_with_one_group(bug, tmp_path):
    call = draw(1, torch.float16, **{**CASE, **ONE_GROUP, **bug.case})
    module = broken(bug, HOPPER, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, ctas=3, order=order, seed=number, kernel=module, choose=of_one_group, stages=4)


@pytest.mark.parametrize("bug", CONVERTED_BUGS, ids=str)
def test_it_is_found_where_keys_are_converted(bug, tmp_path):
    call, module = with_8_bits(far_scores(torch.float16, 64)), broken(bug, HOPPER, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, ctas=2, order=order, seed=number, kernel=module, choose=of_converted, optimistic=True, stages=2,
                bytes_stages=3)  # fmt: skip


@pytest.mark.parametrize("bug", TURNS_BUGS, ids=str)
def test_it_is_found_with_two_groups(bug, tmp_path):
    case = {"heads": 80, "honest": True, "scale": 0.1, "ctas": 4, **bug.case}
    call, module = long_latent(case["heads"], case["honest"], case["scale"]), broken(bug, HOPPER, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, ctas=case["ctas"], order=order, seed=number, kernel=module, choose=of_wgmma)


@pytest.mark.parametrize("bug", CLUSTER_BUGS, ids=str)
def test_it_is_found_in_a_cluster(bug, tmp_path):
    case = {**CASE, **CLUSTER, **bug.case}
    ctas, honest = case.pop("ctas", 16), case.pop("honest", True)
    call, module = draw(1, torch.float16, honest, **case), broken(bug, FORWARD, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, order=order, seed=number, kernel=module, choose=of_shares, shares=ctas)


@pytest.mark.parametrize("bug", SPLIT_CLUSTER_BUGS, ids=str)
def test_it_is_found_in_a_cluster_of_splits(bug, tmp_path):
    """By the numbers, or as bits are not those of one group."""
    case = {**CASE, "batch": 1, "lengths": [880], "room": 1000, "n_q": 4, "group": 8, "heads_kv": 1, "page": 64,
            "head_dim": 128, "head_dim_v": 128, **bug.case}  # fmt: skip
    call, module = draw(1, torch.float16, deterministic=True, **case), broken(bug, CLUSTERS, tmp_path)
    usual = run(call, ctas=3, choose=of_one_group, stages=4, split=128, chain=512)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            found = run(call, order=order, seed=number, kernel=module, choose=of_split_clusters, **SPLITS_OF_CLUSTER)
            assert all(torch.equal(x, y) for x, y in zip(usual, found, strict=True))


@pytest.mark.parametrize("bug", EVENLY_BUGS, ids=str)
def test_it_is_found_where_a_key_head_is_shared(bug, tmp_path):
    call, module = draw(1, torch.float16, **{**CASE, **CLUSTER, "lengths": [600], **bug.case}), broken(bug, FORWARD, tmp_path)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            run(call, order=order, seed=number, kernel=module, launches=2, choose=of_shares, **EVENLY)


def test_no_false_alarm():
    for number, order in enumerate(ORDERS):
        run(draw(1, torch.float16, **CASE), ctas=7, order=order, seed=number, launches=2, tokens=64, stages=2)
        run(of_8_bits(draw(1, torch.float16, **CASE)), ctas=7, order=order, seed=number, tokens=64, stages=2)
        run(draw(1, torch.float16, **CASE), ctas=5, order=order, seed=number, launches=2, choose=of_wgmma, stages=2)
        run(draw(1, torch.float16, **{**CASE, **MANY_ROWS}), ctas=4, order=order, seed=number, choose=of_wgmma, stages=2,
            groups=2, **BY_WAY_OF_Q)  # fmt: skip
        run(far_scores(torch.float16, 64), ctas=2, order=order, seed=number, choose=of_wgmma, stages=2, groups=2, **OPTIMISTIC)
        run(far_scores(torch.float16, 64, deterministic=True), ctas=2, order=order, seed=number, choose=of_one_group, stages=3,
            **OPTIMISTIC, **FAR_CUT)  # fmt: skip
        run(latent(48), ctas=2, order=order, seed=number, choose=of_wgmma, stages=2)
        run(long_latent(80), ctas=4, order=order, seed=number, launches=2, choose=of_wgmma)
        run(long_latent(128, False, -0.1), ctas=4, order=order, seed=number, choose=of_wgmma)
        run(draw(1, torch.float16, **{**CASE, **ONE_GROUP}), ctas=3, order=order, seed=number, choose=of_one_group, stages=4)
        run(draw(1, torch.float16, **{**CASE, **CLUSTER}), order=order, seed=number, launches=2, choose=of_shares)
        run(draw(1, torch.float16, **{**CASE, **CLUSTER, "lengths": [600]}), order=order, seed=number, launches=2,
            choose=of_shares, **EVENLY)  # fmt: skip
