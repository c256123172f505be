"""Whatever lengths hold, our kernels in Gluon leave no tensor and end, and what still means something is right."""

from dataclasses import replace

import pytest
import torch
from lying import LIES, SAMPLE, Lie, backward_of, check_backward, check_forward, expected, inputs
from tritons import needs_tcgen05

import strobe
from strobe.device import KNOWN
from strobe.kernels.common.call import Tensors
from strobe.kernels.sm80 import backward_launch as ampere_launch
from strobe.kernels.sm80 import forward as sm80_forward
from strobe.kernels.sm80.config import BackwardConfig as AmpereBackward
from strobe.kernels.sm80.config import Config as Ampere
from strobe.kernels.sm90 import backward, backward_launch, backward_split, fp8
from strobe.kernels.sm90 import forward as sm90_forward
from strobe.kernels.sm90.backward_config import Config, SplitConfig
from strobe.kernels.sm90.config import Config as Hopper
from strobe.kernels.sm90.tile_list import backward_list_call
from strobe.kernels.sm100 import forward as sm100_forward
from strobe.kernels.sm100.config import Config as Blackwell
from strobe.problem import Upstream
from strobe.sim import simulate
from strobe.sim.attention import backward_launches, forward_launch, fp8_launches, unfilled_gradients, unwritten

AMPERE = Ampere(64, 64, 64, 32, 4, 2)
AMPERE_BACKWARD = AmpereBackward(64, 64, 64, 64, 4)
HOPPER = Hopper(64, 64, 2, 64, 2)
BLACKWELL = Blackwell(64, 64)
ONE_PASS = Config(64, 64, 128, turns=True, folded=True)
TWO_PASSES = SplitConfig(96, 96)
STORED = SplitConfig(64, 64, stored=True)
OVERLAPPING = (
    *("notes", "counters", "out", "lse", "dk", "dv", "o_desc", "o_wide", "v_t", "statistics", "delta", "accumulator", "dq"),
    *("dk_wide", "dv_wide", "dq_wide", "dk_narrow", "dv_narrow", "dq_narrow"),
)
"""What sequences that overlap write more than once, in any order."""


def lying(lies=LIES) -> list:
    return [pytest.param(lie, id=str(lie), marks=[] if lie in SAMPLE else pytest.mark.exhaustive) for lie in lies]


def upstream(t) -> torch.Tensor:
    return torch.randn(t.q.shape, generator=torch.Generator().manual_seed(1)).to(t.q.dtype)


def forward(lie: Lie, kernels, arch: int, config, mask=None):
    t, problem, operands = inputs(lie, (64, 64), (2, 1), mask=mask)
    launch, out, lse, _notes = forward_launch(kernels, arch, problem, operands, config, ctas=2)
    if arch == 100:  # as before a call
        out.zero_()
        lse.fill_(-torch.inf)
    replace(launch, rewritable=OVERLAPPING).simulate("random", 1)
    check_forward(expected(lie, t, upstream(t)), out, lse)


@pytest.mark.parametrize("lie", lying())
def test_ampere_forward(lie: Lie):
    forward(lie, sm80_forward, 80, AMPERE, strobe.Causal())


@pytest.mark.parametrize("lie", lying())
def test_hopper_forward(lie: Lie):
    forward(lie, sm90_forward, 90, HOPPER, strobe.Causal())


@needs_tcgen05
@pytest.mark.parametrize("lie", lying([lie for lie in LIES if lie.packed and lie.used_q is None and lie.used_kv is None]))
def test_blackwell_forward(lie: Lie):
    forward(lie, sm100_forward, 100, BLACKWELL, strobe.Causal())


@pytest.mark.parametrize("lie", lying([lie for lie in LIES if lie.packed and lie.used_q is None and lie.used_kv is None]))
def test_fp8_forward(lie: Lie):
    t, problem, operands = inputs(lie, (64, 64), (2, 1), mask=strobe.Causal())
    e4m3 = {name: getattr(operands, name).to(torch.float8_e4m3fn) for name in "qkv"}
    t = replace(t, **{name: x.half() for name, x in e4m3.items()})
    problem, operands = replace(problem, dtype=torch.float8_e4m3fn), operands._replace(**e4m3)
    transposing, launch, out, lse = fp8_launches(fp8, problem, operands, ctas=2)
    out.zero_()  # as before a call
    lse.fill_(-torch.inf)
    report = replace(transposing, rewritable=OVERLAPPING).simulate("random", 1)
    replace(launch, rewritable=OVERLAPPING).simulate("random", 1, after=report)
    want = expected(lie, t, upstream(t))
    if want.apart:  # else sequences share blocks of the values
        check_forward(want, out, lse, tolerance=0.1)


@pytest.mark.parametrize("config", [ONE_PASS, TWO_PASSES, STORED], ids=["one pass", "two passes", "stored"])
@pytest.mark.parametrize("lie", lying())
def test_hopper_backward(lie: Lie, config):
    t, problem, operands = inputs(lie, (64, 64), (2, 1), mask=strobe.Causal())
    problem, dout = backward_of(problem), upstream(t)
    want = expected(lie, t, dout)
    out = want.out.reshape(t.q.shape).to(t.q.dtype)
    lse = want.lse.float() if lie.packed else want.lse.float().reshape(2, 3, -1).transpose(0, 1).contiguous()
    made = unwritten(backward_launch.buffers(problem, config)) | unfilled_gradients(problem)
    given = Upstream(out, lse, dout)
    tensors = Tensors(**operands._asdict(), **given._asdict(), **made)
    report = None
    if backward_launch.is_listed(problem, config):
        listing = backward_list_call(problem, tensors)
        report = simulate(listing.kernel, (listing.grid[0], 2), rewritable=OVERLAPPING, **listing.keywords)
    else:
        for x in (tensors.dq, tensors.dk, tensors.dv):
            x.zero_()  # as before a call
    prepare = backward_launch.prepare_call(problem, tensors, config)
    report = simulate(prepare.kernel, prepare.grid, rewritable=OVERLAPPING, after=report, **prepare.keywords)
    kernels = backward if isinstance(config, Config) else backward_split
    for launch in backward_launches(kernels, problem, tensors, config, ctas=2):
        report = replace(launch, rewritable=OVERLAPPING).simulate("random", 1, after=report)
    if config is ONE_PASS:
        convert = backward_launch.convert_call(problem, tensors, config)
        simulate(convert.kernel, convert.grid, rewritable=OVERLAPPING, after=report, **convert.keywords)
    check_backward(want, tensors.dq, tensors.dk, tensors.dv)


@pytest.mark.parametrize("lie", lying())
def test_ampere_backward(lie: Lie):
    t, problem, operands = inputs(lie, (64, 64), (2, 1), mask=strobe.Causal())
    problem, dout = backward_of(problem), upstream(t)
    want = expected(lie, t, dout)
    out = want.out.reshape(t.q.shape).to(t.q.dtype)
    lse = want.lse.float() if lie.packed else want.lse.float().reshape(2, 3, -1).transpose(0, 1).contiguous()
    made = unwritten(ampere_launch.buffers(problem, AMPERE_BACKWARD)) | unfilled_gradients(problem)
    tensors = Tensors(**operands._asdict(), **Upstream(out, lse, dout, None)._asdict(), **made)
    for x in (tensors.dq, tensors.dk, tensors.dv):
        x.zero_()  # as before a call
    prepare = ampere_launch.prepare_call(problem, tensors, AMPERE_BACKWARD)
    main = ampere_launch.main_call(problem, tensors, KNOWN["A100"], AMPERE_BACKWARD)
    convert = ampere_launch.convert_call(problem, tensors, AMPERE_BACKWARD)
    for call in (prepare, main, convert):
        options = {"order": "random", "seed": 1} if call is main else {}
        simulate(call.kernel, call.grid, *call.arguments, arch=80, rewritable=OVERLAPPING, **options, **call.keywords)
    check_backward(want, tensors.dq, tensors.dk, tensors.dv)
