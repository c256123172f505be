"""The tensors of a fuzzer's case: as a caller gives them, in any layout and with poison, and clean, for the specification."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch

import strobe
from strobe.fp8 import E4M3
from strobe.lab.bench.plan import DTYPES
from strobe.lab.fuzz.cases import Case
from strobe.lab.fuzz.right import Tensors, describe
from strobe.masks import Mask
from strobe.reference.sequences import parts
from strobe.scores import Score

POISON = {"nan": float("nan"), "inf": float("inf"), "large": 1e4}
_EXPANDED = ("same for all", "one head")


class Inputs(NamedTuple):
    """given: what the call gets. clean: the same numbers for the specification. descales: of fp8."""

    given: Tensors
    clean: Tensors
    dout: torch.Tensor | None = None
    dlse: torch.Tensor | None = None
    descales: dict[str, torch.Tensor] | None = None


def dtype_of(name: str) -> torch.dtype:
    return torch.float64 if name == "fp64" else DTYPES[name]


def inputs(case: Case, shift: int = 0) -> Inputs:
    """The same for the same case and shift on every device. shift: other numbers, for what else is the same."""
    random = torch.Generator().manual_seed(1000 * shift + case.seed)
    shape = torch.Generator().manual_seed(case.seed)  # lengths, documents and functions are the same
    keywords = _lengths(case, shape)
    leading_q: tuple[int, ...] = (case.batch, case.n_q)
    leading_kv: tuple[int, ...] = (case.batch, case.n_kv)
    if case.packed:
        spare = int(torch.randint(0, 4, (1,), generator=shape))
        leading_q, leading_kv = ((int(keywords[f"cu_seqlens_{side}"][-1]) + spare,) for side in ("q", "kv"))
    keywords |= {"mask": mask_of(case, shape)} | ({"scale": case.scale} if case.scale is not None else {})
    keywords |= {"score": _score(case, random)} | ({"dropout_p": case.dropout} if case.dropout else {})
    q, k, v = _values(case, random, leading_q, leading_kv)
    if case.door == "fp8":
        return _in_fp8(case, Tensors(q, k, v, keywords), random)
    q, k, v = (_shared(x.to(case.device, dtype_of(case.dtype)), how) for x, how in zip((q, k, v), case.layouts, strict=True))
    clean = Tensors(q, k, v, keywords)
    given = clean
    if case.poison:
        rows, keys = _unseen(clean)
        bad = [x.clone() for x in (q, k, v)]
        for x, unseen, how in zip(bad, (rows, keys, keys), case.layouts, strict=True):
            if how not in _EXPANDED:
                x[unseen] = POISON[case.poison]
        given = replace(clean, q=bad[0], k=bad[1], v=bad[2])
    if case.way.endswith("autocast"):
        clean = _cast(clean)
    q, k, v = (in_memory(x, how) for x, how in zip((given.q, given.k, given.v), case.layouts, strict=True))
    return Inputs(Tensors(q, k, v, keywords), clean, *_upstream(case, clean, random))


def _cast(t: Tensors) -> Tensors:
    """What a call under autocast to bfloat16 computes with."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype == torch.float64 else x.bfloat16()

    score: Score = t.keywords["score"]
    if score.bias is not None and score.bias.dtype == torch.float16:
        score = replace(score, bias=score.bias.bfloat16())
    return Tensors(cast(t.q), cast(t.k), cast(t.v), {**t.keywords, "score": score})


# ---- lengths


def _lengths(case: Case, random: torch.Generator) -> dict:
    found: dict = {}
    if case.packed:
        for side, longest in (("q", case.n_q), ("kv", case.n_kv)):
            lengths = torch.randint(0, longest + 1, (case.batch,), generator=random)
            lengths[0] = longest
            lengths = lengths[torch.randperm(case.batch, generator=random)]
            cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            found |= {f"cu_seqlens_{side}": cu.to(case.device, torch.int32), f"max_seqlen_{side}": longest}
    for side, longest in (("q", case.n_q), ("kv", case.n_kv)):
        if case.used in (side, "both"):
            full = found[f"cu_seqlens_{side}"].diff().cpu() if case.packed else torch.full((case.batch,), longest)
            share = torch.rand(case.batch, generator=random) * 1.4 - 0.2
            found[f"seqused_{side}"] = (full * share.clamp(0, 1)).to(case.device, torch.int32)
    return found


def lying(case: Case, keywords: dict) -> dict:
    """The keywords, of which one tensor of lengths says what cannot be."""
    name = next(name for name in ("cu_seqlens_kv", "seqused_kv", "cu_seqlens_q", "seqused_q") if name in keywords)
    lie = keywords[name].clone()
    if case.lie == "longer than max" and f"max_{name[3:9]}{name[10:]}" in keywords:
        longest = f"max_{name[3:9]}{name[10:]}"
        return {**keywords, longest: max(0, int(lie.diff().max()) - 1)}
    if case.lie == "not from 0" and name.startswith("cu"):
        lie[0] += 3
    elif case.lie == "decreasing" and name.startswith("cu") and len(lie) > 2:
        lie[1:] = lie[1:].flip(0)
        lie[1] += 1
    elif case.lie == "negative":
        lie[-1] = -7
    else:
        lie[-1] = 2**30 if case.lie == "huge" else int(lie[-1]) + 100_000
    return {**keywords, name: lie}


def clamped(t: Tensors) -> tuple[Tensors, bool]:
    """Inputs with the lengths that a GPU makes of any others: bounds within the rows that are there, lengths from 0 to the
    longest. Also whether no two sequences share rows or keys, so that all results mean something."""
    keywords, apart = dict(t.keywords), True
    for side, x in (("q", t.q), ("kv", t.k)):
        cu, used = keywords.get(f"cu_seqlens_{side}"), keywords.get(f"seqused_{side}")
        if cu is not None:
            cu = cu.clamp(0, x.shape[0])
            full = cu.diff().clamp(0, keywords[f"max_seqlen_{side}"])
            keywords[f"cu_seqlens_{side}"] = cu
        else:
            full = torch.full((x.shape[0],), x.shape[1], dtype=torch.int32, device=x.device)
        used = full if used is None else used.clamp(min=0).minimum(full)
        keywords[f"seqused_{side}"] = used.to(torch.int32)
        if cu is not None:
            there = [(first, first + n) for first, n in zip(cu.tolist(), used.tolist(), strict=False) if n]
            apart = apart and all(end <= begin for (_, end), (begin, _) in pairwise(there))
    return replace(t, keywords=keywords), apart


# ---- masks and scores


def _every_third(batch, head, q_index, kv_index):
    return (q_index + kv_index * (head + 1)) % 3 != 0


def _not_one(batch, head, q_index, kv_index):
    return kv_index != 7 + batch


def _near(batch, head, q_index, kv_index):
    return abs(q_index - kv_index) < 40


def _quarter(score, batch, head, q_index, kv_index):
    return 0.25 * score + 0.01 * (q_index - kv_index)


def _quarter_gradient(score, batch, head, q_index, kv_index):
    return strobe.math.where(score == score, 0.25, 0.25)


def _bent(score, batch, head, q_index, kv_index):
    return 2.0 * strobe.math.tanh(score) + (head + 1.0) * 0.1 - 0.02 * max(kv_index, 20)


def _bent_gradient(score, batch, head, q_index, kv_index):
    t = strobe.math.tanh(score)
    return 2.0 * (1.0 - t * t)


def _by_batch(score, batch, head, q_index, kv_index):
    return strobe.math.where(kv_index % 2 == 0, score, 0.5 * score) - 0.1 * batch


def _by_batch_gradient(score, batch, head, q_index, kv_index):
    return strobe.math.where(kv_index % 2 == 0, 1.0, 0.5)


MASK_FUNCTIONS = _every_third, _not_one, _near
SCORE_FUNCTIONS = (_quarter, _quarter_gradient), (_bent, _bent_gradient), (_by_batch, _by_batch_gradient)


def document_numbers(case: Case, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """The document numbers of the queries [batch, n_q] and of the keys [batch, n_kv], int64."""
    found = [torch.randint(0, 3, (case.batch, n), generator=random) for n in (case.n_q, case.n_kv)]
    if case.documents != "mixed":
        found = [ids.sort(-1).values for ids in found]
    if case.documents == "large":
        found = [ids * 2**32 + 5 for ids in found]
    return found[0], found[1]


def mask_of(case: Case, random: torch.Generator) -> Mask:
    mask = strobe.Full()
    if case.left is not None or case.right is not None:
        causal = case.left is None and case.right == 0
        mask = strobe.Causal() if causal else strobe.Window(case.left, case.right)
    if case.prefix is not None:
        mask = mask & strobe.Prefix(case.prefix)
    if case.documents:
        mask = strobe.Document(*(ids.to(case.device) for ids in document_numbers(case, random))) & mask
    if case.visible:
        mask = mask & strobe.Visible(MASK_FUNCTIONS[case.visible - 1])
    return mask


def _score(case: Case, random: torch.Generator) -> Score:
    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=random)

    alibi = bias = sinks = None
    if case.alibi:
        alibi = uniform(*((case.batch, case.heads_q) if case.alibi == "batch" else (case.heads_q,))).to(case.device)
    if case.bias:
        full = {"b": case.batch, "h": case.heads_q, "q": case.n_q, "k": case.n_kv, "1": 1}
        sizes = [1 if letter == "1" else full["bhqk"[place]] for place, letter in enumerate(case.bias)]
        bias = 4 * uniform(*sizes) - 2
        if sizes[3] > 5:
            bias[..., ::5] = -torch.inf
        bias = bias.to(case.device, dtype_of(case.bias_dtype))
    if case.sinks:
        sinks = (6 * uniform(case.heads_q) - 3).to(case.device, dtype_of(case.sinks))
    functions = SCORE_FUNCTIONS[case.function - 1] if case.function else ()
    return Score(case.softcap, alibi, bias, sinks, *functions)


# ---- numbers


def _values(case: Case, random: torch.Generator, leading_q: tuple, leading_kv: tuple) -> list[torch.Tensor]:
    """q, k and v in float64."""

    def normal(leading: tuple, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(*leading, heads, dim, generator=random, dtype=torch.float64)

    q = normal(leading_q, case.heads_q, case.head_dim) * case.logits
    k, v = normal(leading_kv, case.heads_kv, case.head_dim), normal(leading_kv, case.heads_kv, case.head_dim_v)
    n_kv = leading_kv[-1]
    along = torch.linspace(0, 1, n_kv, dtype=torch.float64)[:, None, None]
    if case.values in ("growing", "falling"):
        q = q / (10 * case.logits) + 20 * case.logits / case.head_dim**0.5
        k = k / 10 + (along if case.values == "growing" else 1 - along)
    elif case.values == "spikes" and n_kv:
        k[..., torch.randint(0, n_kv, (3,), generator=random), :, :] *= 30
    elif case.values == "equal":
        q, k, v = (torch.full_like(x, 0.37) for x in (q, k, v))
    elif case.values == "zero":
        q, k = torch.zeros_like(q), torch.zeros_like(k)
    elif case.values in ("tiny", "huge"):
        powers = (
            {"tiny": (-10, -10, -10), "huge": (4, 4, 8)}
            if case.dtype == "fp16"
            else {"tiny": (-60, -60, -120), "huge": (58, 58, 110)}
        )
        q, k, v = (x * 2.0**power for x, power in zip((q, k, v), powers[case.values], strict=True))
    elif case.values in ("nan", "inf"):
        for x in (q, k, v):
            if x.numel() and int(torch.randint(0, 2, (1,), generator=random)):
                sign = 1 - 2 * int(torch.randint(0, 2, (1,), generator=random))
                x.view(-1)[torch.randint(0, x.numel(), (2,), generator=random)] = sign * POISON[case.values]
    return [q, k, v]


def _upstream(case: Case, clean: Tensors, random: torch.Generator) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of out and of lse."""
    if not case.gradients:
        return None, None
    q, v = clean.q, clean.v
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=random).to(q.device, q.dtype)
    dout = in_memory(_shared(dout, case.dout_layout), case.dout_layout)
    lse = (q.shape[1], q.shape[0]) if case.packed else (q.shape[0], q.shape[2], q.shape[1])
    wide = torch.float64 if case.dtype == "fp64" else torch.float32
    dlse = torch.randn(lse, generator=random).to(q.device, wide)
    return (None if case.gradients == "lse" else dout), (None if case.gradients == "out" else dlse)


def _in_fp8(case: Case, t: Tensors, random: torch.Generator) -> Inputs:
    shape = case.batch, case.heads_kv
    descales = {f"{x}_descale": (torch.rand(shape, generator=random) + 0.5).to(case.device) for x in "qkv"}
    pairs = []
    for x, descale in zip((t.q, t.k, t.v), descales.values(), strict=True):
        small = x.to(case.device, torch.float32).to(E4M3)
        by_head = descale.double().repeat_interleave(x.shape[-2] // case.heads_kv, 1)[..., None]
        if case.packed:
            cu = t.keywords["cu_seqlens_q" if x is t.q else "cu_seqlens_kv"]
            lengths = cu.diff().long()
            by_head = torch.cat(
                [by_head.repeat_interleave(lengths, 0), by_head.new_ones(len(x) - int(cu[-1]), *by_head.shape[1:])]
            )
        else:
            by_head = by_head[:, None]
        pairs.append((small, small.double() * by_head))
    given, clean = (Tensors(q, k, v, t.keywords) for q, k, v in zip(*pairs, strict=True))
    return Inputs(given, clean, descales=descales)


# ---- memory


def _shared(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x with the numbers that a layout lets be the same."""
    if layout == "same for all" and len(x):
        return x[:1].expand(x.shape)
    return x[..., :1, :].expand(x.shape) if layout == "one head" and x.shape[-2] else x


def in_memory(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x with the strides and the place that a layout says; what lies between its numbers is NaN."""
    if layout == "heads first":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "negative":
        return torch._neg_view(-x)
    if layout == "misplaced":
        return x.new_full((x.numel() + 1,), torch.nan)[1:].view(x.shape).copy_(x)
    tokens, heads, dim = x.shape[-3:]
    padded = {"heads of more": (tokens, heads + 2, dim), "columns of more": (tokens, heads, dim + 4)}
    padded |= {"gaps": (2 * tokens, heads, dim), "last dim strided": (tokens, heads, 2 * dim)}
    if layout not in padded:
        return x
    more = x.new_full((*x.shape[:-3], *padded[layout]), torch.nan)
    places = {
        "heads of more": more[..., 1 : heads + 1, :],
        "columns of more": more[..., :dim],
        "gaps": more[..., ::2, :, :],
        "last dim strided": more[..., ::2],
    }
    return places[layout].copy_(x)


def _unseen(t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of q that belong to nothing or are not used, and keys that no row sees."""
    problem, operands = describe(t)
    rows, keys = (torch.ones(x.shape[:-2], dtype=torch.bool, device=x.device) for x in (t.q, t.k))
    for part in parts(problem, operands):
        rows[part.rows] = False
        (batch, n_q), n_kv = rows[part.rows].shape, keys[part.keys].shape[1]
        i, j = torch.arange(n_q, device=rows.device)[:, None], torch.arange(n_kv, device=rows.device)[None, :]
        batches = range(part.batch, part.batch + batch)
        seen = part.mask.tile(i, j, n_q, n_kv, batches, range(problem.heads_q))
        seen = seen.any(1) if seen.dim() == 4 else seen  # by batch, head
        keys[part.keys] &= ~seen.any(-2)
    return rows, keys
