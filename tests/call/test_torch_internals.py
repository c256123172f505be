"""Each of PyTorch's private names may go: the library says so in the log, and computes the same."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from strobe.call import torch_internals

NAMES = re.findall(r'_private\(\s*"([\w.]+)"', Path(torch_internals.__file__).read_text())

WITHOUT = """
import json, logging, os, pkgutil, sys, traceback
import torch
import torch._dynamo  # before the fork: it takes seconds

resolve = pkgutil.resolve_name


def computed(missing):
    "What calls give where PyTorch lacks a name, and what the log says."
    said = []

    def resolve_others(name):
        if name == missing:
            raise AttributeError(name)
        return resolve(name)

    pkgutil.resolve_name = resolve_others
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("strobe").addHandler(handler)
    import strobe

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3))
    out = strobe.attention(q, k, v, mask=strobe.Causal(), score=strobe.Score(softcap=2.0))
    numbers = [out.sum().item(), *(g.sum().item() for g in torch.autograd.grad(out.square().sum(), (q, k, v)))]
    again = strobe.attention(q, k, v, mask=strobe.Causal(), score=strobe.Score(softcap=2.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = strobe.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    return numbers, torch.equal(out, again), str(half.dtype), said


for name in [None, *json.loads(sys.argv[1])]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = computed(name)
        except BaseException:
            answer = traceback.format_exc()
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(pipe.read(), flush=True)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def answers() -> dict:
    """A name (None: nothing is missing) -> what was computed without it."""
    done = subprocess.run([sys.executable, "-c", WITHOUT, json.dumps(NAMES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip([None, *NAMES], map(json.loads, done.stdout.splitlines()), strict=True))


def test_all_private_names_are_known():
    assert len(NAMES) >= 15 and len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_name_costs_no_result(answers, name):
    whole, answer = answers[None], answers[name]
    assert not isinstance(answer, str), answer
    numbers, same, dtype, said = answer
    assert numbers == pytest.approx(whole[0], rel=1e-5) and same and dtype == "torch.bfloat16"
    expected = "cuda" not in name.lower() or torch_internals._HAS_CUDA or "_empty_strided" in name
    assert len([line for line in said if name in line]) == expected, said


def test_nothing_is_said_where_nothing_is_missing(answers):
    assert answers[None][3] == []


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


STRAIGHT = {
    "a plain tensor": lambda f, x: f(x),
    "a parameter": lambda f, x: f(torch.nn.Parameter(x), x),
    "no gradients": lambda f, x: within(torch.no_grad(), f, x),
    "autocast": lambda f, x: within(torch.autocast("cpu", torch.bfloat16), f, x),
    "a default device": lambda f, x: within(torch.device("cpu"), f, x),
}
NOT_STRAIGHT = {
    "a mode": lambda f, x: within(Watch(), f, x),
    "a compiler": lambda f, x: torch.compile(f, backend="aot_eager")(x),
    "a fake tensor": lambda f, x: f(FakeTensorMode().from_tensor(x)),
    "a transform": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "another sign": lambda f, x: f(torch._neg_view(x)),
    "another sign of the second": lambda f, x: f(x, torch._neg_view(x)),
    "sparse": lambda f, x: f(x.to_sparse()),
    "nested": lambda f, x: f(torch.nested.nested_tensor([x, x])),
    "jagged": lambda f, x: f(torch.nested.nested_tensor([x, x], layout=torch.jagged)),
    "meta": lambda f, x: f(x.to("meta")),
}


def within(context, f, *arguments):
    with context:
        f(*arguments)


@pytest.mark.skipif(not torch_internals.HAS_RULES, reason="this PyTorch has no rules at dispatch keys")
@pytest.mark.parametrize("name", [*STRAIGHT, *NOT_STRAIGHT])
def test_what_stands_between_autograd_and_a_kernel(name):
    with torch.library._scoped_library("strobe_test", "FRAGMENT") as library:
        library.define("keys(Tensor x, Tensor? y=None) -> Tensor")
        seen = []

        def autograd(keyset, *arguments):
            seen.append(torch_internals.next_is_a_kernel(keyset))
            with torch_internals.below_autograd():
                return torch.ops.strobe_test.keys(*arguments)

        library.impl("keys", autograd, "Autograd", with_keyset=True)
        library.impl("keys", lambda x, y=None: x.clone(), "CPU")
        torch.library.register_fake("strobe_test::keys", lambda x, y=None: torch.empty_like(x), lib=library)
        call = {**STRAIGHT, **NOT_STRAIGHT}[name]
        try:
            call(torch.ops.strobe_test.keys, torch.randn(2, 3))
        except (NotImplementedError, RuntimeError):
            assert name in ("nested", "jagged", "sparse", "meta")  # there is no kernel for these
        assert seen[0] == (name in STRAIGHT)
