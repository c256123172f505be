"""What is right: the inputs of an attention, the specification's results for them, and how far off rounding may bring others.

`reference` allows what follows from the formula, not from a run in the same precision: a kernel rounds P and dS to the inputs'
dtype before it multiplies them, and its results, so a result may be off by some units in the last place of the sum of what is
added up for it, taken without signs. That holds for each element by itself, and for scores of any size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from strobe.arguments import options_of
from strobe.call.options import describe as describe_operands
from strobe.call.options import learned_of, operands_of
from strobe.dropout import new_seed
from strobe.problem import AttentionProblem, Operands, lse_shape
from strobe.reference import dense
from strobe.reference.sequences import Part, parts
from strobe.scores import Score

LEARNED = ("bias", "sinks")
"""The tensors of a score that have gradients."""

SEED = 11
"""Set before each call with dropout, which draws from torch's generators."""


@dataclass(frozen=True)
class Results:
    """out, lse and gradients; None where there is no such tensor."""

    out: torch.Tensor
    lse: torch.Tensor | None
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None
    dbias: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None

    FIELDS = ("out", "lse", "dq", "dk", "dv")
    ALL = (*FIELDS, "dbias", "dsinks")


@dataclass(frozen=True)
class Tensors:
    """q, k, v and the keywords of `strobe.attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keywords: dict

    def with_gradients(self) -> Tensors:
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        score = self.keywords.get("score")
        if score is None:
            return replace(self, q=q, k=k, v=v)
        learned = {name: x.detach().requires_grad_() for name in LEARNED if (x := getattr(score, name)) is not None}
        return replace(self, q=q, k=k, v=v, keywords={**self.keywords, "score": replace(score, **learned)})

    def gradients(
        self, results: tuple[torch.Tensor, ...], upstream: tuple[torch.Tensor | None, ...]
    ) -> dict[str, torch.Tensor]:
        """By the names of `Results`, of what `with_gradients` made; 0 where results do not depend on an input at all."""
        score = self.keywords.get("score") or Score()
        tensors = (self.q, self.k, self.v, score.bias, score.sinks)
        inputs = {name: x for name, x in zip(Results.ALL[2:], tensors, strict=True) if x is not None}
        given = [(result, gradient) for result, gradient in zip(results, upstream, strict=True) if gradient is not None]
        grads = torch.autograd.grad(
            [result for result, _ in given], tuple(inputs.values()), [gradient for _, gradient in given], materialize_grads=True
        )
        return dict(zip(inputs, grads, strict=True))


def upstream(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fixed random gradients of out and of lse (0 where the row sees nothing)."""
    random = torch.Generator().manual_seed(1)
    dout, dlse = (torch.randn(x.shape, generator=random).to(x.device, x.dtype) for x in (out, lse))
    return dout, torch.where(torch.isfinite(lse), dlse, 0.0)


def describe(t: Tensors, phase="forward") -> tuple[AttentionProblem, Operands]:
    """The AttentionProblem and the Operands of some inputs."""
    options = options_of(t.q, t.k, t.v, **t.keywords)
    if options.dropout:
        torch.manual_seed(SEED)
        options = replace(options, seed=new_seed(t.q.device))
    operands = operands_of(t.q, t.k, t.v, options)
    return describe_operands(operands, options, phase, learned_of(options)), operands


def formula(t: Tensors, dtype: torch.dtype = torch.float64) -> Results:
    """The specification's formula and its gradients by autograd, computed in dtype (float64: the reference)."""
    score = t.keywords.get("score", Score())
    if score.bias is not None and score.bias.dtype == t.q.dtype:
        t = replace(t, keywords={**t.keywords, "score": replace(score, bias=score.bias.to(dtype))})
    t = replace(t, q=t.q.to(dtype), k=t.k.to(dtype), v=t.v.to(dtype)).with_gradients()
    problem, operands = describe(t)
    out, lse = dense.attention(problem, operands, dtype)
    return Results(out.detach(), lse.detach(), **t.gradients((out, lse), upstream(out, lse)))


FP16_LEAST = 2.0**-24
"""The step of fp16's numbers near 0."""


@dataclass(frozen=True)
class Precision:
    """What a backend computes with. unit: of a result, of P and of dS, relative. least: the error of a P or a dS that is too
    small for its dtype. scores: unit of scores, and of sums."""

    unit: float
    least: float
    scores: float

    @staticmethod
    def of(dtype: torch.dtype, device: str = "cpu") -> Precision:
        facts, wide = torch.finfo(dtype), torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
        least = FP16_LEAST if dtype == torch.float16 else torch.finfo(torch.float32).smallest_normal
        # PyTorch's kernel for a CPU takes coarser exponentials where P is rounded: exp(0) = 0.99995.
        # A GPU's tensor cores cut off what their sums of float32 do not hold, three times for 8 columns of q and k.
        coarse = 64 if device == "cpu" and facts.bits == 16 else 2 if device == "cuda" and facts.bits == 32 else 1
        return Precision(facts.eps, least, coarse * wide.eps)


def precision_of_fp8(head_dim: int) -> Precision:
    """The Hopper kernel's, whose P has three bits of mantissa. scores: chosen after an H200's LSE was off by up to 2^-13 of the
    size of its scores, which float32 does not explain. That tensor cores' sums of about 14 bits do (docs/fp8.md) is inferred:
    they add 32 columns at a time, and each time may lose as much. (192 columns of one sign: 2^-10.)"""
    return Precision(unit=2.0**-3, least=2.0**-10, scores=2.0**-16 * max(1.0, head_dim / 32))


_SUMS = 16
"""Units of float32 that a score, an exponential or a sum of a few terms may lose."""

COARSE = 0.25
"""A row whose scores are known no better than this may have any weights."""

LARGE = 1e100


def reference(
    t: Tensors, precision: Precision, dout: torch.Tensor | None = None, dlse: torch.Tensor | None = None
) -> tuple[Results, Results]:
    """The specification's results in float64, and how far off each element may be.

    dout, dlse: gradients of the results, of which None is 0; with both None there are no gradients of inputs.
    """
    problem, operands = describe(t)
    tensors = (*operands[:3], operands.bias, operands.sinks)
    inputs = {name: x.detach().double() for name, x in zip(Results.ALL[2:], tensors, strict=True) if x is not None}
    q, v = inputs["dq"], inputs["dv"]
    want = {"out": q.new_zeros(*q.shape[:-1], v.shape[-1]), "lse": q.new_full(lse_shape(problem), -torch.inf)}
    backward = dout is not None or dlse is not None
    if backward:
        want |= {name: torch.zeros_like(x) for name, x in inputs.items()}
    allowed = {name: torch.zeros_like(x) for name, x in want.items()}
    for part in parts(problem, operands):
        one = _Part(part, _of_part(inputs, part), precision, operands.seed)
        found = one.results()
        if backward:
            found |= one.gradients(*(None if g is None else g[at] for g, at in ((dout, part.rows), (dlse, part.lse))))
        for name, (exact, off) in found.items():
            for into, x in ((want, exact), (allowed, off)):
                _of_part(into, part)[name].add_(x) if name not in ("out", "lse") else _of_part(into, part)[name].copy_(x)
    return Results(**want), Results(**allowed)


def _of_part(named: dict[str, torch.Tensor], part: Part) -> dict[str, torch.Tensor]:
    """Views of what a part has of tensors that are named as in `Results`."""
    places = {"out": part.rows, "lse": part.lse, "dq": part.rows, "dk": part.keys, "dv": part.keys}
    found = {name: x[places[name]] for name, x in named.items() if name in places}
    if "dbias" in named:
        bias = named["dbias"]
        bias = bias[part.batch : part.batch + 1] if part.rows and bias.shape[0] > 1 else bias
        n_q, n_kv = found["dq"].shape[1], found["dk"].shape[1]
        found["dbias"] = bias[:, :, :n_q, :n_kv]
    return found | ({"dsinks": named["dsinks"]} if "dsinks" in named else {})


Bounded = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Name -> what is right, and how far off it may be."""


class _Part:
    """The formula on a dense part of a problem."""

    def __init__(self, part: Part, inputs: dict[str, torch.Tensor], precision: Precision, seed: torch.Tensor | None):
        self.part, self.precision, self.seed = part, precision, seed
        self.inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        self.q, self.k, self.v = (self.inputs[name] for name in ("dq", "dk", "dv"))
        shape = self.q.shape[0], self.q.shape[2], self.q.shape[1], self.k.shape[1]
        self.pairs = self.q.new_zeros(shape).requires_grad_()
        self.out, self.lse = self._attend(self.v)
        self.v_size = self.v.detach().abs().requires_grad_()
        self.out_size, _ = self._attend(self.v_size)
        """The sums of the output without signs."""
        # Terms that are alike are rounded alike, each by up to half a unit of the sum so far.
        terms = max(shape[2] * part.problem.group, shape[3])
        self.off = precision.scores * (_SUMS * (1 + self._score_sizes()) + terms / 2)
        """Bound [batch, heads_q, rows] of the absolute error of a row's scores and of its LSE, and so of the relative error of
        its weights."""

    def _attend(self, v: torch.Tensor, drops: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        problem, bias = self.part.problem, self.inputs.get("dbias")
        dropout = problem.dropout if drops else 0.0
        bias = self.pairs if bias is None else self.pairs + bias
        score = replace(self.part.score, bias=bias, sinks=self.inputs.get("dsinks"))
        return dense.attend(
            self.q, self.k, v, problem.scale, self.part.mask, score, self.part.batch, dropout, self.seed if drops else None
        )

    @torch.no_grad()
    def _score_sizes(self) -> torch.Tensor:
        """Not less than any number that a row's scores are made of, [batch, heads_q, rows]."""
        problem, score = self.part.problem, self.part.score
        q, k = (x.norm(dim=-1).transpose(1, 2).nan_to_num(0.0, 0.0) for x in (self.q, self.k))  # [batch, heads, n]
        k = k.amax(-1) if k.shape[-1] else k.sum(-1)
        size = abs(problem.scale) * q * k.repeat_interleave(problem.group, 1)[..., None] + score.softcap
        if score.alibi is not None:
            slopes = score.alibi.double().abs()
            size = size + (slopes if slopes.dim() == 2 else slopes[None])[..., None] * (q.shape[-1] + self.k.shape[1])
        for name in ("dbias", "dsinks"):
            if name in self.inputs and self.inputs[name].numel():
                size = size + self.inputs[name].nan_to_num(0.0, 0.0, 0.0).abs().max()
        return size

    @torch.no_grad()
    def results(self) -> Bounded:
        """out and lse."""
        unit, least = self.precision.unit, self.precision.least
        values = self.v.abs().nan_to_num(0.0, 0.0)
        largest = values.amax(1, keepdim=True) if values.shape[1] else values.sum(1, keepdim=True)
        floor = 4 * least * (1 + values.sum(1, keepdim=True)) / self._kept
        if least == FP16_LEAST:  # rows of the optimistic softmax that are not judged (docs/optimistic_softmax.md)
            floor = floor + unit * largest
        floor, largest = (x.repeat_interleave(self.part.problem.group, 2) for x in (floor, largest))
        off = self.off.transpose(1, 2)[..., None]
        of_out = torch.where(off < COARSE, (2 * unit + 2 * off) * self.out_size + floor, 4 * largest)
        return {"out": (self.out, of_out), "lse": (self.lse, self.off)}

    def gradients(self, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Bounded:
        """The gradients of q, k, v, the bias and the sinks, each with the bound of its error."""
        dout = torch.zeros_like(self.out) if dout is None else dout.double()
        dlse = torch.zeros_like(self.lse) if dlse is None else dlse.double()
        asked = {**self.inputs, "pairs": self.pairs}
        grads = torch.autograd.grad(
            (self.out, self.lse), tuple(asked.values()), (dout, dlse), retain_graph=True, materialize_grads=True
        )
        found = dict(zip(asked, grads, strict=True))
        of_pairs = found.pop("pairs").abs()
        weights = self._weights()
        relative = torch.where(self.off < COARSE, 2 * self.precision.unit + 2 * self.off, torch.inf)
        (of_v,) = torch.autograd.grad(
            self.out_size,
            self.v_size,
            dout.abs() * relative.transpose(1, 2)[..., None].clamp(max=LARGE),
            materialize_grads=True,
        )
        with torch.no_grad():
            allowed = self._allowed(of_pairs, weights.abs(), relative.clamp(max=LARGE), dout.abs(), dlse.abs())
            of_rows = dout.abs().sum(1, keepdim=True).unflatten(2, (-1, self.part.problem.group)).sum(3)
            allowed["dv"] = of_v + 4 * self.precision.least * (1 + of_rows) / self._kept
        return {name: (x, allowed[name]) for name, x in found.items()}

    @property
    def _kept(self) -> float:
        """The share of weights that dropout keeps, by which they are divided."""
        return 1 - self.part.problem.dropout

    def _weights(self) -> torch.Tensor:
        """P before any of it is dropped, [batch, heads_q, rows, keys]."""
        if self.part.problem.score.function is None:  # which would put its derivative here
            (weights,) = torch.autograd.grad(self.lse.sum(), self.pairs, retain_graph=True, materialize_grads=True)
            return weights
        one = torch.eye(self.k.shape[1], dtype=self.v.dtype, device=self.v.device)[None, :, None]
        weights, _ = self._attend(one.expand(*self.v.shape[:-1], -1), drops=False)
        return weights.detach().transpose(1, 2)

    def _allowed(self, of_pairs, weights, relative, dout, dlse) -> dict[str, torch.Tensor]:
        """of_pairs, weights [batch, heads_q, rows, keys]: |dS| and P. relative, dlse [batch, heads_q, rows]."""
        problem, least = self.part.problem, 4 * self.precision.least
        q, k, v = (x.abs().transpose(1, 2) for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(problem.group, 1) for x in (k, v))
        delta = (dout * self.out_size).sum(-1).transpose(1, 2) + dlse
        products = dout.transpose(1, 2) @ v.transpose(-1, -2) / self._kept
        off = relative[..., None] * (of_pairs + weights * delta[..., None])
        off = off + _SUMS * self.precision.scores * weights * (products + delta[..., None])
        off = off + least * (products + delta[..., None])  # of a weight that is too small
        scale = abs(problem.scale)
        dk = (scale * (off + least)).transpose(-1, -2) @ q
        allowed = {
            "dq": (scale * (off + least) @ k).transpose(1, 2) + least,
            "dk": dk.unflatten(1, (-1, problem.group)).sum(2).transpose(1, 2) + least,
        }
        if "dbias" in self.inputs:
            allowed["dbias"] = off.sum_to_size(self.inputs["dbias"].shape) + least
        if "dsinks" in self.inputs:
            share = torch.exp(self.inputs["dsinks"][:, None] - self.lse).nan_to_num(0.0, 0.0)
            allowed["dsinks"] = (share * relative * delta).sum((0, 2)) + least
        return allowed


def differs(got: Results, want: Results, allowed: Results) -> str | None:
    """What is wrong with results, in one line; or None."""
    for name in Results.ALL:
        ours, right, off = (getattr(x, name) for x in (got, want, allowed))
        if ours is None or right is None:
            continue
        if ours.shape != right.shape:
            return f"{name}: shape {list(ours.shape)}, not {list(right.shape)}"
        facts = torch.finfo(ours.dtype)
        most, off = facts.max, off + facts.eps * (right.abs().nan_to_num(0.0, 0.0) + facts.smallest_normal)
        ours, nothing = ours.double(), torch.isneginf(right)
        if name == "lse" and not torch.equal(torch.isneginf(ours), nothing):
            return f"lse: -inf at {_place(torch.isneginf(ours) != nothing)}, where the specification says otherwise"
        judged = torch.isfinite(right) & (right.abs() < most)
        broken = torch.isfinite(ours) & ~torch.isfinite(right)
        if bool(broken.any()):
            return f"{name}: {ours[broken][0].item():g} at {_place(broken)}, where the specification is not finite"
        lost = judged & ~torch.isfinite(ours)
        if bool(lost.any()):
            return f"{name}: {ours[lost][0].item()} at {_place(lost)}, not {right[lost][0].item():g}"
        error = torch.where(judged, ours - right, 0.0).abs()
        excess = error > off
        if bool(excess.any()):
            at = tuple(torch.nonzero(excess & (error == error[excess].max()))[0].tolist())
            return f"{name}: {ours[at].item():.6g} at {list(at)}, not {right[at].item():.6g}; allowed {off[at].item():.2g}"
    return None


def _place(where: torch.Tensor) -> list[int]:
    return torch.nonzero(where)[0].tolist()
