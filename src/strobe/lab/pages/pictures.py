"""The pictures of the documentation, drawn from the code that they explain: `python -m strobe.lab.pages.pictures`."""

from __future__ import annotations

from pathlib import Path

import torch

import strobe
from strobe.masks import Mask

DOCS = Path(__file__).parents[4] / "docs"

MASKS: list[tuple[str, Mask, int, int]] = [
    ("Causal(), 8 queries, 8 keys", strobe.Causal(), 8, 8),
    ("Causal(), 4 queries, 8 keys", strobe.Causal(), 4, 8),
    ("Causal(), 8 queries, 5 keys", strobe.Causal(), 8, 5),
    ("Window(left=2, right=1)", strobe.Window(2, 1), 8, 8),
    ("Causal() & Window(left=3)", strobe.Causal() & strobe.Window(3), 8, 8),
    ("Prefix(3)", strobe.Prefix(3), 8, 8),
    ("Document(ids)", strobe.Document(torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])), 8, 8),
    ("Document(ids) & Causal()", strobe.Document(torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]])) & strobe.Causal(), 8, 8),
]


def draw_masks(path: Path) -> None:
    """Which keys (columns) each query (row) sees, from `Mask.dense`."""
    from matplotlib.colors import ListedColormap

    from strobe.lab.bench.plot import plt, save

    figure, panels = plt.subplots(2, 4, figsize=(13, 6.4), layout="constrained")
    for panel, (title, mask, n_q, n_kv) in zip(panels.flat, MASKS, strict=True):
        seen = mask.dense(n_q, n_kv)
        panel.pcolormesh(
            seen.view(n_q, n_kv).numpy(), cmap=ListedColormap(["#e8e8e8", "#0072b2"]), vmin=0, vmax=1, edgecolors="white", lw=2
        )
        panel.invert_yaxis()
        panel.set(title=title, xlabel="keys", ylabel="queries", aspect="equal", xticks=[], yticks=[])
    save(figure, path, dpi=110)


if __name__ == "__main__":
    draw_masks(DOCS / "masks.png")
    print(DOCS / "masks.png")
