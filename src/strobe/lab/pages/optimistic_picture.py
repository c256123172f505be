"""The picture of docs/optimistic_softmax.md, drawn from the model: `python -m strobe.lab.pages.optimistic_picture`."""

from __future__ import annotations

import math
from pathlib import Path

import torch

import strobe
from strobe.masks import Mask
from strobe.problem import AttentionProblem, Dense, Operands
from strobe.reference import dense, optimistic

PATH = Path(__file__).parents[4] / "docs" / "optimistic_softmax.png"
TILE, KEYS = 128, 256
FLOOR = 2.0**-18
WORST = 4.0
"""Where an error is drawn that is no number."""


def result(dtype: torch.dtype, mask: Mask, row: float, later: float) -> tuple[float, bool]:
    """The worst error of the last 64 rows, relative to the largest value and without regard to notes; and whether they are
    noted. Scores are `row`, in powers of two, and a fraction; those of later keys exceed the first 128 by `later`."""
    random = torch.Generator().manual_seed(0)
    q, k = torch.zeros(1, KEYS, 1, 8), torch.zeros(1, KEYS, 1, 8)
    q[..., 0], k[..., 0] = 1.0, row
    q[..., 1], k[:, TILE:, :, 1] = 1.0, later
    q[..., 2], k[..., 2] = 1.0, torch.rand(KEYS, 1, generator=random)
    operands = Operands(*(x.to(dtype) for x in (q, k, torch.randn(k.shape, generator=random))))
    # The scale ln 2 makes products powers of two.
    problem = AttentionProblem(Dense(1, KEYS, KEYS), 1, 1, 8, 8, dtype, math.log(2.0), mask)
    got, want = optimistic.forward(problem, operands, TILE, 64), dense.attention(problem, operands)[0]
    error = ((got.out.double() - want).abs() / operands.v.abs().max())[:, -64:].amax().item()
    return min(error, WORST) if math.isfinite(error) else WORST, bool(got.noted[-1])


def draw(path: Path) -> None:
    """The error of rows, and where they are noted, against how wrong the first block is."""
    from strobe.lab.bench.plot import plt, save

    figure, panels = plt.subplots(2, 2, figsize=(11, 6), layout="constrained", sharey=True)
    kinds = (
        ("judged: later keys exceed the first block by 2^k", strobe.Full(), lambda k: (0.0, float(k))),
        ("not judged: scores of k and a fraction", strobe.Window(63, 0), lambda k: (float(k), 0.0)),
    )
    for across, dtype in zip(panels.T, (torch.bfloat16, torch.float16), strict=True):
        for panel, (title, mask, scores) in zip(across, kinds, strict=True):
            ks = range(-140, 141, 2) if dtype == torch.bfloat16 else range(-40, 41)
            errors, noted = zip(*(result(dtype, mask, *scores(k)) for k in ks), strict=True)
            panel.fill_between(ks, FLOOR, WORST, where=noted, step="mid", color="#e8e8e8", label="noted")
            panel.plot(ks, errors, color="#0072b2", lw=2, label="error, if it were not computed again")
            panel.axhline(torch.finfo(dtype).eps, color="#d55e00", ls=":", label="eps of the dtype")
            panel.set_yscale("log", base=2)
            panel.set(
                title=f"{str(dtype).removeprefix('torch.')}, {title}", xlabel="k", ylim=(FLOOR, WORST), xlim=(ks[0], ks[-1])
            )
    panels[0, 0].legend(loc="upper left", frameon=False)
    save(figure, path, dpi=110)


if __name__ == "__main__":
    draw(PATH)
    print(PATH)
