"""The one list of attention problems that everything is tested on, and what "right" means.

Right: the error against the float64 reference is at most 2x (outputs) or 3x (gradients) that of the same formula in
PyTorch at the same precision, plus one rounding of the result and of the scores, which are kept in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

import strobe
from strobe.call import prepared_calls
from strobe.lab.fuzz.right import SEED, Results, Tensors, formula, upstream
from strobe.lab.fuzz.right import describe as describe
from strobe.masks import Blocks, Mask
from strobe.scores import Score


@dataclass(frozen=True)
class Case:
    """A problem in words; `tensors` makes its inputs. mask: "full", "causal", "window", "ahead" (a window that ends far beyond
    the diagonal), "prefix", "documents", "all", "hashes" (documents with numbers of 64 bits), "function", "functions" (two of
    them, and a window), "blocks" (of 32 rows and 48 keys), "blocks by head" (of 16 and 64, by batch entry and head, and a
    function and a window)."""

    n_q: int
    n_kv: int
    batch: int = 2
    heads_q: int = 2
    heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int | None = None
    mask: str = "full"
    softcap: float = 0.0
    alibi: bool = False
    bias: bool = False
    sinks: bool = False
    function: bool = False
    packed: bool = False
    seqused: bool = False
    dropout: float = 0.0
    logits: float = 1.0
    """Standard deviation of q: 1 is ordinary, 30 makes softmax nearly an argmax."""
    scale: float | None = None

    def __str__(self) -> str:
        head_dim = f"d{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v else "")
        parts = [f"{self.n_q}x{self.n_kv}", f"b{self.batch}", f"h{self.heads_q}.{self.heads_kv}", head_dim, self.mask]
        parts += ["softcap"] * bool(self.softcap)
        parts += [name for name in ("alibi", "bias", "sinks", "function", "packed", "seqused") if getattr(self, name)]
        parts += [f"dropout{self.dropout:g}"] * bool(self.dropout)
        parts += [] if self.scale is None else [f"scale{self.scale:g}"]
        return "-".join(parts + [f"logits{self.logits:g}"] * (self.logits != 1))


CASES = (
    Case(64, 64),
    Case(129, 129, mask="causal"),
    Case(100, 260, mask="causal"),
    Case(260, 100, mask="causal"),  # the first rows see nothing
    Case(1, 77, mask="causal"),
    Case(77, 1),
    Case(0, 5),
    Case(5, 0),
    Case(0, 0),
    Case(5, 5, batch=0),
    Case(130, 70, heads_q=6, heads_kv=2, mask="causal"),
    Case(65, 200, heads_q=4, heads_kv=1, head_dim=64),
    Case(70, 70, head_dim=8),
    Case(70, 90, head_dim=40, mask="causal"),
    Case(50, 70, head_dim=96, mask="window"),
    Case(40, 50, head_dim=128, batch=1, mask="causal"),
    Case(33, 40, head_dim=256, batch=1),
    Case(33, 40, head_dim=192, head_dim_v=128, batch=1, mask="causal"),
    Case(150, 150, mask="window"),
    Case(90, 200, mask="window"),
    Case(200, 90, mask="window"),
    Case(128, 128, mask="ahead"),  # of the blocks of a tile, none is whole and the last is cut
    Case(150, 150, mask="prefix"),
    Case(60, 150, mask="prefix"),
    Case(150, 150, mask="documents"),
    Case(140, 140, mask="all"),
    Case(70, 150, mask="hashes"),  # alike in their lower 32 bits
    Case(80, 100, softcap=5.0, mask="causal"),
    Case(80, 100, alibi=True, mask="causal"),
    Case(80, 100, alibi=True, softcap=3.0),
    Case(60, 70, packed=True, batch=4, mask="causal"),
    Case(60, 70, packed=True, batch=3, heads_q=4, alibi=True),
    Case(60, 70, packed=True, batch=5, mask="window"),
    Case(80, 90, logits=30.0, mask="causal"),
    Case(80, 90, logits=300.0),
    Case(16, 16, head_dim=128, mask="causal", scale=-0.3),
    Case(80, 100, heads_q=4, bias=True, mask="causal"),
    Case(80, 100, bias=True),
    Case(40, 150, heads_q=4, sinks=True, mask="causal"),
    Case(150, 40, sinks=True, mask="causal"),  # the first rows see their sink alone
    Case(70, 90, sinks=True, mask="window", packed=True, batch=4),
    Case(30, 0, sinks=True),
    Case(90, 1, sinks=True, logits=300.0),  # some sinks are far above all scores, or far below
    Case(80, 100, heads_q=4, function=True, mask="causal"),
    Case(80, 100, function=True, packed=True, batch=3),
    Case(80, 100, heads_q=4, mask="function"),
    Case(150, 130, mask="functions"),
    Case(70, 90, mask="function", packed=True, batch=3),
    Case(90, 120, seqused=True, batch=4),
    Case(90, 120, seqused=True, batch=4, mask="causal", heads_q=4, sinks=True),
    Case(90, 120, seqused=True, batch=4, mask="documents"),
    Case(60, 70, seqused=True, packed=True, batch=5, mask="causal"),
    Case(
        100, 110, heads_q=4, softcap=4.0, alibi=True, bias=True, sinks=True, function=True, seqused=True, batch=3,
        mask="functions",
    ),
    Case(80, 100, softcap=4.0, alibi=True, sinks=True, function=True, seqused=True, packed=True, batch=3, mask="function"),
    Case(130, 100, dropout=0.2, heads_q=4),
    Case(70, 90, dropout=0.5, packed=True, batch=4, mask="causal"),
    Case(80, 110, dropout=0.1, heads_q=4, softcap=4.0, bias=True, sinks=True, function=True, seqused=True, batch=3, mask="all"),
)  # fmt: skip


BLOCK_CASES = (
    Case(60, 100, mask="blocks"),
    Case(100, 60, mask="blocks", heads_q=4, head_dim=64, sinks=True),  # some rows see nothing but their sink
    Case(40, 100, mask="blocks by head", heads_q=4, heads_kv=1, batch=2),
    Case(30, 70, mask="blocks by head", heads_q=2, softcap=4.0, alibi=True, bias=True, function=True, dropout=0.1),
)
"""Those of masks with blocks, which the portable kernels and `tiled` take, and no other backend."""


def tensors(case: Case, dtype=torch.float32, device="cpu", seed: int = 0) -> Tensors:
    """Random inputs of a case, the same for the same seed on every device."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=random) * scale).to(device, dtype)

    keywords: dict = {}
    if case.packed:
        lengths_q, lengths_kv = (_lengths(case.batch, n, random) for n in (case.n_q, case.n_kv))
        leading_q, leading_kv = (int(lengths_q.sum()),), (int(lengths_kv.sum()),)
        keywords |= dict(cu_seqlens_q=_cumulative(lengths_q).to(device), cu_seqlens_kv=_cumulative(lengths_kv).to(device))
        keywords |= dict(max_seqlen_q=case.n_q, max_seqlen_kv=case.n_kv)
    else:
        leading_q, leading_kv = (case.batch, case.n_q), (case.batch, case.n_kv)
    q = normal(*leading_q, case.heads_q, case.head_dim, scale=case.logits)
    k = normal(*leading_kv, case.heads_kv, case.head_dim)
    v = normal(*leading_kv, case.heads_kv, case.head_dim_v or case.head_dim)
    if case.seqused:
        keywords |= _seqused(case, keywords, random, device)
    keywords |= dict(mask=_mask(case, random, device), score=_score(case, random, device))
    if case.dropout:
        keywords |= dict(dropout_p=case.dropout)
    if case.scale is not None:
        keywords |= dict(scale=case.scale)
    return Tensors(q, k, v, keywords)


def _lengths(batch: int, longest: int, random: torch.Generator) -> torch.Tensor:
    """Lengths from 0 to longest, both among them."""
    lengths = torch.randint(0, longest + 1, (batch,), generator=random)
    lengths[0], lengths[-1] = longest, 0
    return lengths[torch.randperm(batch, generator=random)]


def _seqused(case: Case, keywords: dict, random: torch.Generator, device) -> dict:
    """How much is used: anything from nothing to all of each entry, both among them."""
    used = {}
    for name, n in (("q", case.n_q), ("kv", case.n_kv)):
        full = keywords[f"cu_seqlens_{name}"].diff().cpu() if case.packed else torch.full((case.batch,), n)
        share = torch.rand(case.batch, generator=random)
        share[0], share[-1] = 1.0, 0.0
        used[f"seqused_{name}"] = (full * share[torch.randperm(case.batch, generator=random)]).to(device, torch.int32)
    return used


def _score(case: Case, random: torch.Generator, device) -> Score:
    def uniform(*shape):
        return torch.rand(*shape, generator=random).to(device)

    bias = sinks = None
    slopes = uniform(case.batch, case.heads_q) if case.alibi else None
    if case.bias:
        bias = 4 * uniform(case.batch, 1, case.n_q, case.n_kv)
        bias[..., ::5] = -torch.inf
        bias[:, :, 3] = -torch.inf
        bias = bias.transpose(0, 1).contiguous().transpose(0, 1)
    if case.sinks:
        sinks = 6 * uniform(case.heads_q) - 3
    return Score(case.softcap, slopes, bias, sinks, *(_score_function, _score_gradient) if case.function else ())


STEP = 0.25


def _distance(a, b):
    return abs(a - b) * STEP


def _score_function(score, batch, head, q_index, kv_index):
    """Of all its arguments, a number and a function of this module."""
    near = strobe.math.where(_distance(q_index, kv_index) < 4.0, 1.5 * strobe.math.tanh(score), score)
    return near - 0.01 * max(kv_index, 20) * strobe.math.exp2(-(head + 1.0)) + strobe.math.sqrt(batch + 2.0)


def _score_gradient(score, batch, head, q_index, kv_index):
    t = strobe.math.tanh(score)
    return strobe.math.where(_distance(q_index, kv_index) < 4.0, 1.5 * (1.0 - t * t), 1.0)


def _mask_function(batch, head, q_index, kv_index):
    return ((q_index + kv_index * (head + 1)) % 3 != 0) & (kv_index != 7 + batch)


def _other_mask_function(batch, head, q_index, kv_index):
    return (q_index < 20) | (kv_index > 2)


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)


def _mask(case: Case, random: torch.Generator, device) -> Mask:
    if case.mask in ("documents", "all"):
        ids_q = torch.randint(0, 3, (case.batch, case.n_q), generator=random).sort(-1).values.to(device)
        ids_kv = torch.randint(0, 3, (case.batch, case.n_kv), generator=random).sort(-1).values.to(device)
        documents = strobe.Document(ids_q, ids_kv)
    if case.mask == "hashes":
        ids_q, ids_kv = (torch.randint(-2, 2, (case.batch, n), generator=random) << 32 for n in (case.n_q, case.n_kv))
        return strobe.Document(ids_q.to(device), ids_kv.to(device))
    if case.mask == "documents":
        return documents
    if case.mask == "all":
        return strobe.Window(90, 20) & strobe.Prefix(30) & documents
    if case.mask == "blocks":
        return _blocks(case, (1, 1), (32, 48), random, device)
    if case.mask == "blocks by head":
        by_head = _blocks(case, (case.batch, case.heads_q), (16, 64), random, device)
        return by_head & strobe.Visible(_mask_function) & strobe.Window(90, 60)
    masks = {
        "full": strobe.Full(),
        "causal": strobe.Causal(),
        "window": strobe.Window(37, 11),
        "ahead": strobe.Window(37, 200),
        "behind": strobe.Window(10, None),
        "prefix": strobe.Prefix(41),
        "function": strobe.Visible(_mask_function),
        "functions": strobe.Visible(_mask_function) & strobe.Visible(_other_mask_function) & strobe.Window(90, 60),
    }
    return masks[case.mask]


def _blocks(case: Case, leading: tuple[int, int], size: tuple[int, int], random: torch.Generator, device) -> Mask:
    """Of the blocks a third is hidden, a third seen whole."""
    number = -(-case.n_q // size[0]), -(-case.n_kv // size[1])
    kinds = torch.randint(0, 6, (*leading, *number), generator=random, dtype=torch.int32)
    kinds = torch.where(kinds > 3, kinds - 4, kinds)
    pairs = torch.randint(0, 2, (2, *size), generator=random, dtype=torch.uint8)
    return Mask(blocks=Blocks(kinds.to(device), pairs.to(device)))


def run(t: Tensors, backend: str | None) -> Results:
    """strobe.attention and its gradients."""
    t = t.with_gradients()
    torch.manual_seed(SEED)
    out, lse = strobe.attention(t.q, t.k, t.v, return_lse=True, backend=backend, **t.keywords)
    return Results(out.detach(), lse.detach(), **t.gradients((out, lse), upstream(out, lse)))


@contextmanager
def without_plans() -> Iterator[None]:
    """Within it, calls go to the operators, and these to the backends' kernels."""
    with mock.patch.multiple(prepared_calls, **dict.fromkeys(("attention", "forward", "backward"), lambda *call: None)):
        yield


def check(results: Results, t: Tensors, fields=Results.ALL) -> None:
    """Assert that results are right for the inputs t."""
    exact, same_precision = formula(t), formula(t, t.q.dtype)
    rounding = torch.finfo(t.q.dtype).eps
    # Scores and the LSE are kept in float32: P = exp(s - LSE) is uncertain by their rounding where they are large.
    of_scores = (
        4 * torch.finfo(torch.float32).eps * exact.lse.nan_to_num(neginf=0.0).abs().max().item() if exact.lse.numel() else 0.0
    )
    for name in fields:
        if getattr(results, name) is None:
            continue
        got, want, usual = (getattr(r, name).double() for r in (results, exact, same_precision))
        assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, not {list(want.shape)}"
        nothing = torch.isneginf(want)
        assert torch.equal(torch.isneginf(got), nothing), f"{name}: -inf in other places than the reference"
        got, want, usual = (torch.where(nothing, 0.0, x) for x in (got, want, usual))
        assert bool(torch.isfinite(got).all()), f"{name}: not finite"
        if not want.numel():
            continue
        factor = 2.0 if name in ("out", "lse") else 3.0
        allowed = factor * (usual - want).abs().max() + (rounding + of_scores) * want.abs().max() + 5e-6
        error = (got - want).abs().max()
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"
