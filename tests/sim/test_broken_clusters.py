"""Mistakes that only two CTAs can make, made in Blackwell's forward one at a time: the simulator finds each in every order."""

from functools import partial

import pytest
from broken import SM100_HOST, Bug, Kernel, assert_found, assert_right_unless_broken, one_edit
from problems import Case
from tritons import needs_tcgen05

from strobe.kernels.sm100.config import Config
from strobe.sim import BarrierMisuse, Deadlock, IllegalOperation, Race, Uninitialised

pytestmark = needs_tcgen05

FORWARD, MEMORY, TMA = (f"strobe.kernels.sm100.{name}" for name in ("forward", "memory", "descriptors"))
# One pair of CTAs takes three tiles, each of three blocks through a ring of three; every block rescales O.
KERNEL = Kernel(
    FORWARD,
    100,
    Case(300, 170, batch=1, heads_q=3, heads_kv=1, head_dim=64),
    Config(64, 64, tile_kv=64, kv_stages=3, rescale_threshold=0.0, two_ctas=True),
)
WIDE = {
    "case": Case(300, 170, batch=1, heads_q=3, heads_kv=1, head_dim=192, head_dim_v=128),
    "config": {"head_dim": 192, "head_dim_v": 128},
}
TOO_EARLY = (Race, Uninitialised)
WRONG_PHASE = (Race, Uninitialised, Deadlock, BarrierMisuse)


memory = partial(one_edit, KERNEL, MEMORY)
tma = partial(one_edit, KERNEL, TMA)
kernel = partial(one_edit, KERNEL, FORWARD)
host = partial(one_edit, KERNEL, SM100_HOST)


def alone(what, before, after, says) -> Bug:
    """A commit for one CTA in the kernel, which imports none of its own."""
    imports = "    tcgen05_mma,\n", "    tcgen05_commit,\n    tcgen05_mma,\n"
    return Bug(what, KERNEL, FORWARD, (imports, (before, after)), (Deadlock,), says)


RING = "barriers(C.kv_stages, True, C), barriers(C.kv_stages, False, C), C)"
OF_MMA = "a = mbarrier.allocate_mbarrier(batch=3, two_ctas=C.two_ctas)"
OTHERS = "b = barriers(7, False, C)"
COMMIT = "tcgen05_commit(barrier, descs=[operands[0]])"
EXPECT = "mbarrier.expect(barrier, descriptors[0].nbytes_per_cta + (descriptors[1].nbytes_per_cta if NUMBER == 2 else 0))"
V_OF_BOTH = "        if self.C.two_ctas:\n"

BARRIERS = [
    memory(
        "each CTA has a barrier of its own for K and V, and the mma warp waits for its own alone",
        RING,
        RING.replace("True", "False"),
        TOO_EARLY,
    ),
    memory("the CTAs share the barrier of an empty slot", RING, RING.replace("False", "True"), WRONG_PHASE),
    memory("each CTA has barriers of its own for Q and P", OF_MMA, OF_MMA.replace("C.two_ctas", "False"), WRONG_PHASE),
    memory("the CTAs share the barriers of S, O and the factors", OTHERS, OTHERS.replace("False", "True"), WRONG_PHASE),
    memory(
        "P counts the arrivals of one CTA",
        "mbarrier.init(a.index(1), count=2 if C.correction else 1)",
        "mbarrier.init(a.index(1), count=1)",
        WRONG_PHASE,
    ),
    memory(
        "P counts the arrivals of both twice",
        "mbarrier.init(a.index(1), count=2 if C.correction else 1)",
        "mbarrier.init(a.index(1), count=4 if C.correction else 2)",
        (Deadlock,),
        says=("mma waits for parity 0 of", "4 of 8 arrivals"),
    ),
    memory(
        "the last quarter of P counts the arrivals of both twice",
        "mbarrier.init(a.index(2), count=1)",
        "mbarrier.init(a.index(2), count=2)",
        (Deadlock,),
        says=("2 of 4 arrivals",),
    ),
    memory(
        "Q counts the arrivals of both twice",
        "mbarrier.init(a.index(0), count=1)",
        "mbarrier.init(a.index(0), count=2)",
        (Deadlock,),
        says=("2 of 4 arrivals",),
    ),
]
COMMITS = [
    memory(
        "a commit is for one CTA, the other is never told",
        COMMIT,
        "tcgen05_commit(barrier)",
        (Deadlock,),
        says=("CTA 1",),
    ),
    memory(
        "the second CTA is never told that a slot is empty",
        "commit(self.empty.index(position % self.C.kv_stages), self.k(position), self.C)",
        "tcgen05_commit(self.empty.index(position % self.C.kv_stages))",
        (Deadlock,),
        says=("CTA 1 load waits for parity 0 of",),
    ),
    alone(
        "the second CTA is never told that S is there",
        "commit(stage.s_full, stage.q, C)",
        "tcgen05_commit(stage.s_full)",
        says=("CTA 1 softmax waits for parity 0 of",),
    ),
    alone(
        "the second CTA is never told that O is final",
        "commit(stages[w].o_full, stages[w].q, C)",
        "tcgen05_commit(stages[w].o_full)",
        says=("CTA 1",),
    ),
    alone(
        "the second CTA is never told that Q may be overwritten",
        "commit(stages[w].q_empty, stages[w].q, C)",
        "tcgen05_commit(stages[w].q_empty)",
        says=("CTA 1 load waits for parity 0 of",),
    ),
]
BYTES = [
    tma(
        "the bytes of both CTAs are expected in each",
        EXPECT,
        EXPECT.replace("barrier, d", "barrier, 2 * d"),
        (Deadlock,),
        says=("bytes to come",),
    ),
    tma("half of a CTA's bytes are expected", EXPECT, EXPECT.replace("nbytes_per_cta +", "nbytes_per_cta // 2 +"), WRONG_PHASE),
    tma(
        "the bytes of a whole block are expected, the narrow chunk's as they are",
        EXPECT,
        EXPECT.replace("descriptors[0].nbytes_per_cta", "descriptors[0].block_type.nbytes"),
        (Deadlock,),
        **WIDE,
    ),
]
HALVES = [
    memory("V is halved by keys as K is", V_OF_BOTH, "        if False:\n", (IllegalOperation,), says=("half the columns of",)),
    host(
        "K is halved by columns",
        "*descriptors(tensors.k, config.tile_kv, config.chunks, 0, config)",
        "*descriptors(tensors.k, config.tile_kv, config.chunks, 1, config)",
        (IllegalOperation,),
        says=("other than those",),
    ),
    host(
        "V comes by halves of its keys",
        "*descriptors(tensors.v, config.tile_kv, config.chunks_v, 1, config)",
        "*descriptors(tensors.v, config.tile_kv, config.chunks_v, 0, config)",
        (IllegalOperation,),
        says=("other than those",),
    ),
    host(
        "Q comes by halves of its columns",
        "*descriptors(tensors.q, config.rows, config.chunks, 0, config)",
        "*descriptors(tensors.q, config.rows, config.chunks, 1, config)",
        (IllegalOperation,),
        says=("other than those",),
    ),
]

BUGS = BARRIERS + COMMITS + BYTES + HALVES


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, tmp_path):
    assert_found(bug, tmp_path)


@pytest.mark.exhaustive
def test_no_false_alarm(tmp_path):
    assert_right_unless_broken(KERNEL, tmp_path)
