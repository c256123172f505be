"""One case of the fuzzer: run it through its door, in its way, and compare it with the specification."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import strobe
from strobe.call.dispatch import backend_module
from strobe.device import arch_of
from strobe.lab.bench.failures import compact
from strobe.lab.fuzz import bad_arguments
from strobe.lab.fuzz.bad_arguments import REFUSALS
from strobe.lab.fuzz.cases import Case
from strobe.lab.fuzz.inputs import MASK_FUNCTIONS, Inputs, clamped, document_numbers, inputs, lying, mask_of
from strobe.lab.fuzz.right import SEED, Precision, Results, Tensors, describe, differs, precision_of_fp8, reference
from strobe.masks import Mask
from strobe.scores import Score


@dataclass(frozen=True)
class Outcome:
    """What became of a case. kind: "right", "refused" (with the reason), or a failure: "wrong", "error", "died", "hung"."""

    kind: str
    words: str = ""

    @property
    def bad(self) -> bool:
        return self.kind not in ("right", "refused")

    @property
    def lost(self) -> bool:
        """Whether the process has lost its GPU, so that what comes after is no finding."""
        return self.kind == "error" and "CUDA" in self.words


class Wrong(Exception):
    """A result, or a message, that is not as it should be."""


def outcome(case: Case, how: Callable[[Case], Outcome] | None = None) -> Outcome:
    """Runs a case. Never raises, but for what ends a process. how: what runs it; None means its door."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return (how or _outcome)(case)
    except (Wrong, bad_arguments.NotRefused) as error:
        return Outcome("wrong", str(error))
    except torch.OutOfMemoryError:
        return Outcome("refused", "takes too much memory for this machine")
    except Exception as error:
        return Outcome("error", compact(error))
    finally:
        torch.use_deterministic_algorithms(False)


def _outcome(case: Case) -> Outcome:
    given = inputs(case)
    check_mask(case)
    if case.bad:
        return Outcome("right", bad_arguments.check(case, given.given))
    if case.lie:
        return _of_a_lie(case, given)
    legal, reasons = supported(case, given.given)
    if not legal:
        return refused(case, given, reasons)
    try:
        results = run(case, given)
    except ValueError as error:
        if case.gradients and str(error).startswith(("backend ", "no backend runs")):
            return Outcome("refused", one_line(error))
        raise
    except NotImplementedError as error:
        if case.door == "fp8":
            return Outcome("refused", one_line(error))
        raise
    if results is None:
        return Outcome("refused", "simulator: leaves a block of rows to another kernel")
    compare(case, given, results)
    if case.device == "cuda":
        torch.cuda.synchronize()
    return Outcome("right")


# ---- what may be refused


def supported(case: Case, t: Tensors) -> tuple[bool, list[str]]:
    if case.door == "simulator":
        problem, _ = describe(t)
        from strobe.device import KNOWN

        reason = backend_module("sm90").refuses(problem, KNOWN["H200"])
        return reason is None, [f"simulator: {reason}"]
    if case.door == "fp8":
        return True, []
    return strobe.supports(t.q, t.k, t.v, backend=case.backend, **t.keywords)


def refused(case: Case, given: Inputs, reasons: list[str]) -> Outcome:
    """Whether a call that `supports` says no to is refused in one sentence."""
    if case.door != "simulator":
        try:
            _call(case, given.given, given.descales)
        except REFUSALS as error:
            one_line(error)
        else:
            raise Wrong(f"supports says no ({'; '.join(reasons)}), and the call runs")
    return Outcome("refused", reasons[-1])


def one_line(error: Exception) -> str:
    """The message of a refusal, which is one line of words."""
    words = str(error)
    if "\n" in words or not words:
        raise Wrong(f"a refusal of {len(words.splitlines())} lines: {compact(error)}")
    return words


def _of_a_lie(case: Case, given: Inputs) -> Outcome:
    """Lengths that cannot be are refused on a CPU. On a GPU, where nothing waits to look at them, they are clamped."""
    t = replace(given.given, keywords=lying(case, given.given.keywords))
    if not supported(case, t)[0]:
        return Outcome("refused", "lengths that lie, of what no backend takes")
    if case.device == "cpu":
        try:
            _call(case, t, given.descales)
        except ValueError as error:
            if "seq" not in one_line(error):
                raise Wrong(f"lengths that lie are refused without their name: {error}") from None
            return Outcome("right")
        if all(torch.equal(x, t.keywords[name]) for name, x in given.given.keywords.items() if isinstance(x, torch.Tensor)):
            return Outcome("right")  # the lie was none
        raise Wrong("lengths that lie run")
    results = run(case, given._replace(given=t))
    torch.cuda.synchronize()
    clean, apart = clamped(replace(given.clean, keywords=t.keywords))
    if apart and results is not None:
        compare(case, given._replace(clean=clean), results)
    return Outcome("right")


# ---- calls


def run(case: Case, given: Inputs) -> Results | None:
    """The results of a call in the case's way. None: a simulated kernel left some of it to another."""
    if case.door == "simulator":
        return _simulated(given.given)
    if case.way == "others first":
        _results(case, inputs(case, shift=1))
    if case.way == "graph":
        return _in_a_graph(case, given)
    with _surroundings(case):
        results = _results(case, given)
        if case.way == "again":
            _same_bits(case, results, _results(case, given))
    return results


@contextmanager
def _surroundings(case: Case) -> Iterator[None]:
    around: dict[str, Callable[[], AbstractContextManager]] = {
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast(case.device, torch.bfloat16),
        "compiled under autocast": lambda: torch.autocast(case.device, torch.bfloat16),
        "stream": lambda: torch.cuda.stream(torch.cuda.Stream()),
    }
    if case.way == "filled":
        torch.use_deterministic_algorithms(True)
    if case.way == "stream":
        torch.cuda.synchronize()
    try:
        with around.get(case.way, nullcontext)():
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        if case.way == "stream":
            torch.cuda.synchronize()


def _results(case: Case, given: Inputs) -> Results:
    t = given.given.with_gradients() if case.gradients else given.given
    call = _call
    if case.way.startswith("compiled"):
        torch._dynamo.reset()
        call = torch.compile(_call, backend="aot_eager", fullgraph=True)
    if case.dropout:
        torch.manual_seed(SEED)
    if case.way == "checkpoint":
        out, lse = checkpoint(call, case, t, given.descales, use_reentrant=False)
    else:
        out, lse = call(case, t, given.descales)
    if not case.gradients:
        return Results(out, lse)
    if lse is None:
        found = t.gradients((out,), (given.dout,))
    else:
        found = t.gradients((out, lse), (given.dout, upstream_of_lse(given, lse)))
    return Results(out.detach(), None if lse is None else lse.detach(), **found)


def upstream_of_lse(given: Inputs, lse: torch.Tensor) -> torch.Tensor | None:
    """The LSE's gradient; 0 where the row sees nothing."""
    return None if given.dlse is None else torch.where(torch.isneginf(lse), 0.0, given.dlse)


def _call(case: Case, t: Tensors, descales: dict[str, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, v, keywords = t.q, t.k, t.v, t.keywords
    result: Any
    options: dict[str, Any]
    if case.door == "attention":
        options = {"return_lse": case.wants_lse, "deterministic": case.deterministic, "backend": case.backend}
        result = strobe.attention(q, k, v, **keywords, **options)
        return result if case.wants_lse else (result, None)
    if case.door == "fp8":
        options = {**keywords, **(descales or {})}
        result = strobe.attention_fp8(q, k, v, return_lse=case.wants_lse, **options)
        return result if case.wants_lse else (result, None)
    mask: Mask = keywords["mask"]
    score: Score = keywords["score"]
    common: dict = dict(
        dropout_p=keywords.get("dropout_p", 0.0), softmax_scale=keywords.get("scale"), causal=mask.right == 0,
        window_size=tuple(-1 if side is None else side for side in (mask.left, mask.right)), softcap=score.softcap,
        alibi_slopes=score.alibi, deterministic=case.deterministic, return_attn_probs=case.wants_lse,
    )  # fmt: skip
    if case.door == "qkvpacked":
        result = strobe.flash_attn_qkvpacked_func(_stacked(q, k, v), **common)
    elif case.door == "kvpacked":
        result = strobe.flash_attn_kvpacked_func(q, _stacked(k, v), **common)
    elif case.packed:
        for side in "qk":
            ours = "q" if side == "q" else "kv"
            common |= {f"{name}_{side}": keywords.get(f"{name}_{ours}") for name in ("cu_seqlens", "max_seqlen", "seqused")}
        result = strobe.flash_attn_varlen_func(q, k, v, **common, learnable_sink=score.sinks)
    else:
        result = strobe.flash_attn_func(q, k, v, **common, learnable_sink=score.sinks)
    return result[:2] if case.wants_lse else (result, None)


def _stacked(*tensors: torch.Tensor) -> torch.Tensor:
    with torch.autocast(tensors[0].device.type, enabled=False):  # of which PyTorch's own stack would make another dtype
        return torch.stack(tensors, 2)


def _in_a_graph(case: Case, given: Inputs) -> Results:
    """The results of a CUDA graph's replay; they are wiped before it, so that only the replay can have written them."""
    _results(case, given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _results(case, given)
    for x in (results.out, results.lse):
        if x is not None:
            x.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return results


def _simulated(t: Tensors) -> Results | None:
    from strobe.sim.attention import simulate_forward

    found = simulate_forward(*describe(t))
    if found.notes is not None and bool(found.notes.any()):
        return None
    return Results(found.out, found.lse)


def _same_bits(case: Case, first: Results, second: Results) -> None:
    """Gradients that a GPU adds up in any order are as they come, unless the case is deterministic."""
    any_order = case.device == "cuda" and not case.deterministic
    for name in Results.ALL:
        one, other = getattr(first, name), getattr(second, name)
        if one is None or (any_order and name in ("dq", "dbias")):
            continue
        if not torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)):
            raise Wrong(f"{name}: a second call gives other bits")


# ---- what is right


def compare(case: Case, given: Inputs, results: Results) -> None:
    """Raises Wrong where results are not what the specification says."""
    clean = given.clean
    dlse = None if results.lse is None else upstream_of_lse(given, results.lse)
    if case.door == "fp8":
        precision = precision_of_fp8(case.head_dim) if case.device == "cuda" else Precision.of(torch.bfloat16)
    else:
        precision = Precision.of(clean.q.dtype, case.device)
        if results.out.dtype != clean.q.dtype:
            raise Wrong(f"out: {results.out.dtype} of inputs in {clean.q.dtype}")
    touched = None
    if case.values in ("nan", "inf"):
        clean, touched = without_broken_values(clean)
    want, allowed = reference(clean, precision, given.dout, dlse)
    if touched is not None:
        # Whether a row meets values of keys whose scores are all -inf, no sentence says: what came out is right.
        assert want.lse is not None
        blind = torch.isneginf(want.lse).transpose(-1, -2)[..., None]
        want = replace(want, out=torch.where(touched, torch.where(blind, results.out.double(), torch.nan), want.out))
    words = differs(results, want, allowed)
    if words is not None:
        raise Wrong(words)


def without_broken_values(t: Tensors) -> tuple[Tensors, torch.Tensor]:
    """The inputs with 0 in place of values that are not finite, and which numbers of out see one of those."""
    broken = ~torch.isfinite(t.v)
    clean = replace(t, v=torch.where(broken, 0.0, t.v))
    plain = {name: x for name, x in t.keywords.items() if name != "score"}
    evenly = Tensors(torch.zeros_like(t.q), torch.zeros_like(t.k), broken.to(t.v.dtype), plain)
    seen, _ = reference(evenly, Precision.of(t.v.dtype))
    return clean, seen.out > 0


def check_mask(case: Case) -> None:
    """Compares the mask of the specification with the sentences of docs/masks.md, pair by pair."""
    n_q, n_kv = min(case.n_q, 300), min(case.n_kv, 300)
    random = torch.Generator().manual_seed(case.seed)
    small = replace(case, n_q=n_q, n_kv=n_kv, device="cpu", batch=max(1, min(case.batch, 2)))
    state = random.get_state()
    mask = mask_of(small, random)
    random.set_state(state)
    i, j = torch.arange(n_q)[:, None], torch.arange(n_kv)[None, :]
    p = i + n_kv - n_q
    seen = torch.ones(small.batch, small.heads_q, n_q, n_kv, dtype=torch.bool)
    if case.left is not None:
        seen &= p - j <= case.left
    if case.right is not None:
        seen &= j - p <= case.right
    if case.prefix is not None:
        seen &= (j <= p) | (j < case.prefix)
    if case.documents:
        ids_q, ids_kv = document_numbers(small, random)
        seen &= (ids_q[:, :, None] == ids_kv[:, None, :])[:, None]
    if case.visible:
        batch, head = torch.arange(small.batch)[:, None, None, None], torch.arange(small.heads_q)[:, None, None]
        seen &= MASK_FUNCTIONS[case.visible - 1](batch, head, i, j)
    ours = mask.dense(n_q, n_kv, small.batch, small.heads_q)
    ours = ours[:, None] if ours.dim() == 3 else ours
    if not torch.equal(ours.expand(seen.shape), seen):
        raise Wrong(f"mask {mask}: another than docs/masks.md says, for {n_q} x {n_kv}")


def place(case: Case) -> str:
    """The machine that a case runs on."""
    return str(arch_of(torch.device(case.device)))
