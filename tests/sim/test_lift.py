"""Kernels run on the CPU as they are written: functions, closures, aggregates, constexprs, modules."""

import importlib
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import registers_machine
import torch
import triton
import triton.language as tl
from registers_machine import machine  # noqa: F401
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from strobe import masks
from strobe.kernels.common import gluon_masks
from strobe.kernels.gluon import aggregate
from strobe.kernels.sm90 import forward, layouts, scores
from strobe.sim import IllegalOperation, Unsupported, register
from strobe.sim.lift import lift
from strobe.sim.tensor import Scalar, Tensor

SCALE = gl.constexpr(3)
ONE = gl.constexpr(1)
TABLE = gl.constexpr((1, 2, 3))
OLDEST = Path(__file__).parents[2] / ".venv/triton-3.6"


def i32(value):
    return Scalar(value, gl.int32)


def tensor(values, dtype=torch.float32):
    return Tensor(torch.as_tensor(values, dtype=dtype))


# ---- kernels


@gluon.jit
def twice(x):
    return x * 2


@gluon.jit
def scaled(x, OFFSET: gl.constexpr = ONE):
    return twice(x) * SCALE + OFFSET + TABLE[2]


@gluon.jit
def factorial(n):
    result = n
    if n > 1:
        result = n * factorial(n - 1)
    return result


@gluon.constexpr_function
def log2_of(n):
    assert type(n) is int
    return int(math.log2(n))


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def smaller(a, b):
    return gl.minimum(a, b)


@gluon.constexpr_function
def combiner(largest):
    return larger if largest else smaller


@gluon.jit
def chosen_extreme(x, LARGEST: gl.constexpr):
    combine: gl.constexpr = combiner(LARGEST)
    return gl.reduce(x, 0, combine)


@gluon.jit
def powers(x, N: gl.constexpr):
    steps: gl.constexpr = log2_of(N)
    for _ in gl.static_range(steps):
        x = x * 2
    return x


@gluon.jit
def loops(n):
    total = n * 0
    for i in range(n, -n, -1):
        total += i // 2
    while total > 10:
        total -= 10
    return max(min(total, 50), n), abs(-total)


@gluon.jit
def bounded(x, low):
    return max(min(x, 2), low)


def outer(factor):
    @gluon.jit
    def inner(x):
        return x * factor + helper(x)

    @gluon.jit
    def helper(x):
        return x + SCALE

    return inner


@aggregate
class Pair:
    first: gl.tensor
    second: (gl.tensor, gl.constexpr)
    SIZE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, first, second, SIZE):
        self.first = first
        self.second = gl.constexpr(None) if second is None else second
        self.SIZE = gl.constexpr(SIZE)

    @gluon.constexpr_function
    def doubled_size(self):
        return self.SIZE * 2

    @gluon.jit
    def total(self, x):
        result = self.first + x
        if self.second is not None:
            result += self.second
        return result * self.doubled_size()

    @gluon.jit
    def __add__(self, other):
        return Pair(self.first + other.first, self.second, self.SIZE)


@gluon.jit
def pairs(x, y, SIZE: gl.constexpr):
    a = Pair(x, None, SIZE)
    b = Pair(x, y, SIZE)
    return a.total(1), b.total(1), (a + b).first, isinstance(a, Pair), isinstance(a.first, gl.tensor), a.second is None


@gluon.jit
def all_of_standard(x):
    return gl.sum(x, 0), tl.sort(x), x.softmax(0), tl.cumsum(x, 0), gl.zeros_like(x), gl.cdiv(7, 2), tl.flip(x)


@gluon.jit
def types(x):
    y = x.to(gl.float32)
    gl.static_assert(y.dtype == gl.float32 and x.dtype.is_int() and y.type.element_ty.is_floating())
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    zero = gl.full([x.shape[0] * 2], 0, x.dtype, layout)
    return y, zero, float("-inf"), gl.num_warps(), gl.program_id(1), gl.num_programs(axis=0), tl.constexpr(4)


@gluon.jit
def with_assembly(x):
    return gl.inline_asm_elementwise("mov.b32 $0, %laneid;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def uses_assembly(x):
    return with_assembly(x) + 1


@gluon.jit
def without_model(x, CALL: gl.constexpr):
    if CALL:
        x = gl.bank_conflicts(x, x)
    return x


@gluon.jit
def conditions(x, y):
    a = 1 if x > y else 2
    b = (x > 0) & (y > 0) | (x == y)
    c = x > 0 and y > 0
    d = not (x > y)
    return a, b, c, d


# ---- tests


def test_functions_call_functions():
    assert lift(scaled)(i32(5)).value == 34
    assert lift(scaled)(tensor([5.0]), OFFSET=0).data.tolist() == [33.0]
    assert lift(factorial)(i32(6)).value == 720


def test_constexpr_functions_run_as_they_are_on_plain_values():
    assert lift(powers)(tensor([1.0]), gl.constexpr(8)).data.tolist() == [8.0]
    assert lift(log2_of)(gl.constexpr(32)) == 5
    assert lift(chosen_extreme)(tensor([1.0, 5.0, 3.0, 2.0]), True).value == 5.0
    assert lift(chosen_extreme)(tensor([1.0, 5.0, 3.0, 2.0]), False).value == 1.0


def test_loops_and_builtins_of_python():
    bounded_total, total = lift(loops)(i32(30))
    assert bounded_total.value == 30 and total.value == 5  # all but 30 // 2 cancel, as -3 // 2 is -1
    assert lift(bounded)(tensor([0.0, 1.0, 3.0]), i32(1)).data.tolist() == [1.0, 1.0, 2.0]


def test_closures():
    first, second = lift(outer(4)), lift(outer(10))
    assert first(i32(1)).value == 8 and second(i32(1)).value == 14


def test_aggregates():
    a, b, both, *facts = lift(pairs)(i32(10), i32(5), 8)
    assert (a.value, b.value, both.value) == (176, 256, 20)
    assert facts == [True, True, True]


def test_aggregates_without_an_initialiser():
    @aggregate
    class Point:
        x: gl.tensor
        y: gl.tensor

    @gluon.jit
    def swap(x, y):
        p = Point(x, y=y)
        return Point(p.y, p.x)

    point = lift(swap)(i32(1), i32(2))
    assert (point.x.value, point.y.value) == (2, 1)
    with pytest.raises(IllegalOperation, match="Point has the fields x, y, got x"):
        lift(Point)(i32(1))


def test_functions_of_tritons_library():
    x = torch.tensor([3.0, 1.0, 2.0, 0.0])
    total, ordered, soft, sums, zeros, quotient, flipped = lift(all_of_standard)(tensor(x))
    assert total.value == 6.0 and ordered.data.tolist() == [0, 1, 2, 3] and quotient == 4
    torch.testing.assert_close(soft.data, x.softmax(0))
    assert torch.equal(sums.data, x.cumsum(0)) and not zeros.data.any() and torch.equal(flipped.data, x.flip(0))


def test_what_tritons_interpreter_leaves_behind(monkeypatch):
    """It puts its functions in the places of the language's for a kernel's time, and not all of them back."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    core = importlib.import_module("triton.language.core")
    reshape = (core.reshape.__kwdefaults__ or {}).get("member", core.reshape)  # where it has run here, it has left one already

    def in_its_place(*args, member=reshape, **kwargs):
        raise AssertionError("the interpreter's own")

    def other(*args, **kwargs):
        raise AssertionError("the interpreter's own")

    in_its_place.__kwdefaults__ = {"member": reshape}
    for function in (in_its_place, other):
        function.__module__ = interpreter.__name__
    monkeypatch.setattr(core, "reshape", in_its_place)
    monkeypatch.setattr(core, "reduce", other)
    test_functions_of_tritons_library()


def test_types_and_the_launch():
    y, zero, low, warps, program, programs, four = lift(types)(tensor([1, 2], torch.int32))
    assert y.data.dtype == torch.float32 and zero.shape == (4,) and zero.data.dtype == torch.int32
    assert low == -math.inf and warps == 4 and program.value == 6 and programs.value == 100 and four == 4


def test_conditions_of_scalars():
    a, b, c, d = lift(conditions)(i32(3), i32(2))
    assert a == 1 and b and c and not d


def test_assembly_is_refused_and_can_be_registered():
    with pytest.raises(Unsupported, match=r"test_lift.py:\d+ in with_assembly: .*strobe.sim.register"):
        lift(uses_assembly)(tensor([0], torch.int32))
    replaced = lift(uses_assembly, overrides={with_assembly: lambda x: x * 0 + 7})
    assert replaced(tensor([0], torch.int32)).data.tolist() == [8]
    with pytest.raises(Unsupported):
        lift(uses_assembly)(tensor([0], torch.int32))


def test_registered_implementations_last():
    @gluon.jit
    def lane(x):
        return gl.inline_asm_elementwise("", "", [x], dtype=gl.int32, is_pure=True, pack=1)

    @gluon.jit
    def kernel(x):
        return lane(x)

    register(lane, lambda x: x + 100)
    assert lift(kernel)(i32(1)).value == 101
    with pytest.raises(TypeError, match="jitted function"):
        register(len, lambda x: x)
    with pytest.raises(TypeError, match="callable"):
        register(lane, 3)


def test_what_has_no_model_is_refused_when_it_is_called():
    kernel = lift(without_model)
    assert kernel(3, False) == 3
    with pytest.raises(Unsupported, match=r"no model of .*bank_conflicts"):
        kernel(3, True)


def test_launches_share_nothing(monkeypatch):
    before = lift(scaled)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", gl.constexpr(100))
    assert lift(scaled)(i32(5)).value == 1004 and before(i32(5)).value == 34
    assert scaled.fn.__globals__["twice"] is twice


def test_host_values_pass():
    @dataclass(frozen=True)
    class Config:
        size: int

    config = Config(3)
    assert lift(config) is config and lift(math) is math and lift(math.sqrt) is math.sqrt and lift(torch.exp2) is torch.exp2
    assert (
        lift(gl.constexpr(config)) is config and lift(gl.float32) is gl.float32 and lift(gl.BlockedLayout) is gl.BlockedLayout
    )


# ---- the real kernels' functions


@pytest.mark.parametrize("name", ["kv_range", "kv_full"])
@pytest.mark.parametrize("band", [(None, None, None), (None, 0, None), (3, 2, None), (None, 0, 7)])
def test_mask_arithmetic_is_the_hosts(name, band):
    device, host = lift(getattr(gluon_masks, name)), getattr(masks, name)
    bounds = [None if bound is None else i32(bound) for bound in band]
    for first in range(0, 12, 5):
        simulated = device(i32(first), i32(first + 3), i32(20), *bounds)
        assert tuple(map(int, simulated)) == host(first, first + 3, 20, *band)


def test_softmax_of_the_hopper_kernel():
    s = Tensor(3 * torch.randn(64, 128), layouts.accumulator(128))
    m = lift(forward.row_max)(s)
    assert torch.equal(m.data, s.data.amax(1)) and m.layout == layouts.rows_of(128)
    p = lift(forward.weights)(s, m, Scalar(0.5, gl.float32))
    expected = torch.exp2(0.5 * s.data - s.data.amax(1, keepdim=True))
    torch.testing.assert_close(p.data, expected)
    sums = lift(forward.lane_sums)(p)
    assert sums.shape == (64, 4)
    torch.testing.assert_close(sums.data[:, 0], expected.reshape(64, 16, 4, 2)[:, :, 0].sum((1, 2)))


def test_mask_of_the_hopper_kernel():
    lengths = SimpleNamespace(n_q=i32(250), n_kv=i32(250), left=None, right=i32(0), prefix=None, VARY=False)
    s = torch.randn(64, 64)
    arguments = Tensor(s, layouts.accumulator(64)), i32(2), SimpleNamespace(p=i32(192)), lengths
    result = lift(scores.apply_mask)(*arguments, SimpleNamespace(tile_kv=64))
    rows, keys = 192 + torch.arange(64)[:, None], 2 * 64 + torch.arange(64)[None, :]
    assert torch.equal(result.data, torch.where((keys <= rows) & (keys < 250), s, -math.inf))


def test_the_oldest_triton():
    if not OLDEST.is_dir() or triton.__version__.startswith("3.6"):
        pytest.skip("Triton 3.6 is not beside this one")
    environment = {**os.environ, "PYTHONPATH": str(OLDEST), "TRITON_INTERPRET": "0"}
    files = [str(Path(__file__)), str(Path(registers_machine.__file__).parent / "test_tensor.py")]
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", *files], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@gluon.jit
def what_it_holds(x):
    memory = gl.allocate_shared_memory(gl.float32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kind = 1 if isinstance(memory, gl.shared_memory_descriptor) else 2
    gl.store(x, kind)


def test_a_kernel_asks_for_the_class_of_a_buffer():
    from strobe.sim import simulate

    x = torch.zeros(1, dtype=torch.int32)
    simulate(what_it_holds, (1,), x)
    assert x.item() == 1
