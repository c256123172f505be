"""Two launches after one another, of which the second may begin before the first has ended (programmatic dependent launch)."""

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import strobe.sim.attention  # noqa: F401 (gives `take_turn` its model)
from strobe.kernels.common.dependent_launch import take_last_turn, take_program_turn, take_turn
from strobe.kernels.gluon import TensorDescriptor, mbarrier, tma_load
from strobe.sim import Race, Unfinished, simulate

LINEAR = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1))


@triton.jit
def first(x, y):
    """Writes x, and reads y."""
    tl.store(x + tl.arange(0, 128), tl.load(y + tl.arange(0, 128)))


@gluon.jit
def touch(x, y, box, WHAT: gl.constexpr):
    at = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    if WHAT == "loads":
        gl.load(x + at)
    if WHAT == "overwrites what is written":
        gl.store(x + at, 0.0)
    if WHAT == "overwrites what is read":
        gl.store(y + at, 0.0)
    if WHAT == "adds":
        gl.atomic_add(x + at, 1.0)
    if WHAT == "copies":
        memory = gl.allocate_shared_memory(gl.float32, [128], LINEAR)
        full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(full, count=1)
        mbarrier.expect(full, 512)
        tma_load(box, [0], full, memory)
        mbarrier.wait(full, 0)
    if WHAT == "reads what is read":
        gl.load(y + at)


@gluon.jit
def second(x, y, box, WHAT: gl.constexpr, EARLY: gl.constexpr, TURN: gl.constexpr):
    """Touches memory before its turn, or after."""
    if EARLY:
        touch(x, y, box, WHAT)
    if TURN:
        take_turn()
    if not EARLY:
        touch(x, y, box, WHAT)


@triton.jit
def second_program(x, EARLY: tl.constexpr, LAST: tl.constexpr):
    if EARLY:
        tl.load(x + tl.arange(0, 128))
    if LAST:
        take_last_turn()
    else:
        take_program_turn()
    tl.load(x + tl.arange(0, 128))


def run(what: str, early: bool, turn: bool, dependent: bool) -> None:
    x, y = torch.zeros(128), torch.zeros(128)
    ahead = simulate(first, (1,), x, y)
    box = TensorDescriptor.from_tensor(x, [128], LINEAR.value)
    simulate(second, (1,), x, y, box, what, early, turn, launch_pdl=dependent, after=ahead)


@pytest.mark.parametrize("what, was", [
    ("loads", "write"), ("overwrites what is written", "write"), ("overwrites what is read", "read"), ("adds", "write"),
    ("copies", "write"),
])  # fmt: skip
def test_memory_of_the_launch_ahead_is_touched_after_the_turn_alone(what, was):
    run(what, early=False, turn=True, dependent=True)
    run(what, early=True, turn=False, dependent=False)
    with pytest.raises(Race, match=f"nothing orders it after the {was} by the launch ahead, for which it has not waited"):
        run(what, early=True, turn=True, dependent=True)


def test_what_nobody_writes_is_read_at_any_time():
    run("reads what is read", early=True, turn=True, dependent=True)


def test_every_cta_takes_its_turn():
    """A launch waits for the one ahead alone, and relies on it for those before."""
    with pytest.raises(Unfinished, match="has not waited for the launch ahead"):
        run("reads what is read", early=True, turn=False, dependent=True)


@pytest.mark.parametrize("last", [False, True])
def test_a_program_in_plain_triton_takes_its_turn(last):
    x = torch.zeros(128)
    ahead = simulate(first, (1,), x, torch.zeros(128))
    simulate(second_program, (1,), x, False, last, launch_pdl=True, after=ahead)
    with pytest.raises(Race, match="the launch ahead"):
        simulate(second_program, (1,), x, True, last, launch_pdl=True, after=ahead)
