"""Bad arguments for the fuzzer: one argument of a good call is replaced, and the call must be refused by name, or run."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

import torch

import strobe
from strobe.lab.bench.failures import compact
from strobe.lab.fuzz.cases import Case
from strobe.lab.fuzz.right import Tensors

REFUSALS = (ValueError, TypeError, NotImplementedError)

_OTHER_NAMES = {
    "scale": "softmax_scale", "cu_seqlens_kv": "cu_seqlens_k", "max_seqlen_kv": "max_seqlen_k", "seqused_kv": "seqused_k",
}  # fmt: skip
"""Arguments that messages call as flash-attn does."""

_OF_ALL = re.compile(
    r"\b(q|k|v|bias|alibi_slopes|sinks|Document|cu_seqlens_[qk]v?|seqused_[qk]v?|max_seqlen_[qk]v?|backend|arguments?)\b"
)
"""What a message may name where q, k or v is bad, as others are checked against them."""

_NO_TENSORS: tuple[Any, ...] = (
    "text", b"bytes", 1.5, -1, 0, True, float("nan"), float("inf"), 10**400, 1e300, 2**63, -(2**63), object(), [1, 2], {}, 1j,
)  # fmt: skip


class NotRefused(Exception):
    """A bad argument that ran, or was refused by somebody else's error."""


def _tensors() -> dict[str, Callable[[torch.Tensor], Any]]:
    """What may be given in place of a tensor."""
    return {
        "of integers": lambda x: x.to(torch.int64) if x.is_floating_point() else x.double(),
        "complex": lambda x: x.to(torch.complex64),
        "bool": lambda x: x != 0,
        "on another device": lambda x: x.to("meta"),
        "with one more dim": lambda x: x[None],
        "with one dim fewer": lambda x: x.flatten(0, 1) if x.dim() > 1 else x.sum(),
        "with one row more": lambda x: torch.cat([x, x[:1]]) if len(x) else x.new_zeros(3, *x.shape[1:]),
        "with other heads": lambda x: torch.cat([x, x], -2) if x.dim() > 2 else torch.cat([x, x], -1),
        "with another head dim": lambda x: torch.cat([x, x], -1),
        "sparse": lambda x: x.to_sparse(),
        "nested": lambda x: torch.nested.nested_tensor(list(x)) if len(x) else x.sum(),
        "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged) if len(x) else x.sum(),
        "a number": lambda x: x.sum(),
        "strided": lambda x: torch.stack([x, x], -1)[..., 0],
        "of no element": lambda x: x[..., :0],
    }


def check(case: Case, t: Tensors) -> str:
    """Puts a bad argument into the call of a case. Returns what it was; NotRefused if the call does other than it should."""
    random = Random(case.bad)
    arguments = {"q": t.q, "k": t.k, "v": t.v, **t.keywords}
    arguments |= {"deterministic": False, "dropout_p": 0.0, "backend": case.backend, "scale": None}
    name = random.choice([*arguments, "mask", "score", "softcap", "alibi", "bias", "sinks", "left", "prefix", "documents"])
    value = arguments.get(name)
    if value is None and name in ("alibi", "bias", "sinks"):
        value = getattr(arguments["score"], name)
    if isinstance(value, torch.Tensor):
        what = random.choice([*_tensors(), "no tensor"])
        try:
            bad = random.choice(_NO_TENSORS) if what == "no tensor" else _tensors()[what](value)
        except (RuntimeError, NotImplementedError, ValueError, IndexError):
            return f"{name} {what} cannot be made"
    else:
        bad = random.choice((*_NO_TENSORS, torch.tensor(3), torch.zeros(2, 2), torch.zeros(2, 3, dtype=torch.int64)))
        what = f"{bad!r:.40}" if not isinstance(bad, torch.Tensor) else f"a tensor {list(bad.shape)}"
    _refused_by_name(name, f"{name} {what}", arguments, bad)
    return f"{name} {what}"


def _refused_by_name(name: str, what: str, arguments: dict, bad: Any) -> None:
    try:
        given = _with(arguments, name, bad)
        verdict = _verdict(given)
        strobe.attention(**given)
    except REFUSALS as error:
        words = str(error)
        named = _OF_ALL.search(words) if name in ("q", "k", "v") else _named(name, words)
        if not named and _verdict(arguments) is not False:  # False: refused without the bad argument too
            raise NotRefused(f"{what}: refused without its name: {compact(error)}") from None
        if "\n" in words:
            raise NotRefused(f"{what}: refused in several lines: {compact(error)}") from None
        return
    except Exception as error:
        raise NotRefused(f"{what}: {compact(error)}") from None
    if verdict is False:
        raise NotRefused(f"{what}: supports says no, and the call runs")


def _with(arguments: dict, name: str, bad: Any) -> dict:
    """The arguments with a bad one, which may be one of a mask or of a score."""
    if name in ("softcap", "alibi", "bias", "sinks"):
        return {**arguments, "score": strobe.Score(**{name: bad})}
    made: dict[str, Callable] = {"left": strobe.Window, "prefix": strobe.Prefix, "documents": strobe.Document}
    return {**arguments, **({"mask": made[name](bad)} if name in made else {name: bad})}


def _verdict(arguments: dict) -> bool | None:
    """What `supports` says, which never raises for arguments."""
    positional = [arguments[name] for name in ("q", "k", "v")]
    rest = {name: x for name, x in arguments.items() if name not in ("q", "k", "v")}
    if not all(isinstance(x, torch.Tensor) for x in positional):
        return None
    try:
        return strobe.supports(*positional, **rest)[0]
    except Exception as error:
        raise NotRefused(f"supports raises {compact(error)}") from None


def _named(name: str, words: str) -> bool:
    names: tuple[str, ...] = (name, _OTHER_NAMES.get(name, name), "Document" if name == "documents" else name)
    names += ("max_seqlen",) if name.startswith("max") else ()
    return any(one in words for one in names)
