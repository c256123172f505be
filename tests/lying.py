"""Lengths that cannot be: what `cu_seqlens`, `seqused` and the longest lengths may hold on a GPU, where nobody looks.

Kernels clamp them to what is there. `sequences` says to what, so that what still means something can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from problems import Tensors, describe

import strobe
from strobe.masks import Mask
from strobe.problem import AttentionProblem, Operands
from strobe.reference import dense

N_Q, N_KV, BATCH = 105, 132, 3
"""Rows of q, and of k and v, in all; sequences (or batch entries, which share them evenly)."""

HONEST_Q, HONEST_KV = (0, 45, 50, N_Q), (0, 30, 100, N_KV)
INT32 = 2**31 - 1


@dataclass(frozen=True)
class Lie:
    """Bounds of packed sequences, or None for a dense problem; used lengths, or None; the longest sequences, or None for the
    totals. wide: bounds in 64 bits."""

    name: str
    cu_q: tuple[int, ...] | None = HONEST_Q
    cu_kv: tuple[int, ...] | None = HONEST_KV
    used_q: tuple[int, ...] | None = None
    used_kv: tuple[int, ...] | None = None
    max_q: int = N_Q
    max_kv: int = N_KV
    wide: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def packed(self) -> bool:
        return self.cu_q is not None


def _bounds(n: int) -> dict[str, tuple[int, ...]]:
    """Of three sequences in n rows."""
    return {
        "the last beyond": (0, 50, n - 20, n + 350),
        "all beyond": (n + 1, n + 100, n + 200, n + 300),
        "one past": (0, 50, 90, n + 1),
        "starts beyond": (0, 50, 2 * n, 3 * n),
        "2^30": (0, 50, 2**30, 2**30),
        "2^31 - 1": (0, 50, INT32, INT32),
        "negative": (-50, 50, 80, n),
        "all negative": (-4, -3, -2, -1),
        "-2^31": (-INT32 - 1, -INT32 - 1, 40, n),
        "differences overflow": (-INT32 - 1, INT32, -INT32 - 1, INT32),
        "decreasing": (n, 100, 40, 0),
        "one decreases": (0, 100, 40, n),
        "far back": (100, n, 0, 60),
        "not from 0": (20, 50, 80, n),
        "ends early": (0, 30, 60, 90),
        "all the same": (75, 75, 75, 75),
    }


_USED = {
    "negative": (-1, -70, 5),
    "-2^31": (-INT32 - 1,) * 3,
    "2^31 - 1": (INT32,) * 3,
    "beyond": (71, 10_000, 2**30),
    "of all kinds": (INT32, -INT32 - 1, 3),
}


def _lies() -> tuple[Lie, ...]:
    lies = []
    for (name, of_q), of_kv in zip(_bounds(N_Q).items(), _bounds(N_KV).values(), strict=True):
        lies += [
            Lie(f"bounds of q: {name}", cu_q=of_q),
            Lie(f"bounds of k: {name}", cu_kv=of_kv),
            Lie(f"bounds of both: {name}", cu_q=of_q, cu_kv=of_kv),
        ]
    for name, used in _USED.items():
        for kind, cu in (("packed", {}), ("dense", {"cu_q": None, "cu_kv": None})):
            lies += [
                Lie(f"used of q, {kind}: {name}", used_q=used, **cu),
                Lie(f"used of k, {kind}: {name}", used_kv=used, **cu),
                Lie(f"used of both, {kind}: {name}", used_q=used, used_kv=used, **cu),
            ]
    return (
        *lies,
        Lie("longest too small", max_q=16, max_kv=16),
        Lie("longest 1", max_q=1, max_kv=1),
        Lie("longest 65 rows and keys", max_q=65, max_kv=65),
        Lie("longest far beyond", max_q=2**29, max_kv=2**29),
        Lie("longest beyond what tiles can be counted", max_q=2**30 - 1, max_kv=2**30 - 1),
        Lie("all at once", (-9, 2**30, 5, INT32), (INT32, -9, 999, 3), (-1, INT32, 7), (INT32, -5, 9), 33, 77),
        Lie("64 bits: 2^32 and a little", (0, 2**32 + 5, 2**32 + 9, 2**32 + 70), (0, 2**32 + 3, 2**33, 2**40), wide=True),
        Lie("64 bits: -2^32 and a little", (0, -(2**32) + 50, 90, N_Q), (-(2**32) + 9, 60, 90, N_KV), wide=True),
        Lie("64 bits: the largest", (0, 2**63 - 1, -(2**63), N_Q), (-(2**63), 2**63 - 1, 0, 50), wide=True),
    )


LIES = _lies()

SAMPLE = tuple(lie for lie in LIES if lie.name in ("bounds of both: 2^30", "bounds of both: far back", "all at once"))
"""A few, for where all take too long."""


def all_lengths(lie: Lie) -> Lie:
    """A lie that says all lengths, so that few kernels have to be compiled: used lengths that it does not have are the largest,
    which is no limit."""
    no_limit = (INT32,) * BATCH
    return replace(lie, used_q=lie.used_q or no_limit, used_kv=lie.used_kv or no_limit)


class Sequence(NamedTuple):
    start_q: int
    n_q: int
    start_kv: int
    n_kv: int


def sequences(lie: Lie) -> list[Sequence]:
    """What a lie means: bounds within the rows that there are, lengths from 0 to the longest."""
    sides = (lie.cu_q, lie.used_q, lie.max_q, N_Q), (lie.cu_kv, lie.used_kv, lie.max_kv, N_KV)
    of_q, of_kv = ([_sequence(b, *side) for b in range(BATCH)] for side in sides)
    return [Sequence(*q, *kv) for q, kv in zip(of_q, of_kv, strict=True)]


def _sequence(b: int, cu: tuple[int, ...] | None, used: tuple[int, ...] | None, longest: int, total: int) -> tuple[int, int]:
    def within(x: int, most: int) -> int:
        return max(0, min(x, most))

    start, n = b * (total // BATCH), total // BATCH
    if cu is not None:
        start = within(cu[b], total)
        n = within(within(cu[b + 1], total) - start, longest)
    return start, n if used is None else within(used[b], n)


# ---- problems


def inputs(lie: Lie, head_dims: tuple[int, int] = (16, 16), heads: tuple[int, int] = (2, 1), dtype=torch.float16, device="cpu",
           mask: Mask | None = None) -> tuple[Tensors, AttentionProblem, Operands]:  # fmt: skip
    """Random inputs, and the problem and operands of a lie about them, past the checks of what is on a CPU."""
    random = torch.Generator().manual_seed(0)

    def normal(rows: int, heads: int, dim: int) -> torch.Tensor:
        shape = (rows, heads, dim) if lie.packed else (BATCH, rows // BATCH, heads, dim)
        return torch.randn(shape, generator=random).to(device, dtype)

    def int32(values: tuple[int, ...] | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)

    keywords = {"mask": mask, "score": None, "seqused_q": int32(lie.used_q), "seqused_kv": int32(lie.used_kv)}
    if lie.packed:
        bounds = {"cu_seqlens_q": lie.cu_q, "cu_seqlens_kv": lie.cu_kv}
        keywords |= {name: int32(HONEST_Q if lie.wide else cu) for name, cu in bounds.items()}
        keywords |= {"max_seqlen_q": lie.max_q, "max_seqlen_kv": lie.max_kv}
    shapes = (N_Q, heads[0], head_dims[0]), (N_KV, heads[1], head_dims[0]), (N_KV, heads[1], head_dims[1])
    t = Tensors(*(normal(*shape) for shape in shapes), keywords)
    problem, operands = describe(t)
    if lie.wide:
        cu_q, cu_kv = (torch.tensor(cu, dtype=torch.int64, device=device) for cu in (lie.cu_q, lie.cu_kv))
        operands = operands._replace(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    return t, problem, operands


def backward_of(problem: AttentionProblem, deterministic: bool = False) -> AttentionProblem:
    return replace(problem, phase="backward", deterministic=deterministic)


class Expected(NamedTuple):
    """Of the reference: out, lse and gradients, float64. rows: which rows of q belong to one sequence at most. apart: whether
    all rows and keys do, in the order of the sequences: then gradients mean something."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    rows: torch.Tensor
    apart: bool


def expected(lie: Lie, t: Tensors, dout: torch.Tensor) -> Expected:
    """dout: as out, packed or dense as q."""
    q, k, v, dout = (x.detach().double().cpu().reshape(-1, *x.shape[-2:]) for x in (t.q, t.k, t.v, dout))
    dq, dk, dv, out = (torch.zeros_like(x) for x in (q, k, v, dout))
    lse = torch.full((q.shape[1], N_Q), -torch.inf, dtype=torch.float64)
    times_q, times_kv = torch.zeros(N_Q), torch.zeros(N_KV)
    for start_q, n_q, start_kv, n_kv in sequences(lie):
        rows, keys = slice(start_q, start_q + n_q), slice(start_kv, start_kv + n_kv)
        times_q[rows] += 1
        times_kv[keys] += 1
        if not n_q or not n_kv:
            continue
        one = Tensors(q[None, rows], k[None, keys], v[None, keys], {"mask": t.keywords["mask"], "score": None}).with_gradients()
        one_out, one_lse = dense.attention(*describe(one), torch.float64)
        grads = torch.autograd.grad(one_out, (one.q, one.k, one.v), dout[None, rows])
        out[rows], lse[:, rows], dq[rows] = one_out[0].detach(), one_lse[0].detach(), grads[0][0]
        dk[keys] += grads[1][0]
        dv[keys] += grads[2][0]
    there = [(start_q, start_kv) for start_q, n_q, start_kv, n_kv in sequences(lie) if n_q and n_kv]
    in_order = all(a <= b for of_one in zip(*there, strict=True) for a, b in pairwise(of_one))
    apart = bool((times_q <= 1).all()) and bool((times_kv <= 1).all()) and in_order
    return Expected(out, lse, dq, dk, dv, times_q <= 1, apart)


def check_forward(want: Expected, out: torch.Tensor, lse: torch.Tensor, tolerance: float = 5e-3) -> None:
    """Rows that belong to one sequence are right; those of none have 0 and -inf."""
    out = out.detach().double().cpu().reshape(want.out.shape)
    lse = lse.detach().double().cpu()
    lse = lse if lse.dim() == 2 else lse.transpose(0, 1).reshape(want.lse.shape)
    assert torch.equal(torch.isneginf(lse[:, want.rows]), torch.isneginf(want.lse[:, want.rows]))
    _close("lse", lse[:, want.rows].nan_to_num(nan=9e9, neginf=0.0), want.lse[:, want.rows].nan_to_num(neginf=0.0), tolerance)
    _close("out", out[want.rows], want.out[want.rows], tolerance)
    nothing = torch.isneginf(want.lse).all(0) & want.rows
    assert not out[nothing].any(), "rows of no sequence are not 0"


def check_backward(want: Expected, dq, dk, dv, tolerance: float = 2e-2) -> None:
    if want.apart:
        for name, got in (("dq", dq), ("dk", dk), ("dv", dv)):
            right = getattr(want, name)
            _close(name, got.detach().double().cpu().reshape(right.shape), right, tolerance)


def _close(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert bool(torch.isfinite(got).all()), f"{name} is not finite"
    error = (got - want).abs().max().item() if want.numel() else 0.0
    allowed = tolerance * max(1.0, want.abs().max().item() if want.numel() else 0.0)
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


MASKS = {"full": None, "causal": strobe.Causal(), "window": strobe.Window(37, 11)}
