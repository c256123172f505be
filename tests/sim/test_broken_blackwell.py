"""Mistakes made in Blackwell's forward, one at a time: the simulator finds each in every order."""

from functools import partial

import pytest
from broken import Bug, Kernel, assert_found, assert_right_unless_broken, one_edit
from problems import Case
from tritons import needs_tcgen05

from strobe.kernels.sm100.config import Config
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

pytestmark = needs_tcgen05

FORWARD, MEMORY, TMA = (f"strobe.kernels.sm100.{name}" for name in ("forward", "memory", "descriptors"))
# One CTA takes three tiles, each of three blocks through a ring of three; every block rescales O.
KERNEL = Kernel(
    FORWARD,
    100,
    Case(150, 170, batch=1, heads_q=3, heads_kv=1, head_dim=64),
    Config(64, 64, tile_kv=64, kv_stages=3, rescale_threshold=0.0),
)
ONE_BLOCK = Case(150, 60, batch=1, heads_q=3, heads_kv=1, head_dim=64)
PACKED = Case(150, 170, batch=3, heads_q=1, heads_kv=1, head_dim=64, packed=True)
WIDE = {
    "case": Case(150, 170, batch=1, heads_q=3, heads_kv=1, head_dim=192, head_dim_v=128),
    "config": {"head_dim": 192, "head_dim_v": 128},
}
TOO_EARLY = (Race, Uninitialised)
WRONG_PHASE = (Race, Uninitialised, Deadlock, BarrierMisuse)


memory = partial(one_edit, KERNEL, MEMORY)
tma = partial(one_edit, KERNEL, TMA)
kernel = partial(one_edit, KERNEL, FORWARD)
EMPTY_WAIT = "mbarrier.wait(self.empty.index(slot), ((position // self.C.kv_stages) & 1) ^ 1)"
FULL_WAIT = "mbarrier.wait(self.full.index(position % self.C.kv_stages), (position // self.C.kv_stages) & 1)"
RELEASE = "commit(self.empty.index(position % self.C.kv_stages), self.k(position), self.C)"
WIDE_CHUNK = "wide = self.wide.index(position % self.C.kv_stages)"
EXPECT = "mbarrier.expect(barrier, descriptors[0].nbytes_per_cta + (descriptors[1].nbytes_per_cta if NUMBER == 2 else 0))"
P_FULL_COUNT = "mbarrier.init(a.index(1), count=2 if C.correction else 1)"

KV = [
    memory("a block is copied before its slot is empty", EMPTY_WAIT, "pass", (Race, BarrierMisuse)),
    memory(
        "the first copy waits for a release",
        EMPTY_WAIT,
        EMPTY_WAIT.replace(" ^ 1", ""),
        (Deadlock,),
        says=("load waits for parity 0 of kv.empty[0] at", "mma waits for parity 0 of kv.full[0] at", "0 of 1 arrivals"),
    ),
    memory("the phase of empty never flips", EMPTY_WAIT, "mbarrier.wait(self.empty.index(slot), 1)", WRONG_PHASE),
    memory("a block is not waited for", FULL_WAIT, "pass", TOO_EARLY),
    memory("the other phase of full is waited for", FULL_WAIT, FULL_WAIT.replace("& 1)", "& 1 ^ 1)"), WRONG_PHASE),
    memory("a phase flips a slot too late", FULL_WAIT, FULL_WAIT.replace("(position //", "((position - 1) //"), WRONG_PHASE),
    memory("all blocks lie in the first slot", WIDE_CHUNK, "wide = self.wide.index(0)", TOO_EARLY),
    memory(
        "a slot beyond the ring",
        WIDE_CHUNK,
        "wide = self.wide.index(position % (self.C.kv_stages + 1))",
        (OutOfBounds,),
        says=("index 3 of", "which has 3"),
    ),
    memory(
        "the copy signals another slot",
        "return self.full.index(slot)",
        "return self.full.index((slot + 1) % self.C.kv_stages)",
        WRONG_PHASE,
    ),
    memory(
        "an arrival in place of a commit",
        RELEASE,
        "mbarrier.arrive(self.empty.index(position % self.C.kv_stages), count=1)",
        (Race,),
    ),
    memory("a slot is given back twice", RELEASE, RELEASE + "\n        " + RELEASE, WRONG_PHASE),
    memory(
        "a narrow chunk lies in another's slot",
        "self.narrow.index(position // 2 % self.C.narrow_stages)",
        "self.narrow.index(0)",
        (Race,),
        **WIDE,
    ),
    tma(
        "half of the bytes are expected",
        EXPECT,
        EXPECT.replace("descriptors[0].nbytes_per_cta +", "descriptors[0].nbytes_per_cta // 2 +"),
        WRONG_PHASE,
    ),
    tma("more bytes are expected than come", EXPECT, EXPECT.replace(" + (", " * 2 + ("), (Deadlock,), says=("bytes to come",)),
    tma(
        "the bytes of the narrow chunk are not expected", "if NUMBER == 2 else 0", "if NUMBER == 3 else 0", WRONG_PHASE, **WIDE
    ),
    tma("no bytes are expected", EXPECT, "pass", (Deadlock, BarrierMisuse)),
    tma(
        "a sequence ends a row too late",
        "work.start_q, work.n_q, work",
        "work.start_q, work.n_q + 1, work",
        (DoubleWrite, OutOfBounds),
        case=PACKED,
    ),
    kernel("a slot of K is never given back", "        kv.release(k)\n", "", (Deadlock,), says=("load waits for parity",)),
    kernel("the first K is never given back", "    kv.release(2 * first)\n", "", (Deadlock,)),
    kernel(
        "V is given back after the first stage's product",
        "if w == C.q_stages - 1:\n                kv.release(v)",
        "if w == 0:\n                kv.release(v)",
        (Race,),
    ),
    kernel(
        "a block more is copied than there are",
        "for g in tl.range(done, done + work.blocks(), disable_licm=True):\n        row",
        "for g in tl.range(done, done + work.blocks() + 1, disable_licm=True):\n        row",
        (Deadlock, Unfinished, Race, BarrierMisuse),
    ),
    kernel(
        "the mma warp does not count blocks",
        "mma_tile(K.stages, K.kv, done, done + blocks - 1, turn, K.C)",
        "mma_tile(K.stages, K.kv, 0, blocks - 1, turn, K.C)",
        WRONG_PHASE,
    ),
]

Q_FULL_WAIT = "mbarrier.wait(stages[w].q_full, turn & 1)"
Q_EMPTY_WAIT = "mbarrier.wait(K.stages[w].q_empty, (turn & 1) ^ 1)"
Q_EMPTY = "            commit(stages[w].q_empty, stages[w].q, C)\n"
FIRST_LOOP = "    kv.release(2 * first)\n    for g in tl.range(first, last, disable_licm=True):\n"
COPY_Q = "copy_in(q, K.stages[w].q, K.stages[w].q_full"

Q = [
    kernel("Q is not waited for", Q_FULL_WAIT, "pass", TOO_EARLY),
    kernel("the phase of Q never flips", Q_FULL_WAIT, "mbarrier.wait(stages[w].q_full, 0)", WRONG_PHASE),
    kernel("the next tile's Q is copied over this one's", Q_EMPTY_WAIT, "pass", (Race, BarrierMisuse)),
    kernel("the first Q waits for a release", Q_EMPTY_WAIT, Q_EMPTY_WAIT.replace(" ^ 1", ""), (Deadlock,)),
    kernel("Q is never given back", Q_EMPTY, "            pass\n", (Deadlock,), says=("load waits for parity 0 of",)),
    Bug(
        "Q is given back before its last products",
        KERNEL,
        FORWARD,
        (
            (Q_EMPTY, "            pass\n"),
            (FIRST_LOOP, "    for w in gl.static_range(len(stages)):\n    " + Q_EMPTY + FIRST_LOOP),
        ),
        (Race,),
    ),
    kernel("both stages' Q goes to one buffer", COPY_Q, COPY_Q.replace("K.stages[w].q,", "K.stages[0].q,"), TOO_EARLY),
    kernel("the mma warp does not count tiles", "done + blocks - 1, turn, K.C)", "done + blocks - 1, 0, K.C)", WRONG_PHASE),
    kernel("Q is given back while O is in it", "    if not C.o_in_q:\n", "    if True:\n", WRONG_PHASE, **WIDE),
    kernel(
        "Q is never given back once O was in it",
        "            mbarrier.arrive(K.stages[w].q_empty, count=1)\n",
        "            pass\n",
        (Deadlock,),
        **WIDE,
    ),
]

S_FULL_WAIT = "mbarrier.wait(stage.s_full, g & 1)"
CHUNKS_OF_Q = "    for c in gl.static_range(len(stage.q)):\n        if c > 0:\n            partition_barrier()\n"
S_FULL = "    commit(stage.s_full, stage.q, C)\n"
START_S = "        tcgen05_mma(stage.q[c], k[c].permute((1, 0)), stage.s, use_acc=c > 0, mbarriers=[])\n"
P_FULL_WAIT = "mbarrier.wait(stage.p_full, phase)"
P_LAST_WAIT = "            mbarrier.wait(stage.p_last, phase)\n"
P_LAST = "        mbarrier.arrive(stage.p_last, count=1)\n"
OUTPUT = "            start_output(stages[w], kv.v(v), g > first, g & 1, C)\n"
WAIT_K = "            if w == 0:\n                kv.wait(k)\n"
NEXT_SCORES = "            start_scores(stages[w], kv.k(k), C)\n"

S_AND_P = [
    kernel(
        "both softmax roles work on stage 0",
        "    stage = K.stages[w]\n    last = done",
        "    stage = K.stages[0]\n    last = done",
        WRONG_PHASE,
    ),
    kernel("S is not waited for", S_FULL_WAIT, "pass", TOO_EARLY),
    kernel("the other phase of S is waited for", S_FULL_WAIT, S_FULL_WAIT.replace("& 1)", "& 1 ^ 1)"), WRONG_PHASE),
    kernel("nobody says that S is there", S_FULL, "", (Deadlock,), says=("softmax waits for parity 0 of",)),
    kernel(
        "S's commit comes before its product",
        CHUNKS_OF_Q + START_S + S_FULL,
        S_FULL + CHUNKS_OF_Q + START_S,
        TOO_EARLY,
    ),
    kernel("S signals another barrier", S_FULL, S_FULL.replace("s_full", "o_full"), WRONG_PHASE),
    kernel("S adds to what nothing has written", START_S, START_S.replace("c > 0", "True"), TOO_EARLY),
    kernel("P is not waited for", P_FULL_WAIT, "pass", TOO_EARLY),
    kernel("the phase of P never flips", P_FULL_WAIT, "mbarrier.wait(stage.p_full, 0)", WRONG_PHASE),
    kernel("the last quarter of P is not waited for", P_LAST_WAIT, "            pass\n", (Race, Uninitialised, BarrierMisuse)),
    kernel("nobody says that the last quarter of P is there", P_LAST, "        pass\n", (Deadlock,)),
    kernel("P is announced a quarter too early", "if part == 2 and C.split_p:", "if part == 1 and C.split_p:", (Race,)),
    kernel(
        "P is announced before it is complete",
        "if part == 2 and C.split_p:",
        "if part == 2:",
        WRONG_PHASE,
        config={"split_p": False},
    ),
    memory(
        "the softmax alone announces P and O", P_FULL_COUNT, P_FULL_COUNT.replace("2 if C.correction else 1", "1"), WRONG_PHASE
    ),
    memory(
        "P waits for somebody who never comes",
        P_FULL_COUNT,
        P_FULL_COUNT.replace("2 if", "3 if"),
        (Deadlock,),
        says=("2 of 3 arrivals", "mma waits for parity 0 of"),
    ),
    memory("P lies over the next stage's S", "S_FIRST + C.tile_kv // 2", "S_FIRST + C.tile_kv", (Race,)),
    memory("both stages' P lie over the first stage's S", "S_FIRST + C.tile_kv // 2", "C.tile_kv // 2", (Race,)),
    memory(
        "both stages' S lie in the same columns", "S_FIRST: gl.constexpr = w * C.tile_kv", "S_FIRST: gl.constexpr = 0", (Race,)
    ),
    Bug(
        "the next S is started before P V",
        KERNEL,
        FORWARD,
        ((OUTPUT, ""), (NEXT_SCORES, NEXT_SCORES + OUTPUT)),
        (Race, Deadlock),
    ),
]

O_FULL_WAIT = "    mbarrier.wait(stage.o_full, turn & 1)\n"
O_FULL = "        commit(stages[w].o_full, stages[w].q, C)\n"
LAST_OUTPUT = "        start_output(stages[w], kv.v(2 * last + 1), last > first, last & 1, C)\n"
RESCALED = "            rescale(stage, factor, K.C)\n            mbarrier.arrive(stage.p_full, count=1)\n"
STATS_FULL_WAIT = "mbarrier.wait(stage.stats_full, message & 1)"
STATS_EMPTY_WAIT = "mbarrier.wait(stage.stats_empty, (message & 1) ^ 1)"
STATS_FULL = "    mbarrier.arrive(stage.stats_full, count=1)\n"
FACTOR = "            factor = stage.sums.load(LAYOUT)\n"
FACTOR_READ = "            mbarrier.arrive(stage.stats_empty, count=1)\n            rescale"
CORRECTED = "            correct_tile(K, work, done, turn)\n"

O_AND_CORRECTION = [
    kernel(
        "O of one block adds to what nothing has written",
        "last > first, last & 1, C)",
        "True, last & 1, C)",
        (Uninitialised,),
        case=ONE_BLOCK,
    ),
    kernel("the first P V adds to what nothing has written", "g > first, g & 1, C)", "True, g & 1, C)", (Uninitialised,)),
    kernel("O is not waited for", O_FULL_WAIT, "", (Race,)),
    kernel("the phase of O never flips", O_FULL_WAIT, O_FULL_WAIT.replace("turn & 1", "0"), WRONG_PHASE),
    kernel("nobody says that O is final", O_FULL, "", (Deadlock,)),
    kernel("an arrival in place of O's commit", O_FULL, "        mbarrier.arrive(stages[w].o_full, count=1)\n", (Race,)),
    kernel("O's commit comes before its last products", LAST_OUTPUT + O_FULL, O_FULL + LAST_OUTPUT, (Race,)),
    memory("both stages' O lie in the same columns", "C.o_first(w)", "C.o_first(0)", (Race,)),
    memory("O lies over S", "C.o_first(w)", "w * C.tile_kv", (Race,)),
    memory(
        "more tensor memory than there is",
        "[C.rows, C.tmem_allocation]",
        "[C.rows, 1024]",
        (IllegalOperation,),
        says=("of 512",),
    ),
    kernel(
        "O is rescaled beside the products",
        RESCALED,
        "            mbarrier.arrive(stage.p_full, count=1)\n            rescale(stage, factor, K.C)\n",
        (Race,),
    ),
    kernel("nobody says that O is rescaled", RESCALED, "            rescale(stage, factor, K.C)\n", (Deadlock,)),
    kernel(
        "the rescaling of stage 1 is announced to stage 0",
        RESCALED,
        RESCALED.replace("stage.p_full", "K.stages[0].p_full"),
        WRONG_PHASE,
    ),
    kernel(
        "O is rescaled before the product before is done",
        "            rescale(stage, factor, K.C)\n        row_sum",
        "            pass\n        rescale(stage, factor, K.C)\n        row_sum",
        TOO_EARLY,
        config={"correction": False},
    ),
    kernel("the factors are not waited for", STATS_FULL_WAIT, "pass", TOO_EARLY),
    kernel("the phase of the factors never flips", STATS_FULL_WAIT, "mbarrier.wait(stage.stats_full, 0)", WRONG_PHASE),
    kernel("factors are written over those that nobody has read", STATS_EMPTY_WAIT, "pass", WRONG_PHASE),
    kernel(
        "factors are announced before they are there",
        "    stage.sums.store(first)\n",
        STATS_FULL + "    stage.sums.store(first)\n",
        WRONG_PHASE,
    ),
    kernel(
        "factors are given back before they are read",
        FACTOR + FACTOR_READ,
        FACTOR_READ.replace("            rescale", FACTOR + "            rescale"),
        (Race,),
    ),
    kernel("factors are never given back", FACTOR_READ, "            rescale", (Deadlock,)),
    kernel("the last row sums are not waited for", "        mbarrier.wait(stage.stats_full, last & 1)\n", "", TOO_EARLY),
    memory(
        "both stages send through one buffer",
        "stats.index(2 * w), stats.index(2 * w + 1)",
        "stats.index(0), stats.index(1)",
        (Race,),
    ),
    memory("row maxima beyond the buffer", "stats.index(2 * w + 1)", "stats.index(2 * w + 2)", (OutOfBounds,)),
    kernel(
        "correction arrives once more at the end",
        CORRECTED,
        CORRECTED + "            if tile == K.heads.tiles - 1:\n                mbarrier.arrive(K.stages[0].p_full, count=1)\n",
        (BarrierMisuse,),
        says=("left in use at exit", "1 of 2 arrivals"),
    ),
    memory(
        "a barrier is not initialised",
        "    for i in gl.static_range(number):\n",
        "    for i in gl.static_range(number - 1):\n",
        (BarrierMisuse,),
        says=("not initialised",),
    ),
    memory(
        "a barrier is initialised again",
        "mbarrier.init(made.index(i), count=1)",
        "mbarrier.init(made.index(0), count=1)",
        (BarrierMisuse,),
        says=("again",),
    ),
]

OUT_EMPTY_WAIT = "        mbarrier.wait(stage.out_empty, (turn & 1) ^ 1)\n"
OUT_FULL_WAIT = "        mbarrier.wait(K.stages[w].out_full, turn & 1)\n"
OUT_FULL = "        mbarrier.arrive(stage.out_full, count=1)\n"
OUT_EMPTY = "        mbarrier.arrive(K.stages[w].out_empty, count=1)\n"
STORE_WAIT = "        tma_store_wait((K.C.q_stages - 1 - w) * len(K.outputs.descriptors))\n"
ROWS = "    rows = work.row + w * K.C.rows + gl.arange(0, K.C.rows, LAYOUT)\n"

OUT = [
    kernel("no fence before the store of O", "        fence_async_shared()\n" + OUT_FULL, OUT_FULL, (MissingFence,)),
    kernel(
        "the fence comes before the store of O",
        "        zero = normalise(stage, factor, K.C)\n        fence_async_shared()\n",
        "        fence_async_shared()\n        zero = normalise(stage, factor, K.C)\n",
        (MissingFence,),
    ),
    kernel(
        "the fence comes after the announcement",
        "        fence_async_shared()\n" + OUT_FULL,
        OUT_FULL + "        fence_async_shared()\n",
        (MissingFence,),
    ),
    kernel("O is stored before it is there", OUT_FULL_WAIT, "", (Race, MissingFence, Uninitialised)),
    kernel("nobody says that O is there", OUT_FULL, "", (Deadlock,), says=("epilogue waits for parity 0 of",)),
    kernel("O is written over the one that has not left", OUT_EMPTY_WAIT, "", (Race, BarrierMisuse)),
    kernel("a store too few is waited for", STORE_WAIT, STORE_WAIT.replace("- 1 - w", "- w"), (Race, Unfinished)),
    kernel("stores are not waited for", STORE_WAIT, "", (Race, Unfinished)),
    kernel("O is said to have left before it has", STORE_WAIT + OUT_EMPTY, OUT_EMPTY + STORE_WAIT, (Race,)),
    kernel("nobody says that O has left", OUT_EMPTY, "", (Deadlock,), says=("waits for parity 0 of",)),
    kernel("O has left twice", OUT_EMPTY, OUT_EMPTY.replace("count=1", "count=2"), (BarrierMisuse,), says=("arrives 2 times",)),
    kernel(
        "both stages store to the same rows",
        "work, work.row + w * K.C.rows)\n    for",
        "work, work.row)\n    for",
        (DoubleWrite,),
    ),
    kernel("both stages write the same LSE", ROWS, ROWS.replace("w * K.C.rows", "0"), (DoubleWrite,)),
    kernel("rows beyond the last have an LSE", "lse, mask=exists)", "lse)", (DoubleWrite, OutOfBounds)),
    kernel(
        "rows beyond the last have a part of O",
        "new, mask=exists[:, None])",
        "new)",
        (DoubleWrite, OutOfBounds),
        config={"splits": 2},
    ),
    kernel(
        "all splits write to one place",
        "split = work.split.to(gl.int64) * K.outputs.rows",
        "split = work.split.to(gl.int64) * 0",
        (DoubleWrite,),
        config={"splits": 2},
    ),
]

BUGS = KV + Q + S_AND_P + O_AND_CORRECTION + OUT
WRONG_NUMBERS = [
    kernel("O is not rescaled", "if gl.min(factor, 0) < 1.0:", "if gl.min(factor, 0) < 0.0:", ()),
    kernel("row sums are not rescaled", "row_sum = row_sum * factor +", "row_sum = row_sum +", ()),
    kernel("all quarters of P meet the first of V", "v[c].slice(part * SIZE, SIZE)", "v[c].slice(0, SIZE)", ()),
]


@pytest.mark.parametrize("bug", BUGS + WRONG_NUMBERS, ids=str)
def test_it_is_found(bug, tmp_path):
    assert_found(bug, tmp_path)


def test_no_false_alarm(tmp_path):
    assert_right_unless_broken(KERNEL, tmp_path)
