"""Random problems for the fuzzer: a case is facts, and all of them follow from one integer.

A fact's default is its simplest value, so a case is told by what differs from that, and made smaller by putting facts back.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

DOORS = ("attention", "flash", "kvpacked", "qkvpacked", "fp8", "simulator")
"""`strobe.attention`; flash-attn's functions (of packed sequences too), of which two take one tensor for k and v, or for all;
`strobe.attention_fp8`; the Hopper forward in the simulator."""

LAYOUTS = (
    "contiguous", "heads first", "heads of more", "columns of more", "gaps", "same for all", "one head", "misplaced",
    "negative", "last dim strided",
)  # fmt: skip
"""How a tensor lies in memory. same for all, one head: expanded with stride 0. misplaced: not aligned to 16 bytes."""

VALUES = ("normal", "growing", "falling", "spikes", "equal", "tiny", "huge", "zero", "nan", "inf")
"""growing, falling: scores along the keys. spikes: few large keys. nan, inf: some numbers that rows see; forward only."""

WAYS = (
    "once", "no_grad", "inference", "again", "others first", "checkpoint", "compiled", "autocast", "compiled under autocast",
    "filled", "graph", "stream",
)  # fmt: skip
"""again: a second call gives the same bits. others first: a call with other tensors of the same shapes comes first, so that the
second finds its plan. filled: PyTorch fills new memory with NaN. graph, stream: CUDA's."""

BIASES = ("bhqk", "1hqk", "b1qk", "bhq1", "bh1k", "11qk", "b11k", "1111")
"""The dims that a bias has, of which 1 stands for all."""

LIES = ("beyond", "huge", "negative", "decreasing", "not from 0", "longer than max")
"""What cu_seqlens or seqused hold that cannot be."""


_NUMBERS = ("batch", "n_q", "n_kv", "heads_kv", "group", "left", "right", "prefix")
"""Facts that are made smaller a little at a time."""


class Facts:
    """What cases of all doors have in common. A case is a frozen dataclass, of which each fact has a default."""

    def __str__(self) -> str:
        return ",".join(f"{name}={value!r}" for name, value in self.changed().items())

    def changed(self) -> dict[str, object]:
        """The facts that are not the simplest."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}  # type: ignore[arg-type]

    @classmethod
    def told(cls, text: str) -> Any:
        """The case of what `str` made. ValueError for other text."""
        try:
            call = ast.parse(f"Case({text})", mode="eval").body
            assert isinstance(call, ast.Call) and not call.args
            return cls(**{word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg})
        except (SyntaxError, TypeError, ValueError, AssertionError):
            example = cls(n_q=5)  # type: ignore[call-arg]
            raise ValueError(f"a case must be an integer or facts such as {example}, got {text!r}") from None

    def lessened(self, names: Iterable[str]) -> Iterator[Any]:
        """Cases with less of one of these numbers."""
        for name in names:
            value = getattr(self, name)
            for less in dict.fromkeys(() if value is None else (1, value // 2, value - 1)):
                if 0 < less < value:
                    yield replace(self, **{name: less})  # type: ignore[type-var]


@dataclass(frozen=True)
class Case(Facts):
    """A problem, how it is called and what its tensors hold."""

    device: str = "cpu"
    door: str = "attention"
    backend: str | None = None
    dtype: str = "fp32"
    batch: int = 1
    n_q: int = 1
    n_kv: int = 1
    heads_kv: int = 1
    group: int = 1
    head_dim: int = 8
    head_dim_v: int = 8
    left: int | None = None
    right: int | None = None
    prefix: int | None = None
    documents: str = ""
    """"sorted", "mixed" or "large" (numbers beyond 32 bits)."""
    visible: int = 0
    """The number of a mask function, as `function` is one of a score function."""
    softcap: float = 0.0
    alibi: str = ""
    """"heads" or "batch": the dims of the slopes."""
    bias: str = ""
    bias_dtype: str = "fp32"
    sinks: str = ""
    """Their dtype."""
    function: int = 0
    scale: float | None = None
    packed: bool = False
    used: str = ""
    """"q", "kv" or "both": whose lengths are given."""
    dropout: float = 0.0
    lie: str = ""
    q_layout: str = "contiguous"
    k_layout: str = "contiguous"
    v_layout: str = "contiguous"
    dout_layout: str = "contiguous"
    poison: str = ""
    """"nan", "inf" or "large": in what no row sees, and in rows that are not used."""
    values: str = "normal"
    logits: float = 1.0
    gradients: str = ""
    """"both", "out" or "lse": the results whose gradients come in."""
    wants_lse: bool = True
    deterministic: bool = False
    way: str = "once"
    bad: int = 0
    """Not 0: the number of a bad argument that is put in place of a good one."""
    seed: int = 0
    """The seed from which the tensors' numbers are drawn."""

    def simpler(self) -> Iterator[Case]:
        """Cases that are one step simpler, the greatest steps first."""
        kept = ("device", "seed", "head_dim_v", *_NUMBERS[:5])
        for name in (one for one in self.changed() if one not in kept):
            yield replace(self, **{name: getattr(Case(), name)})
        yield from self.lessened(_NUMBERS)
        for dim in (8, 64, 128):
            if self.head_dim > dim:
                yield replace(self, head_dim=dim, head_dim_v=dim)

    def features(self) -> list[str]:
        """What a campaign counts."""
        found = [f"door {self.door}", f"backend {self.backend or 'by dispatch'}", f"dtype {self.dtype}", f"way {self.way}"]
        found += [f"values {self.values}"] if self.values != "normal" else []
        band = {"left": self.left is not None, "right": self.right is not None, "prefix": self.prefix is not None}
        found += [f"mask {name}" for name, there in band.items() if there]
        found += [f"mask documents, {self.documents}"] * bool(self.documents) + ["mask function"] * bool(self.visible)
        changes = {
            "softcap": self.softcap, "alibi": self.alibi, "bias": self.bias, "sinks": self.sinks, "function": self.function,
        }  # fmt: skip
        found += [f"score {name}" for name, there in changes.items() if there]
        others = {
            "packed": self.packed, "seqused": self.used, "dropout": self.dropout, "lengths that lie": self.lie,
            "poison": self.poison, "gradients": self.gradients, "deterministic": self.deterministic, "bad argument": self.bad,
            "GQA": self.group > 1, "head dims differ": self.head_dim != self.head_dim_v, "nothing there": 0 in self.lengths,
        }  # fmt: skip
        found += [name for name, there in others.items() if there]
        return found + [f"layout {name}" for name in {*self.layouts, self.dout_layout} if name != "contiguous"]

    @property
    def layouts(self) -> tuple[str, str, str]:
        return self.q_layout, self.k_layout, self.v_layout

    @property
    def lengths(self) -> tuple[int, int, int]:
        return self.batch, self.n_q, self.n_kv

    @property
    def heads_q(self) -> int:
        return self.heads_kv * self.group


FAMILY = 40
"""Consecutive cases on a GPU that share what kernels are compiled for."""

_LENGTHS = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300)
_LONG = (383, 384, 385, 511, 512, 513, 777, 1023, 1024, 1025, 1500, 2048, 2049, 3000, 4097)
_MOST = {"cpu": 1 << 17, "interpreter": 1 << 14, "cuda": 1 << 23}
"""Pairs of a case, over batch and heads, and numbers of its tensors."""


def drawn(number: int, device: str = "cpu") -> Case:
    """The case of a number. The same on every machine, for each of "cpu", "cuda" and "simulator"."""
    if device == "simulator":
        of_its_own = drawn(FAMILY * number, "cuda")  # nothing is compiled, so no family shares anything
        return _simulated(Random(f"simulator {number}"), replace(of_its_own, seed=number % 1000))
    kernel = Random(f"{device} kernel {number if device == 'cpu' else number // FAMILY}")
    random = Random(f"{device} {number}")
    case = _kernel(kernel, Case(device=device, seed=number % 1000))
    return _consistent(_call(random, case))


def _some(random: Random, share: float) -> bool:
    return random.random() < share


def _kernel(random: Random, case: Case) -> Case:
    """What decides which kernel runs, and how it is compiled."""
    gpu = case.device == "cuda"
    share = random.choice((0.0, 0.1, 0.25, 0.25, 0.6))  # of features: from plain problems to all at once
    if gpu:
        backend = random.choice((None, None, "sm90", "sm90", "sm90", "portable", "portable", "tiled"))
        dtypes: tuple[str, ...] = ("fp16", "bf16", "bf16") if backend == "sm90" else ("fp16", "bf16", "fp32")
        dims = (64, 64, 96, 128, 128, 128, 192, 256, 40, 80, 8)
    else:
        backend = random.choice((None, None, "torch_cpu", "tiled", "portable", "portable"))
        dtypes = ("fp16", "bf16", "fp32", "fp32", "fp64")
        dims = (8, 16, 24, 32, 32, 40, 64, 64, 80, 96, 128)
    door = random.choices(DOORS, (60, 20, 6, 6, 4, 1 if not gpu else 0))[0]
    dim = random.choice(dims)
    dim_v = random.choice((*dims, 4, 20)) if _some(random, 0.12) else dim
    if _some(random, 0.02):
        dim = random.choice((1, 20, 63, 264, 512))
    facts: dict = dict(door=door, dtype=random.choice(dtypes), head_dim=dim, head_dim_v=dim_v)
    facts |= dict(packed=_some(random, 0.3), dropout=random.choice((0.1, 0.5, 0.9)) if _some(random, share / 2) else 0.0)
    facts |= dict(used=random.choice(("q", "kv", "both")) if _some(random, share) else "")
    for name in ("left", "right", "prefix"):
        facts[name] = 0 if _some(random, max(0.15, share)) else None  # how far is the call's
    if _some(random, 0.25):
        facts["right"] = 0
    facts |= dict(visible=random.randrange(1, 4) if _some(random, share / 2) else 0)
    facts |= dict(documents=random.choice(("sorted", "sorted", "mixed", "large")) if _some(random, share) else "")
    facts |= dict(softcap=random.choice((1.0, 4.0, 30.0)) if _some(random, share) else 0.0)
    facts |= dict(alibi=random.choice(("heads", "batch")) if _some(random, share) else "")
    facts |= dict(bias=random.choice(BIASES) if _some(random, share) else "")
    facts |= dict(bias_dtype=random.choice(("fp32", facts["dtype"])) if facts["bias"] else "fp32")
    facts |= dict(sinks=random.choice(("fp32", "bf16", "fp16")) if _some(random, share) else "")
    facts |= dict(function=random.randrange(1, 4) if _some(random, share / 2) else 0)
    facts |= dict(gradients=random.choice(("both", "both", "out", "lse")) if _some(random, 0.5) else "")
    facts |= dict(deterministic=_some(random, 0.15))
    if door == "attention":
        facts |= dict(backend=backend)
    return replace(case, **facts)


def _call(random: Random, case: Case) -> Case:
    """What a call has of its own."""
    gpu = case.device == "cuda"
    lengths = _LENGTHS + _LONG if gpu else _LENGTHS
    facts: dict = dict(batch=random.choice((1, 1, 2, 2, 3, 5)), n_q=random.choice(lengths), n_kv=random.choice(lengths))
    if _some(random, 0.3):
        facts |= dict(n_q=facts["n_kv"])
    if gpu and _some(random, 0.1):
        facts |= dict(n_q=random.choice((1, 2, 5)), n_kv=random.choice((3000, 8192, 20000)))
    if _some(random, 0.02):
        facts |= dict(batch=0)
    heads = random.choice(((1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (3, 2), (1, 8), (1, 5), (4, 1)))
    facts |= dict(heads_kv=heads[0], group=heads[1])
    for name in ("left", "right", "prefix"):
        if getattr(case, name) is not None:
            facts[name] = random.choice((0, 1, 5, 16, 37, 64, 100, 127, 128, 200, 300, 1000, 2**31 - 1, 2**40))
    if case.right is not None and _some(random, 0.7):
        facts["right"] = 0
    if _some(random, 0.1):
        facts |= dict(scale=random.choice((1.0, 0.01, 0.5, 3.0, 0.0, -0.3, 1e-8)))
    if _some(random, 0.35):
        facts |= {f"{x}_layout": random.choice(LAYOUTS[:-1]) for x in "qkv" if _some(random, 0.6)}
    if _some(random, 0.02):
        facts |= {f"{random.choice('qkv')}_layout": LAYOUTS[-1]}
    if case.gradients and _some(random, 0.3):
        facts |= dict(dout_layout=random.choice(("heads first", "same for all", "misplaced", "last dim strided")))
    if _some(random, 0.25):
        facts |= dict(values=random.choice(VALUES[1:]))
    facts |= dict(logits=random.choice((1.0, 1.0, 1.0, 5.0, 30.0, 300.0)))
    if _some(random, 0.25):
        facts |= dict(poison=random.choice(("nan", "inf", "large")))
    if (case.packed or case.used) and _some(random, 0.06):
        facts |= dict(lie=random.choice(LIES))
    facts |= dict(wants_lse=case.gradients in ("both", "lse") or _some(random, 0.7))
    ways = WAYS if gpu else WAYS[:-2]
    rare = {
        "compiled": 1,
        "compiled under autocast": 1,
        "checkpoint": 2,
        "graph": 3,
        "once": 30,
        "again": 8,
        "others first": 20 if gpu else 5,
    }
    facts |= dict(way=random.choices(ways, [rare.get(way, 5) for way in ways])[0])
    if _some(random, 0.08):
        facts |= dict(bad=random.randrange(1, 1 << 16), gradients="", way="once")
    return replace(case, **facts)


def _consistent(case: Case) -> Case:
    """Without facts that do not go together, which would be refused, and of a size that can be checked."""
    facts: dict = {}
    if case.packed:
        facts |= dict(documents="", bias="")
        if case.batch == 0:
            facts |= dict(batch=1)
    if case.backend == "torch_cpu":
        facts |= dict(
            packed=False, used="", dropout=0.0, visible=0, softcap=0.0, alibi="", bias="", sinks="", function=0,
            head_dim_v=case.head_dim, documents=case.documents,
        )  # fmt: skip
    if case.door in ("flash", "kvpacked", "qkvpacked"):
        facts |= dict(prefix=None, documents="", visible=0, function=0, bias="", backend=None)
        facts |= dict(used=case.used if case.packed else "")
    if case.door in ("kvpacked", "qkvpacked"):
        facts |= dict(
            packed=False, used="", lie="", head_dim_v=case.head_dim, k_layout="contiguous", v_layout="contiguous", sinks=""
        )
    if case.door == "qkvpacked":
        facts |= dict(n_q=case.n_kv, group=1, q_layout="contiguous")
    if case.door in ("fp8", "simulator"):
        facts |= dict(
            backend=None, alibi="", bias="", function=0, dropout=0.0, gradients="", deterministic=False, documents="",
            visible=0, lie="", bad=0, poison="", logits=min(case.logits, 5.0),
            way=case.way if case.way in ("once", "no_grad", "again", "stream") else "once",
            values=case.values if case.values in ("normal", "growing", "equal", "zero") else "normal",
        )  # fmt: skip
        facts |= {f"{x}_layout": "contiguous" for x in "qkv"}
    if case.door == "fp8":
        facts |= dict(dtype="fp8")
        if case.device == "cuda":
            # Scores must not outgrow the first block's by 2^124 (docs/fp8.md).
            facts |= dict(prefix=None, scale=case.scale if case.scale is not None and 0 < case.scale < 0.5 else None)
        facts |= dict(head_dim=(dim := min(max(case.head_dim // 16, 1) * 16, 256)), head_dim_v=dim)
    if case.door == "simulator":
        facts |= dict(
            used="", softcap=0.0, sinks="", dtype="bf16" if case.dtype == "bf16" else "fp16", head_dim=64, head_dim_v=64,
            packed=False, batch=1, heads_kv=1, group=min(case.group, 2), n_q=max(1, case.n_q), n_kv=max(1, case.n_kv),
            scale=None, wants_lse=True, way="once",
        )  # fmt: skip
    if case.values in ("nan", "inf"):
        facts |= dict(gradients="", poison="", bias="", function=0, dropout=0.0, logits=1.0, softcap=0.0)
        facts |= dict(scale=None)
    if any(dim % 8 or dim > 256 for dim in (case.head_dim, case.head_dim_v)):  # which is refused
        facts |= dict(poison="", way="once", lie="")
    if case.values in ("huge", "tiny"):
        facts |= dict(gradients="", logits=1.0)
    if case.way in ("no_grad", "inference", "graph"):
        facts |= dict(gradients="")
    if case.way == "graph" and case.backend == "tiled":  # which looks at its numbers
        facts |= dict(way="once")
    if case.way in ("graph", "compiled", "compiled under autocast", "checkpoint") and case.dropout:
        facts |= dict(way="once")
    if case.way == "checkpoint":
        facts |= dict(gradients=facts.get("gradients", case.gradients) and "both", wants_lse=True)
    if not (facts.get("packed", case.packed) or facts.get("used", case.used)) or case.batch == 0:
        facts |= dict(lie="")
    case = replace(case, **facts)
    if case.lie:
        case = replace(case, poison="", bad=0, way="once", values="normal", gradients=case.gradients and "both")
    if not case.gradients:
        case = replace(case, dout_layout="contiguous", deterministic=False)
    interpreted = case.device == "cpu" and case.backend == "portable"
    return _of_size(case, _MOST["interpreter" if interpreted and case.seed % 20 else case.device])


def _simulated(random: Random, case: Case) -> Case:
    """A GPU's case as the simulator runs it: by Hopper's kernels, with few rows and keys. backend: the way of the backward,
    "deterministic", "two passes" or, None, what is chosen. way: the order in which asynchronous work finishes."""
    dims = [min(max(8, dim // 8 * 8), 256) for dim in (case.head_dim, case.head_dim_v)]
    gradients = case.gradients or random.choice(("", "both"))
    backend = random.choice((None, "deterministic", "two passes")) if gradients else None
    return replace(
        case, device="simulator", door="attention", backend=backend,
        dtype=case.dtype if case.dtype in ("fp16", "bf16") else "bf16", batch=min(max(1, case.batch), 3),
        heads_kv=min(case.heads_kv, 2), group=min(case.group, 2), head_dim=dims[0], head_dim_v=dims[1],
        n_q=min(case.n_q, random.choice((1, 70, 150, 300))), n_kv=min(case.n_kv, random.choice((1, 70, 150, 300))),
        bias=case.bias if _some(random, 0.5) else "", logits=min(case.logits, 5.0), gradients=gradients, deterministic=False,
        way=random.choice(("once", "random", "late", "early", "uneven")), bad=0, lie="", poison="", q_layout="contiguous",
        k_layout="contiguous", v_layout="contiguous", dout_layout="contiguous",
        values=case.values if case.values in ("growing", "falling", "equal", "zero") else "normal",
    )  # fmt: skip


def _of_size(case: Case, most: int) -> Case:
    """With fewer rows and keys if there are too many."""
    if case.door == "simulator":
        most = 1 << 16

    def too_large(case: Case) -> bool:
        tokens = case.batch * (case.n_q * case.heads_q + 2 * case.n_kv * case.heads_kv)
        square = case.batch * case.heads_q * case.n_kv**2 if case.function and case.gradients else 0
        return max(case.batch * case.heads_q * case.n_q * case.n_kv, square, tokens * case.head_dim // 4) > most

    while too_large(case):
        longer = "n_q" if case.n_q > case.n_kv else "n_kv"
        case = replace(case, **{longer: getattr(case, longer) * 2 // 3})
        if case.door == "qkvpacked":
            case = replace(case, n_q=case.n_kv)
    return case
