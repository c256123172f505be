"""Each of PyTorch's private names may go: the library says so in the log, and computes the same."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
