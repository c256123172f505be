"""Mistakes made in the Hopper forward over a cache, and in what decode kernels serve around it, one at a time: the simulator
finds each in every order."""

from dataclasses import dataclass, field

import pytest
import torch
from broken import altered_over
from cache_launch import run
from requests_at_random import draw
from test_broken_decode import FORWARD as DECODE
from test_broken_decode import HOPPER, OF_HOPPER, SCHEDULE, SHARED
from test_broken_hopper import COUNTED
from test_prefill_kernel import PLAIN

import strobe
from strobe.sim import BarrierMisuse, Deadlock, OutOfBounds, Race, Unfinished, Uninitialised, Unsupported

ORDERS = ("in_order", "random", "late", "early")
FORWARD, PAGES, QUEUE = (f"strobe.kernels.sm90.{name}" for name in ("forward", "pages", "tile_queue"))
NOTES, KEYS = "strobe.kernels.decode.notes", "strobe.kernels.common.groups"
HELPS = {
    KEYS: [KEYS, FORWARD],
    PAGES: [PAGES, FORWARD],
    QUEUE: [QUEUE, FORWARD],
    NOTES: [NOTES, *SHARED, DECODE],
    SCHEDULE: [*SHARED, *OF_HOPPER],
}
"""A module, and those over it up to a kernel's."""
WRONG = (AssertionError,)
UNFINISHED = (BarrierMisuse, Deadlock, Race, Uninitialised)
ROLES = {HOPPER: "few", FORWARD: "forward", DECODE: "noted"}
"""Which launch a module is for: see `run`."""


@dataclass(frozen=True)
class Bug:
    """`text` of a module becomes `becomes`, and the simulation of a case raises one of `errors`. redone: whether blocks are to
    be computed again there."""

    what: str
    module: str
    text: str
    becomes: str
    errors: tuple[type[BaseException], ...] = WRONG
    case: dict = field(default_factory=dict)
    redone: bool = False

    def __str__(self) -> str:
        return self.what


def lost(what, module, text, becomes, errors=WRONG) -> Bug:
    """A mistake with notes, which are there as a page is not."""
    return Bug(what, module, text, becomes, errors, {"honest": False}, True)


MIXED = {"ragged": True, "n_q": 40}
MANY_PROMPTS = {**MIXED, "batch": 6, "lengths": [100] * 6}
GROUPED = {"head_dim": 128, "head_dim_v": 128}
PANELS = {"head_dim": 192, "head_dim_v": 128}

BUGS = [
    Bug("pages beyond the table are looked up", PAGES, "exists = (lane < BOXES) & (key < n)", "exists = lane < BOXES",
        (OutOfBounds,), {"lengths": [60, 70], "room": 70}),
    lost("page numbers are not checked", PAGES, "there = exists & (page >= 0) & (page < pages.number)", "there = exists",
         (OutOfBounds, AssertionError)),
    lost("nobody notices that a page is missing", PAGES, "(exists & ~there)", "(exists & there & ~there)"),
    Bug("the second rows of a tile are not noted", PAGES, "gl.static_range(GROUPS)", "gl.static_range(1)",
        case={"honest": False, "group": 1, "n_q": 100}, redone=True),
    Bug("a tile has one head twice", QUEUE, "head * C.tile_heads + w", "head * C.tile_heads + 0 * w", (Race, AssertionError)),
    Bug("the heads of a tile have rows of their own", QUEUE, "return 0 if C.tile_heads > 1 else w", "return w"),
    Bug("the note of a tile's second head is the first one's next", QUEUE, "return w * ((K.lengths.n_q + ROWS - 1) // ROWS)",
        "return w", case={"late": True}, redone=True),
    lost("nobody hears of the notes", PAGES, "        gl.store(K.counters + NOTED, 1)\n", ""),
    Bug("a request does not end a box", PAGES, "gl.minimum(n - (i * C.tile_kv + b * C.box), C.box)", "C.box + 0 * n"),
    Bug("another row of the page", PAGES, "return key % pages.SIZE", "return (key + 1) % pages.SIZE", case={"page": 48}),
    Bug("the first box for all", PAGES, "gl.where(lane == b, place, -1)", "gl.where(lane == 0, place, -1)"),
    Bug("half of the bytes are expected", PAGES, "primitive_bitwidth // 8", "primitive_bitwidth // 16", UNFINISHED),
    Bug("the first panel of columns twice", PAGES, "column + i * WIDTH]", "column]", case=PANELS),
    Bug("a request does not end a square", PAGES, "gl.minimum(gl.maximum(keys - i * GROUP, 0), GROUP)", "GROUP + 0 * keys",
        case=GROUPED),
    Bug("a request ends nowhere", PAGES, "(keys >= C.tile_kv) | (keys % C.box == 0)", "keys >= 0", case=GROUPED),
    Bug("the first group of a box for all", PAGES, "i * GROUP % C.box + rows", "rows", case=GROUPED),
    Bug("the first panel of a square twice", PAGES, "FAR - rows, p * PANEL]", "FAR - rows, 0]", case=GROUPED),
    Bug("squares lie as if there were one panel", PAGES, "squares.index(i * PANELS + p)", "squares.index(i + p)",
        (*WRONG, *UNFINISHED), GROUPED),
    Bug("groups without keys are left out", PAGES, "range(begun, GROUPS)", "range(GROUPS, GROUPS)", UNFINISHED, GROUPED),
    Bug("a row for its group", PAGES, "row.to(gl.uint32) // GROUP", "row.to(gl.uint32)", case=GROUPED),
    Bug("the swizzle of other keys", KEYS, "[1, 8], [2, 16], [4, 32]", "[1, 16], [2, 8], [4, 32]", (Unsupported,), GROUPED),
    Bug("panels lie behind groups", KEYS, "square + panels + groups", "square + groups + panels", case=GROUPED),
    Bug("pages of V lie as those of K", PAGES, "K.v, g, K.pages.v_page", "K.v, g, K.pages.k_page", case={"apart": True}),
    Bug("rows that see nothing are left alone", QUEUE, "K.C, EMPTY=K.C.box == 0)\n    else", "K.C, EMPTY=True)\n    else",
        case={"lengths": [60, 0]}),
    Bug("nobody hears of what the optimism got wrong", FORWARD, "NOTED + gl.full([ROWS], 0, gl.int32, LAYOUT), 1,",
        "NOTED + gl.full([ROWS], 0, gl.int32, LAYOUT), 0,", case={"late": True}, redone=True),
    Bug("requests of few queries are nobody's", SCHEDULE, "other=1) == 0)", "other=1) < 0)", case=MIXED),
    Bug("requests of many queries are served twice", SCHEDULE, "other=1) == 0)", "other=1) >= 0)", (Race,), MIXED),
    Bug("the forward ends before the launch ahead of it", FORWARD, "    if C.beside:\n        take_turn()",
        "    if C.beside:\n        pass", (Unfinished,), MIXED),
    Bug("a tile for each CTA is left out", QUEUE, "elif K.C.beside:\n        return " + COUNTED,
        "elif K.C.beside:\n        return gl.num_programs(0) + " + COUNTED, case=MANY_PROMPTS),
    Bug("the notes of the first head for all", NOTES, "* GROUP + i) * blocks", "* GROUP + 0 * i) * blocks", case={"late": True},
        redone=True),
    Bug("the notes of other rows", NOTES, "* blocks + block", "* blocks + block - first_row // GROUP // NOTED_ROWS",
        case={"late": True}, redone=True),
    lost("the notes stay", NOTES, "            gl.store(at, gl.zeros_like(lane), mask=first + lane < number)\n", ""),
    lost("that there are notes stays", NOTES, "        gl.store(notes.counters + NOTED, 0)\n", ""),
    lost("the count of CTAs stays", NOTES, "        gl.store(notes.counters + ENDED, 0)\n", ""),
    lost("the first CTA to end forgets the notes", NOTES, "== gl.num_programs(0) - 1", "== 0", (Race, AssertionError)),
    lost("noted rows are nobody's", NOTES, "noted | (gl.load(notes.notes + note) != 0)", "noted"),
]  # fmt: skip


def broken(bug: Bug, folder) -> dict:
    """The modules with a mistake, by the kernel that they stand for."""
    line = HELPS.get(bug.module, [bug.module])
    return {ROLES[line[-1]]: altered_over(line, ((bug.text, bug.becomes),), folder)}


def case_of(bug: Bug):
    case = {**PLAIN, "n_q": 70, "batch": 2, "lengths": [250, 100], **bug.case}
    honest, late, apart = (case.pop(name, default) for name, default in (("honest", True), ("late", False), ("apart", False)))
    call = draw(1, torch.float16, honest, **case)
    if late:  # the last two rows of the second head meet a key that counts for more than all others
        call.cache.k[int(call.cache.page_table[0, 248 // 16]), 248 % 16] *= 300.0
        call.q[:, :, 0] = 0.0
    if apart:
        both = torch.stack([call.cache.v, call.cache.v], 1)
        call = call._replace(cache=strobe.Cache(**{**vars(call.cache), "v": both[:, 0]}))
    return call


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, tmp_path):
    modules, call = broken(bug, tmp_path), case_of(bug)
    for number, order in enumerate(ORDERS):
        with pytest.raises(bug.errors):
            redone = run(call, ctas=3, order=order, seed=number, launches=2 if bug.redone else 1, **modules)
            assert (redone > 0) == bug.redone


CASES = {str(bug.case): bug for bug in BUGS}


@pytest.mark.parametrize("case", CASES)
def test_no_false_alarm(case):
    assert (run(case_of(CASES[case]), launches=2) > 0) == CASES[case].redone
