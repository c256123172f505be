"""How often the optimistic softmax has to redo a block on real activations.

Runs pretrained encoders on real text, takes q, k and v of every layer, and counts the blocks of 64 rows that would be
computed again: by the model of the algorithm (`strobe.reference.optimistic`), and on a Hopper GPU by the kernel itself.
Each q, k, v is counted under the model's own mask and under a causal one, in bf16 and fp16. `excess` is how far a row's true
maximum lies above that of the block that fixes its reference, in powers of two: 120 of them would make it overflow in bf16.

    python benchmarks/redo_rate.py [--model FOLDER ...] [--passages N] [--json FILE]

A model is a folder that transformers can load; default: the sentence encoder of `strobe demo`. The text is the demo's and the
documents of this repository, cut into passages as long as the model takes.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import strobe
from strobe.call.dispatch import explain_problem
from strobe.device import KNOWN, arch_of
from strobe.lab.bench.machine import provenance, save
from strobe.problem import AttentionProblem, Dense, Operands
from strobe.reference import optimistic
from strobe_cli.demo import model_folder
from strobe_cli.demo_text import TEXTS

ROOT = Path(__file__).parent.parent
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MASKS = {"the model's": strobe.Full(), "causal": strobe.Causal()}
TILES = 128, 128
"""Rows and keys of a tile where the Hopper kernel takes no such problem yet, and so has no config for it."""


@dataclass(frozen=True)
class Layer:
    """What one layer's attention got for one passage: q, k, v [1, length, heads, D] in float32."""

    model: str
    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float

    def problem(self, dtype: torch.dtype, mask: strobe.Mask) -> AttentionProblem:
        _, length, heads, head_dim = self.q.shape
        return AttentionProblem(
            lengths=Dense(1, length, self.k.shape[1]),
            heads_q=heads,
            heads_kv=self.k.shape[2],
            head_dim=head_dim,
            head_dim_v=self.v.shape[3],
            dtype=dtype,
            scale=self.scale,
            mask=mask,
        )


@dataclass
class Count:
    """Blocks of one model, layer, dtype and mask, over all passages."""

    model: str
    layer: int
    dtype: str
    mask: str
    blocks: int = 0
    noted: int = 0
    redone: int | None = None
    """By the kernel; None where it does not run."""
    excess: float = 0.0


def passages(folder: Path, most: int) -> list[torch.Tensor]:
    """Token numbers [1, length] of real text, each as long as the model takes."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    length = min(AutoConfig.from_pretrained(folder, local_files_only=True).max_position_embeddings, 4096)
    documents = [" ".join(TEXTS), *(path.read_text() for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]))]
    found = []
    for text in documents:
        parts = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
        found += [torch.tensor([tokens]) for tokens in parts if len(tokens) == length]
    return found[:: max(1, len(found) // most)][:most]


def layers(folder: Path, tokens: list[torch.Tensor]) -> list[list[Layer]]:
    """For each passage, what every attention of the model got."""
    from transformers import AttentionInterface, AutoModel, logging

    logging.disable_progress_bar()
    seen: list[Layer] = []

    def record(module, query, key, value, attention_mask, *, scaling=None, **_):
        q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        seen.append(Layer(folder.parent.name, len(seen), q, k, v, scale))
        return strobe.attention(q, k, v, scale=scale), None

    AttentionInterface.register("recording", record)
    model = AutoModel.from_pretrained(folder, attn_implementation="recording", local_files_only=True).eval()
    found = []
    for passage in tokens:
        with torch.inference_mode():
            model(input_ids=passage)
        found.append(list(seen))
        seen.clear()
    return found


def tiles_of(problem: AttentionProblem) -> tuple[int, int]:
    """Rows and keys of a tile of the Hopper kernel: they decide which block fixes a row's reference."""
    found = explain_problem(problem, KNOWN["H200"])
    return (found.config.tile_q, found.config.tile_kv) if found.chosen == "sm90" else TILES


def excess(problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor) -> float:
    """The largest distance of a row's maximum from that of its first block, in powers of two, where that sees a key."""
    n_q, n_kv = q.shape[1], k.shape[1]
    k = k.repeat_interleave(problem.group, dim=2)
    x = problem.scale * math.log2(math.e) * torch.einsum("bihd,bjhd->bhij", q.float(), k.float())
    x = x.masked_fill(~problem.mask.dense(n_q, n_kv, device=q.device), -torch.inf)
    worst, (tile_q, tile_kv) = 0.0, tiles_of(problem)
    for first in range(0, n_q, tile_q):
        rows = range(first, min(first + tile_q, n_q))
        lead = optimistic.key_blocks(problem, rows, n_q, n_kv, tile_kv)[0]
        tile = x[:, :, rows.start : rows.stop]
        above = tile.amax(-1) - tile[..., lead.start : lead.stop].amax(-1)
        worst = max(worst, above[above.isfinite()].max().item())
    return worst


def count(layer: Layer, counted: Count, device: torch.device) -> None:
    """Adds the blocks of one layer and passage."""
    dtype, mask = DTYPES[counted.dtype], MASKS[counted.mask]
    problem = layer.problem(dtype, mask)
    q, k, v = (x.to(device, dtype) for x in (layer.q, layer.k, layer.v))
    noted = optimistic.forward(problem, Operands(q, k, v), *tiles_of(problem)).noted
    counted.blocks += noted.numel()
    counted.noted += int(noted.sum())
    counted.excess = max(counted.excess, excess(problem, q, k))
    if explain_problem(problem, arch_of(device)).chosen == "sm90":
        before = strobe.redone_blocks(device)
        strobe.attention(q, k, v, mask=mask, scale=layer.scale)
        counted.redone = (counted.redone or 0) + strobe.redone_blocks(device) - before


def measure(folder: Path, most: int, device: torch.device) -> list[Count]:
    """The counts of one model: one for each layer, dtype and mask."""
    by_passage = layers(folder, passages(folder, most))
    counts = {}
    for found in track(by_passage, f"counting {folder.parent.name}", console=Console(stderr=True)):
        for layer in found:
            for dtype in DTYPES:
                for mask in MASKS:
                    key = (layer.layer, dtype, mask)
                    counted = counts.setdefault(key, Count(layer.model, layer.layer, dtype, mask))
                    count(layer, counted, device)
    return list(counts.values())


def table(counts: list[Count]) -> Table:
    """A row for each model, dtype and mask: all its layers together."""
    result = Table(title=f"blocks of {optimistic.NOTED_ROWS} rows to redo")
    for heading in ("model", "dtype", "mask", "blocks", "noted", "redone by the kernel", "largest excess, powers of two"):
        result.add_column(heading, justify="left" if heading in ("model", "dtype", "mask") else "right")
    groups: dict[tuple[str, str, str], list[Count]] = {}
    for counted in counts:
        groups.setdefault((counted.model, counted.dtype, counted.mask), []).append(counted)
    for names, group in groups.items():
        ran = [counted.redone for counted in group if counted.redone is not None]
        cells = sum(c.blocks for c in group), sum(c.noted for c in group), sum(ran) if ran else "-"
        result.add_row(*names, *map(str, cells), f"{max(c.excess for c in group):.1f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", help="a folder that transformers can load; may be repeated")
    parser.add_argument("--passages", type=int, default=8, help="at most so many for each model (default 8)")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/redo-rate.json")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    counts = [c for folder in options.model or [model_folder()] for c in measure(folder, options.passages, device)]
    Console(width=120).print(table(counts))
    path = options.json or ROOT / "benchmarks/results/redo-rate.json"
    result = {"passages": options.passages, "counts": [asdict(c) for c in counts]}
    print(f"written: {save(path, {'what': 'redo rate', **provenance(device), **result})}")


if __name__ == "__main__":
    main()
