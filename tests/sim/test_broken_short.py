"""Mistakes made in Hopper's forward to few keys, one at a time: the simulator finds each in every order."""

from functools import partial

import pytest
from broken import Kernel, assert_found, assert_right_unless_broken, one_edit
from problems import Case

from strobe.kernels.sm90.short_config import ShortConfig
from strobe.sim import BarrierMisuse, Deadlock, MissingFence, OutOfBounds, Race, Unfinished, Uninitialised

SHORT = "strobe.kernels.sm90.short"
# Five tiles, the last of 44 rows; 77 keys in parts of 64 and 16.
KERNEL = Kernel(SHORT, 90, Case(300, 77, batch=1, heads_q=1, heads_kv=1, head_dim=64), ShortConfig(64, 64, (64, 16), stages=2))
WRONG_PHASE = (Race, Uninitialised, Deadlock, BarrierMisuse)

KV_WAIT = "    mbarrier.wait(kv_full, 0)\n"
Q_WAIT = "        mbarrier.wait(q_full, (turn // STAGES) & 1)\n"
S_READY = "    s = wait_output(started)\n"
NEXT_Q = "        copy(q_desc, q, q_full, batch, head, (tile + STAGES) * ROWS, tile + STAGES < last)\n"
O_LEFT = "        tma_store_wait(0)  # the O of the tile before has left\n        partition_barrier()\n"
O_THERE = "        fence_async_shared()\n        partition_barrier()\n        for c in gl"
LAST_O = "            tma_store(o_desc[c], [batch, head, tile * ROWS, c * C.wide_v], chunk)\n    tma_store_wait(0)\n"

short = partial(one_edit, KERNEL, SHORT)
BUGS = [
    short("keys are not waited for", KV_WAIT, "", (Race, Uninitialised)),
    short("Q is not waited for", Q_WAIT, "", WRONG_PHASE),
    short("the phase of Q never flips", Q_WAIT, "        mbarrier.wait(q_full, 0)\n", WRONG_PHASE),
    short("the phase of Q flips with every tile", Q_WAIT, Q_WAIT.replace("turn // STAGES", "turn"), WRONG_PHASE),
    short("keys are promised fewer bytes", "expect(kv_full, C.kv_bytes)", "expect(kv_full, C.kv_bytes // 2)", WRONG_PHASE),
    short("scores are not waited for", S_READY, "    s = started\n", (Unfinished, Race)),
    short("O is not waited for", "return m, row_sum, wait_output(acc)", "return m, row_sum, acc", (Unfinished, Race)),
    short("a tile too many is asked for", NEXT_Q, NEXT_Q.replace("< last", "<= last"), (*WRONG_PHASE, Unfinished)),
    short("the next tile's rows come too late", NEXT_Q, NEXT_Q.replace("tile + STAGES)", "tile + STAGES + 1)"), ()),
    short("keys that are not there are seen", "(key < n_kv)", "(key <= n_kv)", ()),
    short("the second part begins at the first key", "C.first(i), C.parts[i],", "0, C.parts[i],", ()),
    short("O is written over before it has left", O_LEFT, "        partition_barrier()\n", (Race,)),
    short("O leaves before it is there", O_THERE, O_THERE.replace("        fence_async_shared()\n", ""), (MissingFence,)),
    short("nobody waits for the last O", LAST_O, LAST_O.splitlines(True)[0], (Unfinished,)),
    short("the LSE of rows that are not there", ", mask=row < n_q)", ")", (OutOfBounds,)),
    short("the sum is of the last part", "row_sum += gl.conv", "row_sum = gl.conv", ()),
]


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_mistakes_are_found(bug, tmp_path):
    assert_found(bug, tmp_path)


def test_without_a_mistake(tmp_path):
    assert_right_unless_broken(KERNEL, tmp_path)
