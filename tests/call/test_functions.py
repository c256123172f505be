"""Users' functions: what they may be, which are the same, and that torch, Triton and Gluon run one source."""

import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from problems import _mask_function, _score_function
from tritons import TRITONS, output_of

import strobe
from strobe import functions, scores
from strobe.kernels.common import gluon_math, gluon_scores
from strobe.kernels.gluon import gl, gluon
from strobe.sim import simulate

TABLE = torch.ones(3)
FACTOR = 2.0


def steeper(factor):
    def steep(score, batch, head, q_index, kv_index):
        return score * factor

    return steep


def doubled(score, batch, head, q_index, kv_index):
    return score * FACTOR


# ---- the same function or another


def test_a_function_is_its_source_and_its_numbers(monkeypatch):
    one, same, other = (functions.score_function(steeper(factor)) for factor in (2.0, 2.0, 3.0))
    assert one == same and one is same and one != other
    before = functions.score_function(doubled)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5.0)
    after = functions.score_function(doubled)
    assert before != after
    s, *indices = torch.ones(1, 1, 1, 1), *(torch.zeros(1, 1, dtype=torch.int64),) * 4
    assert (before(s, *indices).item(), after(s, *indices).item()) == (2.0, 5.0)


def test_a_function_of_tritons():
    jitted = triton.jit(in_tritons_names)
    q = torch.randn(1, 9, 2, 16)
    want = strobe.attention(q, q, q, score=strobe.Score(function=in_strobes_names))
    torch.testing.assert_close(strobe.attention(q, q, q, score=strobe.Score(function=jitted)), want)


def in_tritons_names(score, batch, head, q_index, kv_index):
    return tl.where(q_index > kv_index, tl.exp(score), score)


def in_strobes_names(score, batch, head, q_index, kv_index):
    return strobe.math.where(q_index > kv_index, strobe.math.exp(score), score)


def test_a_key_of_another_process_is_unknown():
    with pytest.raises(ValueError, match="function far is unknown in this process"):
        functions.known("far@0123")


# ---- what is refused


def with_a_tensor(score, batch, head, q_index, kv_index):
    return score * TABLE


def with_torch(score, batch, head, q_index, kv_index):
    return torch.exp(score)


def with_a_branch(score, batch, head, q_index, kv_index):
    if score > 0:
        return score
    return -score


def with_a_name_that_tritons_has(score, batch, head, q_index, kv_index):
    return tl.erf(score)


def with_print(score, batch, head, q_index, kv_index):
    print(score)
    return score


def with_an_import(score, batch, head, q_index, kv_index):
    import math

    return score * math.pi


def with_a_function_inside(score, batch, head, q_index, kv_index):
    return sum([score for _ in (1, 2)])


def of_integers(score, batch, head, q_index, kv_index):
    return q_index - kv_index


def of_four(score, batch, head, q_index):
    return score


def of_a_default(score, batch, head, q_index, kv_index, slope=1.0):
    return score * slope


def no_bool(batch, head, q_index, kv_index):
    return q_index - kv_index


@pytest.mark.parametrize("make, function, message", [
    (functions.score_function, 3, "must be a Python function made by def"),
    (functions.score_function, lambda s, b, h, i, j: s, "must be a Python function made by def"),
    (functions.score_function, with_a_tensor, "with_a_tensor uses TABLE, a Tensor: it may use numbers"),
    (functions.score_function, with_torch, "with_torch uses torch, a module: it may use"),
    (functions.score_function, with_print, "with_print uses print, a builtin_function_or_method: it may"),
    (functions.score_function, with_an_import, "must not import within itself, as with_an_import does"),
    (functions.score_function, with_a_branch, "with_a_branch fails on tensors .*ambiguous.*it may use"),
    (functions.score_function, with_a_name_that_tritons_has, "fails on tensors .*no attribute 'erf'"),
    (functions.score_function, with_a_function_inside, "must not define functions within itself|uses sum"),
    (functions.score_function, of_integers, "of_integers must return a floating point tensor, got torch.int64"),
    (functions.score_function, of_four, r"must take \(score, batch, head, q_index, kv_index\), got of_four\("),
    (functions.score_function, of_a_default, r"must take \(score, batch, head, q_index, kv_index\), got of_a_default"),
    (functions.mask_function, no_bool, "no_bool must return a bool tensor, got torch.int64"),
    (functions.mask_function, doubled, r"mask: function must take \(batch, head, q_index, kv_index\), got doubled"),
])  # fmt: skip
def test_refusals(make, function, message):
    with pytest.raises(TypeError, match=message) as caught:
        make(function)
    assert "\n" not in str(caught.value)


# ---- one source


def test_tanh():
    """Of kernels, in float64 as in float32: to a few units in the last place of float32, near 0 too."""
    x = torch.cat([torch.linspace(-30, 30, 20001), torch.logspace(-30, 0, 1001), torch.tensor([torch.inf, -torch.inf])])
    torch.testing.assert_close(scores.tanh(x), torch.tanh(x.double()).float(), rtol=1e-6, atol=0)
    assert scores.tanh(torch.tensor(torch.nan)).isnan()


@gluon.jit
def kernel(x, y, inner, outer, slope, batch, head, FUNCTION: gl.constexpr, VISIBLE: gl.constexpr):
    """Scores of 64 rows and keys, in the layout of a wgmma; x is the product and the bias."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    keys = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    s, _ = gluon_scores.score_and_factor(gl.load(x + rows * 64 + keys), rows, keys, inner, outer, slope)
    s = gluon_scores.with_bias(s, gl.load(x + rows * 64 + keys))
    s = gluon_scores.with_function(s, FUNCTION, batch, head, rows, keys)
    s = gl.where(VISIBLE(batch, head, rows, keys), s, float("-inf"))
    gl.store(y + rows * 64 + keys, s)


SCORE, MASK = functions.score_function(_score_function), functions.mask_function(_mask_function)
COMPILED = gluon_math.of_user(SCORE), gluon_math.of_user(MASK)


def test_gluon_runs_the_same_source():
    x, y = 3 * torch.randn(64, 64), torch.zeros(64, 64)
    simulate(kernel, (1, 1, 1), x, y, 0.2, 3.0, 0.5, 1, 2, *COMPILED, arch=90, num_warps=4)
    i, j, batch, head = torch.arange(64)[:, None], torch.arange(64)[None, :], torch.tensor(1), torch.tensor(2)
    s = (3.0 * torch.tanh(0.2 * x) - 0.5 * (i - j).abs()) * scores.LN2 + x
    want = torch.where(MASK(batch, head, i, j), SCORE(s, batch, head, i, j) * scores.LOG2E, -torch.inf)
    torch.testing.assert_close(y, want, atol=1e-4, rtol=1e-5)


COMPILE = """
import torch
from strobe.lab.binary.offline import pretend_gpu
from test_functions import COMPILED, kernel

x = torch.empty(64, 64, device="meta")
with pretend_gpu(90):
    for outer, slope in ((None, None), (3.0, None), (3.0, 0.5)):
        kernel.warmup(x, x, 1.0, outer, slope, 1, 2, *COMPILED, grid=(1,), num_warps=4)
print("compiled")
"""


FOLDERS = Path(__file__).parent, Path(__file__).parents[1]
"""Where programs find this file and what it imports."""


@pytest.mark.parametrize("triton", TRITONS)
def test_gluon_compiles_the_same_source(triton):
    assert "compiled" in output_of(COMPILE, triton=triton, path=FOLDERS)


def further(least):
    def by(batch, head, q_index, kv_index):
        return q_index - kv_index > least

    return by


TWO_OF_ONE_NAME = """
from test_functions import further
import torch, strobe
from strobe.arguments import options_of
from strobe.call.options import describe, operands_of
from strobe.device import KNOWN
from strobe.kernels.common.call import unfilled
from strobe.kernels.portable import backend
from strobe.lab.binary.offline import pretend_gpu

q, arch = torch.randn(1, 64, 1, 64, dtype=torch.bfloat16), KNOWN["A100"]
options = options_of(q, q, q, mask=strobe.Visible(further(7001)) & strobe.Visible(further(7003)))
problem = describe(operands_of(q, q, q, options), options)
with pretend_gpu(80):
    [call] = backend.calls(problem, unfilled(problem, backend.buffers(problem, arch)), arch)
    ir = call.compile().asm["ttir"]
print("7001" in ir, "7003" in ir)
"""


def test_two_functions_of_one_name_are_both_compiled(tmp_path):
    """Triton takes two functions of one name, as a maker of functions gives all that it makes, for the same one."""
    assert output_of(TWO_OF_ONE_NAME, path=FOLDERS, TRITON_CACHE_DIR=str(tmp_path)).split() == ["True", "True"]


def of_keys(batch, head, q_index, kv_index):
    return kv_index != 7 + batch


ONE_COORDINATE = """
from dataclasses import replace
import torch, strobe
from strobe.device import KNOWN
from strobe.lab.binary import offline
from strobe.problem import AttentionProblem, Dense
from test_functions import of_keys

a100 = KNOWN["A100"]
problem = AttentionProblem(Dense(2, 300, 310), 2, 2, 64, 64, torch.bfloat16, 0.1, mask=strobe.Visible(of_keys))
made = offline.portable_forward(problem, a100) + offline.portable_backward(replace(problem, phase="backward"), a100)
made += offline.sm80_forward(problem, a100) + offline.sm90_forward(problem, KNOWN["H200"])
print(len(made))
"""


def test_a_mask_of_keys_alone_is_compiled():
    assert output_of(ONE_COORDINATE, path=FOLDERS).split() == ["5"]
