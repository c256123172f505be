"""Parts of a decode's result, merged by whoever waits for them: in the simulator the CTAs of a launch come one after the other,
so here the warps of one stand for three of them."""

from dataclasses import replace

import pytest
import torch
from broken import altered

from strobe.kernels.decode import parts as handed_in
from strobe.kernels.decode.arguments import Cached, Job, Kernel, Outputs, Piece, Terms
from strobe.kernels.decode.config import Config
from strobe.kernels.decode.layouts import result_layout
from strobe.kernels.decode.schedule import Requests
from strobe.kernels.gluon import gl, gluon
from strobe.sim import DoubleWrite, Race, SimulationError, simulate
from strobe.sim import attention as attention  # which gives the simulator the models of our assembly

PARTS, ROWS, COLUMNS = 3, 16, 16
GROUP = 4


class Together(Config):
    """All who wait merge a share of the rows, however few the parts."""

    def most_alone(self, rows: int) -> int:
        return 0


CONFIG = Together(COLUMNS, COLUMNS, ROWS, 64, 2, 4, 1)
OF_WGMMA = replace(CONFIG, chunk=COLUMNS)


@gluon.jit
def part(W: gl.constexpr, HAND_IN: gl.constexpr, q, out, lse, parts, sums, arrivals, patience, rows, C: gl.constexpr):
    """The W-th of three CTAs: what it found is W + 1 everywhere, its maximum W and its sum 2."""
    L: gl.constexpr = result_layout(C, 16)
    R: gl.constexpr = gl.SliceLayout(0, L)
    zero = 0 * rows
    outputs = Outputs(q, zero, 16, 16, out, zero, zero + 64, zero + 16, lse, zero, zero + 4, parts, sums, arrivals)
    terms = Terms(None, zero, zero, zero, None, zero, None, None, None, zero, zero, zero, zero, 1.0, None, None, None,
                          False, False, False)  # fmt: skip
    cached = Cached(q, q, None, zero, zero, zero, zero, zero, zero, zero, zero, 0)
    requests = Requests(q, None, None, None, zero, zero, zero, zero, zero, None)
    K = Kernel(requests, outputs, terms, cached, zero, zero, C, 4, 16, 16, 16)
    piece = Piece(zero, zero, zero, zero, zero, rows // 4, zero, zero, zero)
    job = Job(zero, zero + 3, zero, zero, zero, zero + 2 * W, patience)
    o = gl.full([16, 16], W + 1.0, gl.float32, R)
    top = gl.full([16], W + 0.0, gl.float32, gl.SliceLayout(1, R))
    handed_in.leave_part(K, job.place, rows, o, top, 0.0 * top + 2.0, 0)
    HAND_IN(K, piece, job, rows)


@gluon.jit
def together(HAND_IN: gl.constexpr, q, out, lse, parts, sums, arrivals, patience, rows, C: gl.constexpr):
    rest = (q, out, lse, parts, sums, arrivals, patience, rows, C)
    gl.warp_specialize(
        [(part, (0, HAND_IN, *rest)), (part, (1, HAND_IN, *rest)), (part, (2, HAND_IN, *rest))], [4, 4], [128, 128]
    )


def merged(order: str, seed: int, patience: int, rows: int, hand_in=handed_in.hand_in, config=CONFIG) -> None:
    """Merge twice, with the same counters, and check the results."""
    arrivals = torch.zeros(1, 2, dtype=torch.int32)
    for _ in range(2):
        out, lse = torch.full((ROWS // GROUP, GROUP, COLUMNS), torch.nan), torch.full((GROUP, ROWS // GROUP), torch.nan)
        parts, sums = (torch.full((2 * PARTS, *shape), torch.nan) for shape in ((ROWS, COLUMNS), (2, ROWS)))
        q = torch.zeros(1)
        simulate(together, (1,), hand_in, q, out, lse, parts, sums, arrivals, patience, rows, C=config, order=order, seed=seed,
                 rewritable=("arrivals",))  # fmt: skip
        weights = 2.0 ** torch.arange(PARTS)
        wanted = (weights * torch.arange(1, PARTS + 1)).sum() / (2 * weights.sum())
        assert torch.allclose(out[: rows // GROUP], wanted) and out[rows // GROUP :].isnan().all()
        assert torch.allclose(lse[:, : rows // GROUP], torch.log(2 * weights.sum()))
        assert not arrivals.any(), "a counter is not set back"


@pytest.mark.parametrize("patience", [0, 2, 50])
@pytest.mark.parametrize("order", ["in_order", "random", "late", "early"])
@pytest.mark.parametrize("config", [CONFIG, OF_WGMMA], ids=["mma.sync", "wgmma"])
def test_by_whoever_waits(order, patience, config):
    for seed in range(6):
        merged(order, seed, patience, rows=(16, 12)[seed % 2], config=config)


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("if there % GAVE_UP == job.parts:", "if there % GAVE_UP >= job.parts - 1:"),
        ("while turn < turns", "while turn <= turns"),
        ("turn * ROWS, rows, ROWS)", "turn, rows, ROWS)"),
        ("(rows + size - 1) // size", "(rows - 1) // size"),
        ('            gl.atomic_xchg(arrivals + 1, 0, sem="relaxed", scope="gpu")\n', ""),
        ("(arrivals, there, there + GAVE_UP", "(arrivals, there, there"),
        ("known = (absent == 0) | alone", "known = absent >= 0"),
        ("gl.where(alone, 0, number)", "number"),
        ("number, looks = there % GAVE_UP - 1", "number, looks = there % GAVE_UP"),
        ("turn += job.parts - absent", "turn += 1"),
        ("left == job.parts - absent - 1", "left == job.parts - 1"),
        ("left == job.parts - absent - 1", "left >= 0"),
        ('                turn = gl.atomic_add(arrivals + 1, 1, sem="relaxed", scope="gpu")\n', "                turn += 1\n"),
        (
            'there = gl.atomic_add(arrivals, 0, sem="acquire", scope="gpu")',
            'there = gl.atomic_add(arrivals, 0, sem="relaxed", scope="gpu")',
        ),
        ('there + GAVE_UP, sem="acquire"', 'there + GAVE_UP, sem="relaxed"'),
        ("        stays = seen != there\n", "        stays = looks < 0\n"),
    ],
)
def test_a_mistake_is_found(text, becomes, tmp_path):
    wrong = altered(handed_in.__name__, ((text, becomes),), tmp_path).hand_in
    with pytest.raises((AssertionError, SimulationError, Race, DoubleWrite)):
        for seed in range(12):
            merged("random", seed, (2, 50)[seed % 2], rows=16, hand_in=wrong, config=(CONFIG, OF_WGMMA)[seed // 2 % 2])
