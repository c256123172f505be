"""Hopper's fp8 forward, its source unchanged, in the simulator; and mistakes made in it, one at a time."""

import math
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch
from broken import Bug, Kernel, Run, altered, assert_found, assert_right_unless_broken, one_edit
from problems import Case, Tensors, describe, tensors

from strobe.kernels.sm90 import fp8, fp8_transpose
from strobe.kernels.sm90.config import Config
from strobe.reference.dense import attention
from strobe.sim import BarrierMisuse, Deadlock, DoubleWrite, MissingFence, OutOfBounds, Race, Unfinished, Uninitialised
from strobe.sim.attention import fp8_launches

E4M3 = torch.float8_e4m3fn
ORDERS = (("in_order", 0), ("random", 1), ("late", 0), ("early", 0), ("timed", 0), ("uneven", 1))
FP8, TRANSPOSE = "strobe.kernels.sm90.fp8", "strobe.kernels.sm90.fp8_transpose"


@pytest.fixture(autouse=True)
def three_groups(monkeypatch):
    """At head dim 64, where so few keys would else take two."""
    monkeypatch.setattr(fp8, "MANY_KEYS", 0)


class Fp8:
    """Both launches of a forward, for the inputs t rounded to e4m3. descales: None, "heads" or "blocks". aligned: whether TMA
    can read V."""

    def __init__(
        self, t: Tensors, kernels: ModuleType = fp8, descales: str | None = "heads", ctas: int = 1,
        transposing: ModuleType = fp8_transpose, aligned: bool = True,
    ):  # fmt: skip
        self.kernels, self.ctas, self.transposing = kernels, ctas, transposing
        problem, operands = describe(t)
        self.problem = replace(problem, dtype=E4M3, unaligned=() if aligned else ("v",))
        self.operands = operands._replace(**{name: getattr(operands, name).to(E4M3) for name in "qkv"})
        found, self.exact = self._described(descales)
        names = ("q_descale", "k_descale", "v_descale")
        self.operands = self.operands._replace(**dict(zip(names, found, strict=True)))

    def _described(self, by: str | None):
        """The descales, and out and lse in float64 of what the inputs stand for."""
        problem, operands = self.problem, self.operands
        if by is None:
            return (None, None, None), attention(problem, _float64(operands), torch.float64)
        random = torch.Generator().manual_seed(3)
        batch, kv = problem.lengths.batch, problem.heads_kv
        q, k, v = (torch.rand(batch, kv, generator=random) + 0.5 for _ in range(3))
        shares = [_by_row(q, operands.q, operands.cu_seqlens_q)] + [
            _by_row(x, y, operands.cu_seqlens_kv) for x, y in ((k, operands.k), (v, operands.v))
        ]
        if by == "blocks":
            q = torch.rand(batch, problem.heads_q, -(-problem.lengths.seqlen_q // 128), generator=random) + 0.5
            k = torch.rand(batch, kv, -(-problem.lengths.seqlen_kv // 128), generator=random) + 0.5
            for i, (x, y) in enumerate(((q, operands.q), (k, operands.k))):
                shares[i] = x.transpose(1, 2).repeat_interleave(128, 1)[:, : y.shape[1]]
        values = _float64(operands)
        values = values._replace(
            **{name: getattr(values, name) * share[..., None] for name, share in zip("qkv", shares, strict=True)}
        )
        return (q, k, v), attention(problem, values, torch.float64)

    def run(self, order: str, seed: int) -> None:
        """AssertionError if the results are wrong: weights are rounded to e4m3, the LSE is not made of them."""
        first, second, out, lse = fp8_launches(self.kernels, self.problem, self.operands, self.ctas, self.transposing)
        second.simulate(order, seed, after=first.simulate(order, seed))
        want, want_lse = self.exact
        error = ((out.double() - want).norm() / want.norm()).item()
        assert error < 0.04, f"out: error {error:.3f}"
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
        for name in ("counters", "transposed"):
            left = second.args[self.kernels.fp8_kernel.arg_names.index(name)]
            assert left is None or not left.any(), f"{name} are left"


def _float64(operands):
    return operands._replace(q=operands.q.double(), k=operands.k.double(), v=operands.v.double())


def _by_row(descale: torch.Tensor, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """A descale [batch, heads_kv] for each row and head of x."""
    by_head = descale.repeat_interleave(x.shape[-2] // descale.shape[1], 1)
    return by_head[:, None] if cu_seqlens is None else by_head.repeat_interleave(cu_seqlens.diff(), 0)


def case(n_q, n_kv, head_dim=64, heads=(2, 1), batch=1, **more) -> Case:
    return Case(n_q, n_kv, batch, *heads, head_dim, **more)


CASES = [
    (case(1, 1), None, 1),
    (case(200, 300), None, 2),
    (case(300, 170, mask="causal"), "heads", 1),  # the first rows see nothing
    (case(200, 200, mask="causal"), "heads", 2),  # in three groups, from the diagonal on
    (case(300, 364, heads=(3, 3), mask="causal", logits=8.0), "blocks", 1),  # of the diagonal some rows see one key
    (case(200, 300, heads=(3, 3), mask="window"), "blocks", 1),
    (case(150, 260, heads=(1, 1), mask="ahead"), "heads", 1),  # of three groups, the last passes over a block
    (case(130, 306, heads=(3, 3), mask="ahead"), None, 1),  # the last group sees the leading block alone
    (case(150, 400, mask="prefix"), "blocks", 1),
    (case(150, 170, batch=3, packed=True, mask="causal"), "heads", 1),
    (case(130, 150, 128, logits=30.0), "heads", 1),  # references move
    (case(130, 150, 256, heads=(1, 1), mask="causal"), "heads", 1),
    (case(130, 150, 96), "heads", 1),
    (case(70, 150, 16, heads=(1, 1), mask="causal"), None, 1),
    (case(70, 150, 144, heads=(1, 1)), None, 1),
    (case(130, 260, softcap=2.0, mask="causal", logits=5.0), "blocks", 1),
    (case(150, 90, heads=(4, 2), sinks=True, mask="causal", logits=30.0), "heads", 1),  # some sinks are far above all scores
    (case(130, 200, batch=4, seqused=True, mask="causal"), "heads", 1),  # of some that have keys, not all rows are used
    (case(130, 200, batch=3, seqused=True, sinks=True, softcap=3.0, packed=True), "heads", 1),
    (case(70, 390, heads=(1, 1), mask="causal"), "heads", 1),  # from the diagonal on: four blocks, of which a group has three
]


@pytest.mark.parametrize("case, descales, ctas", CASES, ids=str)
def test_in_every_order(case, descales, ctas):
    forward = Fp8(tensors(case, torch.float16), descales=descales, ctas=ctas)
    for order, seed in ORDERS:
        forward.run(order, seed)


@pytest.mark.parametrize("case, descales, ctas", [CASES[1], CASES[4], CASES[9], CASES[12], CASES[17]], ids=str)
def test_values_that_tma_cannot_read(case, descales, ctas):
    forward = Fp8(tensors(case, torch.float16), descales=descales, ctas=ctas, aligned=False)
    for order, seed in ORDERS:
        forward.run(order, seed)


@pytest.mark.parametrize("case", [case(70, 700, 256, heads=(3, 3)), case(70, 700, batch=3, packed=True)], ids=str)
def test_several_chunks_of_values(case):
    """More than there are stages; short sequences have fewer."""
    forward = Fp8(tensors(case, torch.float16), ctas=2)
    for order, seed in ORDERS:
        forward.run(order, seed)


def test_few_keys_take_two_groups(monkeypatch):
    monkeypatch.undo()
    t = tensors(case(300, 300, mask="causal"), torch.float16)
    forward = Fp8(t)
    assert fp8.config(forward.problem).groups == 2
    for order, seed in ORDERS:
        forward.run(order, seed)


@pytest.mark.parametrize("head_dim, mask", [(64, "window"), (128, "causal")])
def test_values_that_are_all_the_same(head_dim, mask):
    """Their mean is what they are, however weights are rounded: these are divided by their own sum."""
    t = tensors(case(130, 400, head_dim, mask=mask, logits=4.0), torch.float16)
    t.v.fill_(3.0)
    forward = Fp8(t, descales=None)
    first, second, out, _lse = fp8_launches(fp8, forward.problem, forward.operands)
    second.simulate("random", 1, after=first.simulate("random", 1))
    assert (out.float() - 3.0).abs().max() <= 3.0 / 128


def outgrowing(kernels: ModuleType = fp8) -> Fp8:
    """Rows whose own block of keys, where one sees its own key alone, has weights that are 2^-130 of those to the left."""
    t = tensors(case(256, 256, heads=(1, 1), mask="causal"), torch.float16)
    t.q.zero_()[..., 0] = 1
    t.k.zero_()[:, :128, :, 0] = 2
    forward = Fp8(t, kernels, descales=None)
    forward.problem = replace(forward.problem, scale=130 * math.log(2) / 2)
    forward.exact = attention(forward.problem, _float64(forward.operands), torch.float64)
    return forward


def test_a_row_is_not_judged_by_its_own_key():
    forward = outgrowing()
    assert fp8.is_from_diagonal(forward.problem, fp8.config(forward.problem))
    for order, seed in ORDERS:
        forward.run(order, seed)


def test_a_row_that_is_judged_by_its_own_key_is_lost(tmp_path):
    kernels = altered(
        FP8, (("            m += higher\n            lowered = gl.exp2(-higher)\n", "            pass\n"),), tmp_path
    )
    kernels.MANY_KEYS = 0
    with pytest.raises(AssertionError, match="error nan"):
        outgrowing(kernels).run("in_order", 0)


# ---- mistakes


def started(kernels: ModuleType, bug: Bug, t: Tensors, config: Config) -> Run:
    kernels._CONFIGS, kernels.MANY_KEYS = {config.head_dim: config}, 0
    return Fp8(t, kernels, ctas=bug.ctas).run


def started_transposing(transposing: ModuleType, bug: Bug, t: Tensors, config: Config) -> Run:
    return Fp8(t, ctas=bug.ctas, transposing=transposing).run


def started_unaligned(transposing: ModuleType, bug: Bug, t: Tensors, config: Config) -> Run:
    return Fp8(t, ctas=bug.ctas, transposing=transposing, aligned=False).run


# Two tiles of one CTA, of three blocks each; with logits so large, references move.
KERNEL = Kernel(FP8, 90, case(130, 170, logits=30.0), Config(64, 64, 2, 64, 2), started)
# Twelve chunks, six of a head.
MANY_CHUNKS, WIDE = case(70, 700, 256, heads=(2, 2)), Config(256, 256, 2, 128, 2)
VALUES = Kernel(TRANSPOSE, 90, MANY_CHUNKS, WIDE, started_transposing)
TOO_EARLY = (Race, Uninitialised, Unfinished, MissingFence)
WRONG_PHASE = (Race, Uninitialised, Deadlock, BarrierMisuse, Unfinished)
kernel = partial(one_edit, KERNEL, FP8)
# Three groups of rows, whose diagonals lie in different blocks.
DIAGONAL = Kernel(FP8, 90, case(200, 264, mask="causal", logits=20.0), Config(64, 64, 3, 128, 4), started)
diagonal = partial(one_edit, DIAGONAL, FP8)


values = partial(one_edit, VALUES, TRANSPOSE)
unaligned = partial(one_edit, Kernel(TRANSPOSE, 90, case(70, 170, 48), WIDE, started_unaligned), TRANSPOSE)
awaited = partial(one_edit, Kernel(FP8, 90, MANY_CHUNKS, WIDE, started), TRANSPOSE)


def of(case: Case, *edit) -> Bug:
    return one_edit(Kernel(FP8, 90, case, Config(64, 64, 2, 64, 2), started), FP8, *edit)


CAPPED = "        s, _ = score_and_factor(s, None, None, scale, K.score.outer, None)\n"
USED = case(70, 170, batch=2, seqused=True)
USED_IN_PART = case(70, 170, batch=4, seqused=True)
UNUSED_ROWS = "gl.where(gl.convert_layout(rows < n_q, rows_of(K.C.head_dim_v))[:, None], o, 0.0)"
BESIDE = "    s, acc, rounded_sum = beside_output(K, s, p, before, acc, rounded_sum)\n"
IN_STEP = "    K.k.release(g)\n    state, p, factor"
V_BYTES = "    mbarrier.expect(full, v_desc.block_type.nbytes)\n"
ACC_READY = "    acc = warpgroup_mma_wait(0, deps=[acc])\n    p = from_now(p)\n    K.v.release(before)\n"
STORED = """            store_words(T, chunk, load_bytes(T, g))
            T.ring.release(g)  # what was loaded is in registers: it has been stored
"""
RAISED = """            T.stored.wait(g)
            gl.atomic_add(T.flags + chunk.batch * T.heads + chunk.head, chunk.end - chunk.begin, sem="release")"""
BUGS = [
    unaligned("the transposition of a V that TMA cannot read does not take its turn", "    take_program_turn()\n", "",
              (Unfinished,)),
    unaligned("keys lie in their own order", "(e // 2 * 8 + e % 2)", "e", ()),
    unaligned("columns of V that are not there", "there & (d < DIM)[None, :]", "there", (OutOfBounds,)),
    values("the transposition does not take its turn", "    take_turn()\n", "", (Unfinished,)),
    kernel("the forward never takes its turn", "not None:\n        take_turn()\n", "not None:\n        pass\n",
           (Race, Unfinished)),
    kernel("values are not waited for", "            await_values(K.transposed, pair, work.n_kv, K.C.tile_kv)\n",
           "            pass\n", (Race,)),
    awaited("one block is waited for", "flags + pair, (n + TILE - 1) // TILE, 0", "flags + pair, 1, 0", (Race,)),
    awaited("what is known of V^T is not fenced", "TILE, 0)\n    fence_async_global()\n", "TILE, 0)\n", (Race,)),
    values("a flag is raised early", RAISED, "\n".join([*RAISED.split("\n")[1:], RAISED.split("\n")[0]]), (Race,)),
    values("a flag is raised without a release", ', sem="release")', ', sem="relaxed")', (Race,)),
    values("a flag counts too many blocks", "chunk.end - chunk.begin, sem", "chunk.end, sem", (Race,)),
    values("flags are never free", "            T.stored.release(g)\n", "", (Deadlock,)),
    values("a chunk is not waited for", "            T.ring.wait(g)\n", "", WRONG_PHASE),
    values("a chunk is given back before it is read", STORED,
           "            x = load_bytes(T, g)\n            T.ring.release(g)\n            store_words(T, chunk, x)\n", (Race,)),
    values("V^T of another head", "chunk.head.to(gl.int64) * T.blocks", "(chunk.head * 0).to(gl.int64) * T.blocks",
           (DoubleWrite, Race)),
    kernel("flags are left", "gl.store(K.transposed + pair, 0,", "gl.store(K.transposed + pair, 1,", ()),
    kernel("the bytes of V are not expected", V_BYTES, "", WRONG_PHASE),
    kernel("V's block is the one before", "first, i, kv_head)\n            i = next",
           "first, i - 1, kv_head)\n            i = next", ()),
    kernel("K is not waited for", "    K.k.wait(g)\n    s = start_scores(q,", "    s = start_scores(q,", WRONG_PHASE),
    kernel("K is given back before its product is done", BESIDE + IN_STEP,
           "    K.k.release(g)\n" + BESIDE + IN_STEP.partition("\n")[2], (Race,)),
    kernel("K is never given back", IN_STEP, IN_STEP.partition("\n")[2], (Deadlock,)),
    kernel("the scores are used too early", "mma_wait(1, deps=[s, of_block])", "mma_wait(3, deps=[s, of_block])",
           (Unfinished, Race)),
    kernel("sums of weights are used too early", "    s, of_block = warpgroup_mma_wait(1, deps=[s, of_block])\n",
           "    s = warpgroup_mma_wait(1, deps=[s])\n", (Unfinished, Race)),
    kernel("the ones are not there for the tensor cores", "    fence_async_shared()\n    if transposed", "    if transposed",
           (MissingFence, *WRONG_PHASE)),
    kernel("V is given back before its product is done", ACC_READY,
           "    K.v.release(before)\n" + ACC_READY.replace("    K.v.release(before)\n", ""), (Race,)),
    kernel("O is used before it is done", ACC_READY, ACC_READY.replace("(0,", "(1,"), (Unfinished, Race)),
    kernel("O is not rescaled", "return scaled(acc, factor), rounded_sum", "return acc, rounded_sum", ()),
    kernel("Q is given back twice", "        mbarrier.arrive(K.memory.q_empty.index(slot), count=1)\n",
           "        mbarrier.arrive(K.memory.q_empty.index(slot), count=1)\n" * 2, (BarrierMisuse, Race, Deadlock)),
    kernel("v's descale is forgotten", "descaled(1.0, K.descales.v, kv_head)", "1.0", ()),
    diagonal("the diagonal's block is not masked", "        if FIRST:\n", "        if not FIRST:\n", ()),
    diagonal("the producer begins elsewhere", "lead = from_diagonal(0, work.end)", "lead = work.begin", ()),
    diagonal("a block of K is not passed over", "        if K.MASKED:\n            pass_over(K.k, before + 1, g)\n", "",
             (Deadlock, BarrierMisuse)),
    of(case(70, 170, softcap=2.0, logits=5.0), "scores are not capped", CAPPED, "        s = s * scale\n", ()),
    of(case(70, 90, sinks=True), "a sink is in the LSE alone", "        rounded_sum += gl.exp2(sink - m)", "        m = m", ()),
    of(USED_IN_PART, "rows that are not used are written", UNUSED_ROWS, "o", ()),
    of(USED, "keys that are not used", "right, prefix, used_q, used_kv, None", "right, prefix, used_q, None, None",
       (Deadlock,)),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, tmp_path):
    assert_found(bug, tmp_path)


@pytest.mark.exhaustive
def test_no_false_alarm(tmp_path):
    assert_right_unless_broken(KERNEL, tmp_path)
