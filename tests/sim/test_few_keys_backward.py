"""Hopper's backward to few keys, its source unchanged, in the simulator; and mistakes made in it, one at a time."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from backward import ShortBackward
from broken import UNEVEN, Kernel, assert_found, assert_right_unless_broken, one_edit
from problems import Case, tensors

from strobe.kernels.sm90.backward_short_config import ShortBackwardConfig
from strobe.sim import BarrierMisuse, Deadlock, DoubleWrite, MissingFence, OutOfBounds, Race, Unfinished, Uninitialised

FP16, BF16 = torch.float16, torch.bfloat16
ORDERS = (("in_order", 0), ("random", 1), ("late", 0), ("early", 0), ("timed", 0), *UNEVEN)
D64 = ShortBackwardConfig(64, 64, (64, 16))


def case(n_q, n_kv, head_dim=64, heads=(1, 1), batch=1, **more) -> Case:
    return Case(n_q, n_kv, batch, *heads, head_dim, **more)


# Each with the number of multiprocessors, which have one or two CTAs each.
CASES = [
    (case(64, 64), FP16, replace(D64, parts=(64,)), 1),
    (case(1, 1), BF16, replace(D64, parts=(64,), stages=1), 1),
    # A head for one CTA, for two, for three; the tiles of several query heads.
    (case(333, 77, heads=(2, 2), batch=2), BF16, D64, 1),
    (case(333, 77, heads=(2, 2)), FP16, D64, 2),
    (case(333, 77), BF16, D64, 3),
    (case(150, 77, heads=(6, 2), batch=2), BF16, D64, 4),
    (case(300, 70, heads=(5, 1)), FP16, D64, 4),
    (case(65, 90, heads=(2, 1), batch=3), FP16, replace(D64, parts=(64, 32), warps=8, stages=3), 2),
    (case(150, 128, 96, heads=(2, 1)), BF16, ShortBackwardConfig(128, 128, (128,), warps=8), 2),
    (case(150, 77, 40, heads=(2, 2)), FP16, D64, 1),
    (case(150, 77, 40, head_dim_v=72), BF16, ShortBackwardConfig(64, 128, (64, 16), warps=8), 1),
    (case(150, 77, 128, head_dim_v=64), FP16, ShortBackwardConfig(128, 64, (64, 16), warps=8, stages=1), 1),
    (case(150, 77, logits=100.0), FP16, D64, 1),
]


def short(value) -> str:
    return "" if isinstance(value, ShortBackwardConfig) else str(value).removeprefix("torch.")


@pytest.mark.parametrize("case, dtype, config, sms", CASES, ids=short)
def test_in_every_order(case, dtype, config, sms):
    for resident in (1, 3):
        backward = ShortBackward(tensors(case, dtype), config, sms, resident=resident)
        for order, seed in ORDERS:
            assert backward.run(order, seed).smem_bytes == config.smem_bytes()


def test_the_same_bits_whoever_comes_last():
    backward = ShortBackward(tensors(case(900, 77, heads=(2, 2)), BF16), D64, 4, resident=6)
    first, *others = [backward.simulate(order, seed).grads for order, seed in (*ORDERS, ("random", 2), ("random", 3))]
    for grads in others:
        assert all(torch.equal(getattr(first, name), getattr(grads, name)) for name in "qkv")


def test_what_is_no_number():
    """A NaN in dO stays in its row of dQ; an infinity in V makes dQ and dK NaN, and no weight."""
    t = tensors(case(150, 77, heads=(2, 2)), BF16)
    backward = ShortBackward(t, D64)
    clean = backward.simulate("in_order", 0).grads
    backward.given.dout[:, 70, 0] = torch.nan
    broken = torch.zeros_like(clean.q, dtype=torch.bool)
    broken[:, 70, 0] = True
    left = backward.simulate("in_order", 0).grads
    assert torch.equal(left.q.isnan(), broken)
    assert torch.equal(left.q[~broken], clean.q[~broken]) and torch.equal(left.k[:, :, 1], clean.k[:, :, 1])

    t.v[:, 33] = torch.inf
    dq, dk, dv, *_ = ShortBackward(t, D64).simulate("in_order", 0).grads
    assert torch.equal(dv, clean.v)
    assert dq.isnan().all() and dk.isnan().all()


# ---- mistakes

SHORT = "strobe.kernels.sm90.backward_short"
# Each of two heads has six tiles, the last of 13 rows, and two CTAs.
KERNEL = Kernel(
    SHORT,
    90,
    case(333, 77, heads=(2, 2)),
    D64,
    lambda kernels, bug, t, config: ShortBackward(t, config, 2, kernels, resident=bug.resident).run,
)
WRONG_NUMBERS = (AssertionError, OutOfBounds)
WRONG_PHASE = (Race, Uninitialised, Deadlock, BarrierMisuse)

WRAP = "        last = row == self.of_head * ROWS\n"
KV_BYTES = "    mbarrier.expect(kv_full, C.kv_bytes)\n"
KV_WAIT = "    mbarrier.wait(kv_full, 0)\n"
ROWS_WAIT = "    mbarrier.wait(memory.full.index(stage), (turn // K.C.stages) & 1)\n"
S_READY, DP_READY = "    s = finished(s, PARTS)\n", "    dp = finished(dp)\n"
DQ_LEFT = "    tma_store_wait(0)  # the dQ of the tile before has left\n"
DS_THERE = DQ_LEFT + "    fence_async_shared()\n"
DQ_READY = "    dq = warpgroup_mma_wait(2 * PARTS, deps=[dq])\n"
DQ_THERE = "    memory.dq.store((dq * K.scale).to(dtype))\n    fence_async_shared()\n"
ALL_READY = "    sum_v, sum_k = finished(sum_v), finished(sum_k)\n"
LEAVING = "        leave(leave(shares + number.to(gl.int64) * C.share_numbers, sum_k), sum_v)\n"
BARRIER = "        partition_barrier()  # so the count tells of what all threads wrote\n"
COUNTED = '        before = gl.atomic_add(arrivals + head, 1, sem="acq_rel", scope="gpu")\n'
SET_BACK = '            gl.atomic_xchg(arrivals + head, 0, sem="relaxed", scope="gpu")\n'
LAST_ADDS = "before == ctas - 1:\n" + SET_BACK
GRADIENTS_THERE = "        put(sum_v, memory.v, 1.0)\n        fence_async_shared()\n"
LAST_LEFT = "        send(parts_of(dv, dv_last, C), memory.v, batch, head_kv)\n    tma_store_wait(0)\n"

kernel = partial(one_edit, KERNEL, SHORT)
BUGS = [
    kernel("keys are not waited for", KV_WAIT, "", (Race, Uninitialised)),
    kernel("keys are promised fewer bytes", KV_BYTES, KV_BYTES.replace("C.kv_bytes", "C.kv_bytes // 2"), WRONG_PHASE),
    kernel("rows are not waited for", ROWS_WAIT, "", WRONG_PHASE),
    kernel("the phase of rows flips with every tile", ROWS_WAIT, ROWS_WAIT.replace("turn // K.C.stages", "turn"), WRONG_PHASE),
    kernel("scores are not waited for", S_READY, S_READY.replace("PARTS", "2 * PARTS"), (Unfinished, Race)),
    kernel("dP is not waited for", DP_READY, DP_READY.replace("dp)", "dp, 1)"), (Unfinished, Race)),
    kernel("dQ is not waited for", DQ_READY, DQ_READY.replace("2 * PARTS", "2 * PARTS + 1"), (Unfinished, Race)),
    kernel("dS is not fenced", DS_THERE, DQ_LEFT, (MissingFence,)),
    kernel("dQ is written over before it has left", DQ_LEFT, "", (Race,)),
    kernel("dQ leaves before it is there", DQ_THERE, DQ_THERE.splitlines(True)[0], (MissingFence,)),
    kernel("sums are not waited for", ALL_READY, "    sum_v = finished(sum_v, PARTS)\n", (Unfinished, Race)),
    kernel("a tile too many comes", "to, pred=tile < K.tiles.end", "to, pred=tile <= K.tiles.end", (*WRONG_PHASE, Unfinished)),
    kernel("the rows of another tile come", WRAP, WRAP.replace("==", ">"), WRONG_NUMBERS, case=case(150, 77, heads=(2, 1))),
    kernel("the LSE of rows that are not there", "(row < K.n_q) & (tile", "(row <= K.n_q) & (tile", WRONG_NUMBERS),
    kernel("the LSE's gradient is left out", "delta = -dm + gl", "delta = -0.0 * dm + gl", ()),
    kernel("delta is of the first part of the keys", "delta += gl", "delta += 0.0 * gl", ()),
    kernel("statistics are of the tile before", "(K, tile + 1, following)", "(K, tile + 1, place)", ()),
    kernel("a share is counted too early", LEAVING + BARRIER + COUNTED, COUNTED + LEAVING + BARRIER, (Race, Uninitialised)),
    kernel("the counter says nothing of memory", 'sem="acq_rel"', 'sem="relaxed"', (Race,)),
    kernel("the counter is not set back", SET_BACK, "", ()),
    kernel("who comes first adds up", LAST_ADDS, LAST_ADDS.replace("ctas - 1", "0"), (Race, Uninitialised)),
    kernel("the last share is left out", "first + i < shares)", "first + i < shares - 1)", ()),
    kernel("two CTAs share a place", "number.to(gl.int64)", "head.to(gl.int64)", (Race, DoubleWrite)),
    kernel("dK leaves before it is there", GRADIENTS_THERE, GRADIENTS_THERE.splitlines(True)[0], (MissingFence,)),
    kernel("nobody waits for the last rows", LAST_LEFT, LAST_LEFT.splitlines(True)[0], (Unfinished,)),
]  # fmt: skip


def test_keys_that_are_not_there_weigh_nothing():
    """Not even where all scores are so small that a score of 0 would weigh more than there is room for."""
    t = tensors(case(150, 77), BF16)
    t.q.add_(20.0)
    t.k.sub_(20.0)
    ShortBackward(t, D64).run("in_order", 0)


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, tmp_path):
    assert_found(bug, tmp_path)


def test_no_false_alarm(tmp_path):
    assert_right_unless_broken(KERNEL, tmp_path)
