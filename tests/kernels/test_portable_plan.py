"""The portable kernels, prepared: on a CPU, where Triton's interpreter stands in for the driver, and on a GPU."""

import json
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import pytest
import torch
from problems import CASES, Case, check, run, tensors
from tritons import TRITONS, output_of

import strobe
from strobe.call import known_calls, launcher, launches, prepared_calls

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TAKEN = [case for case in CASES if case.n_q and case.n_kv and case.batch]


def poisoned(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(torch.nan if x.is_floating_point() else 1 << 20)


class Interpreted:
    """Prepared launches for the interpreter, which wants tensors and not addresses: it finds those that plans were given, or
    made, by their addresses, filled with NaN. What lies in scratch memory has a tensor for each plan."""

    def __init__(self):
        self.known: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        self.launched: list[str] = []

    def maker(self, like):
        def make():
            x = poisoned(torch.empty_like(like, memory_format=torch.preserve_format))
            self.known[x.data_ptr()] = x
            return x

        return make

    def compiled_call(self, kernel, grid, **keywords):
        return launcher.Call(kernel, grid, (), keywords, None)

    def prepare(self, calls, given, all_shared):
        class Prepared:
            def on(_self, stream):
                def launch(addresses):
                    now = {
                        id(x): self.known[address] if address in self.known else poisoned(x)
                        for x, address in zip(given, addresses, strict=True)
                    }
                    for kernel, grid, _, keywords, _ in calls:
                        self.launched.append(kernel.__name__)
                        kernel[grid](**{name: launcher._swap(value, now) for name, value in keywords.items()})

                return launch

        return Prepared()


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that plans launched; on a GPU of those that were prepared."""
    prepared_calls.forget()
    played, compiled_call = Interpreted(), launcher.compiled_call
    if DEVICE == "cuda":
        monkeypatch.setattr(
            launcher, "compiled_call", lambda kernel, grid, **keywords: (
                played.launched.append(kernel.__name__), compiled_call(kernel, grid, **keywords)
            )[1],
        )  # fmt: skip
    else:
        for name in ("maker", "compiled_call", "prepare"):
            monkeypatch.setattr(launcher, name, getattr(played, name))
        monkeypatch.setattr(launches, "_has_driver", lambda x: True)
        monkeypatch.setattr(known_calls, "may_be_prepared", lambda x: True)
        for phase in ("forward", "backward"):
            theirs = getattr(launches.Prepared, phase)

            def with_known(self, stream, *rest, theirs=theirs):
                for x in rest[-1]:
                    if x is not None:
                        played.known[x.data_ptr()] = x
                return theirs(self, stream, *rest)

            monkeypatch.setattr(launches.Prepared, phase, with_known)
    yield played.launched
    prepared_calls.forget()


@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_against_reference(launched, case):
    t = tensors(case, torch.float32, DEVICE)
    for _ in range(2):
        check(run(t, "portable"), t)
    spans = ["spans_kernel"] if case.mask in ("documents", "hashes", "all") else []
    want = [*spans, "_forward", "_delta", *spans, *spans, "_dkdv", "_dq"]
    assert sorted(launched) == sorted(want if DEVICE == "cuda" else 2 * want)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 1, 50), (2, 2, 40, 50)], ids=str)
def test_what_is_learned(launched, shape, deterministic):
    t = tensors(Case(40, 50, batch=2, heads_q=2, head_dim=16, mask="causal"), torch.float32, DEVICE)
    for _ in range(2):
        bias, sinks = torch.randn(shape, device=DEVICE), torch.randn(2, device=DEVICE)
        now = replace(t, keywords=t.keywords | {"score": strobe.Score(bias=bias, sinks=sinks)})
        check(run(replace(now, keywords=now.keywords | {"deterministic": deterministic}), "portable"), now)
    assert launched.count("_dq") == (1 if DEVICE == "cuda" else 2)


def test_what_is_the_operators(launched):
    """Nothing to launch, and upstream gradients whose last dim is not contiguous."""
    q = torch.randn(1, 20, 1, 16, device=DEVICE, requires_grad=True)
    strobe.attention(q, q[:, :0], q[:, :0], backend="portable")
    assert not launched
    out = strobe.attention(q, q, q, backend="portable")
    (want,) = torch.autograd.grad(out, q, torch.ones_like(out), retain_graph=True)
    launched.clear()
    (got,) = torch.autograd.grad(out.sum(), q)
    assert not launched and torch.equal(got, want)


KNOWN = """
import json, sys, torch
from problems import Case, describe, tensors
from strobe.device import KNOWN
from strobe.call import launcher
from strobe.kernels.common.call import unfilled
from strobe.kernels.portable import backend
from strobe.lab.binary.offline import pretend_gpu

for gpu, dtype, case in json.loads(sys.argv[1]):
    t = tensors(Case(8, 8, head_dim=64, **case), getattr(torch, dtype)).with_gradients()
    arch, calls = KNOWN[gpu], []
    for phase in ("forward", "backward"):
        problem, _ = describe(t, phase)
        calls += backend.calls(problem, unfilled(problem, backend.buffers(problem, arch)), arch)
    with pretend_gpu(arch.capability):
        for kernel, grid, arguments, keywords, *_ in calls:
            call = launcher.compiled_call(kernel, grid, *arguments, **keywords)
            launcher.parameters(call.compiled, launcher.all_arguments(call))  # or Unknown is raised
            print(kernel.__name__)
"""
EVERYTHING = {"softcap": 4.0, "alibi": True, "bias": True, "sinks": True, "function": True, "seqused": True, "dropout": 0.1}


LAUNCHED = [
    ("A100", "bfloat16", {"mask": "all", **EVERYTHING}),
    ("T4", "float16", {"mask": "window"}),
    ("RTX 4090", "bfloat16", {"mask": "causal"}),
    ("B200", "bfloat16", {"mask": "causal", "packed": True}),
]


@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize(
    "cases", [LAUNCHED[:1], pytest.param(LAUNCHED[1:], marks=pytest.mark.exhaustive)], ids=["A100", "others"]
)
def test_launches_need_no_triton(triton, cases):
    """What the kernels take, on GPUs from Turing to Blackwell, is known to who prepares their launches."""
    kernels = output_of(KNOWN, json.dumps(cases), triton=triton, path=[Path(__file__).parents[1]]).split()
    assert kernels.count("_dq") == len(cases) and kernels.count("spans_kernel") == 3 * (cases == LAUNCHED[:1])
