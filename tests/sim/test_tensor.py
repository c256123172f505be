"""Scalars, tensors and pointers of the simulator compute what Gluon's do."""

import math
import operator
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from registers_machine import Memory, machine  # noqa: F401
from triton.experimental.gluon import language as gl

from strobe.sim import global_memory, program, reductions, registers
from strobe.sim.dtypes import Inferred, gluon_dtype, torch_dtype
from strobe.sim.errors import IllegalOperation, SimulationError, Unfinished, Unsupported
from strobe.sim.tensor import Pointer, Scalar, Tensor, argument

int32 = st.integers(-(2**31), 2**31 - 1)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
quick = settings(max_examples=60, deadline=None)
MATRIX = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])


def i32(value):
    return Scalar(value, gl.int32)


def f32(value):
    return Scalar(value, gl.float32)


def tensor(values, dtype=torch.float32, layout=None):
    return Tensor(torch.as_tensor(values, dtype=dtype), layout)


# ---- scalars


@quick
@given(int32, int32.filter(lambda n: n != 0))
def test_scalar_division_truncates_toward_zero(a, b):
    quotient = math.trunc(Fraction(a, b))
    if -(2**31) <= quotient < 2**31:
        assert (i32(a) // b).value == (i32(a) // i32(b)).value == (a // i32(b)).value == quotient
    assert (i32(a) % b).value == (i32(a) % i32(b)).value == a - b * quotient


@quick
@given(int32, int32, st.sampled_from([operator.add, operator.sub, operator.mul]))
def test_scalar_arithmetic_is_exact_or_overflows(a, b, operation):
    exact = operation(a, b)
    for x, y in ((i32(a), i32(b)), (i32(a), b), (a, i32(b))):
        if -(2**31) <= exact < 2**31:
            result = operation(x, y)
            assert result.value == exact and result.dtype == gl.int32
        else:
            with pytest.raises(IllegalOperation, match=rf"int32 overflow: .* = {exact}"):
                operation(x, y)
    wide = operation(Scalar(a, gl.int64), i32(b))
    assert wide.value == exact and wide.dtype == gl.int64


@quick
@given(float32, float32, st.sampled_from(["add", "subtract", "multiply", "divide"]))
def test_scalar_floats_are_rounded_to_float32(a, b, name):
    x, y = f32(a), f32(b)
    result = {"add": x + y, "subtract": x - y, "multiply": x * y, "divide": x / y}[name]
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(np.float32(a), np.float32(b))
    assert np.float32(result.value) == expected or (math.isnan(result.value) and np.isnan(expected))


@quick
@given(int32, int32)
def test_scalar_comparisons_and_bits(a, b):
    x = i32(a)
    assert bool(x < b) == (a < b) and bool(x >= i32(b)) == (a >= b) and bool(a == x) and bool(x != b) == (a != b)
    assert (x & b).value == a & b and (x | i32(b)).value == a | b and (b ^ x).value == a ^ b and (~x).value == ~a
    assert (x < b).dtype == gl.int1 and (~(x < b)).value == (a >= b)


def test_a_scalar_is_an_index_a_condition_and_a_bound():
    assert [10, 20, 30][i32(1)] == 20
    assert not i32(0) and i32(3)
    steps = list(program.steps(i32(5), i32(0), -2))
    assert [i.value for i in steps] == [5, 3, 1] and steps[0].dtype == gl.int32
    assert next(program.steps(Scalar(2, gl.int64))).dtype == gl.int64


def test_shifts_of_scalars_are_bit_operations():
    assert (i32(1) << 31).value == -(2**31) and (i32(3) << 40).value == 0
    assert (i32(-8) >> 1).value == -4 and (Scalar(2**32 - 8, gl.uint32) >> 1).value == 2**31 - 4
    with pytest.raises(IllegalOperation, match="1 << -1"):
        i32(1) << i32(-1)


def test_unsigned_scalars_wrap_around():
    assert (Scalar(3, gl.uint32) - 5).value == 2**32 - 2
    assert (Scalar(2**32 - 1, gl.uint32) * Scalar(2, gl.uint32)).value == 2**32 - 2


def test_scalar_mistakes_are_named():
    with pytest.raises(IllegalOperation, match=r"test_tensor.py:\d+ in test_scalar_mistakes_are_named: 7 // 0"):
        i32(7) // 0
    with pytest.raises(IllegalOperation, match="4294967296 is no int32"):
        i32(7) + 2**32
    with pytest.raises(IllegalOperation, match="& of fp32"):
        f32(1.0) & f32(2.0)


def test_arguments_of_a_launch():
    assert argument(3).dtype == gl.int32 and argument(2**31).dtype == gl.int64 and argument(True).dtype == gl.int1
    assert argument(0.1).value == float(np.float32(0.1))
    with pytest.raises(ValueError, match="64 bits"):
        argument(2**64)


# ---- promotion and rounding

KINDS = [torch.int8, torch.int32, torch.int64, torch.uint8, torch.uint32, torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("a", "b", "result"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float16, torch.float16),
        (torch.int32, torch.int64, torch.int64),
        (torch.int32, torch.uint32, torch.uint32),
        (torch.int32, torch.bfloat16, torch.float32),
        (torch.int8, torch.int32, torch.int32),
        (torch.bool, torch.int32, torch.int32),
    ],
)
def test_types_of_two_tensors(a, b, result):
    assert (tensor([1], a) + tensor([1], b)).data.dtype == result
    assert (tensor([1], b) + Scalar(1, a)).data.dtype == result


def test_a_literal_takes_the_type_of_the_tensor():
    assert (tensor([1.0], torch.bfloat16) * 2.0).data.dtype == torch.bfloat16
    assert (tensor([1], torch.int32) + 2.5).data.dtype == torch.float32
    assert (tensor([1.0], torch.float16) + 2).data.dtype == torch.float16
    assert (tensor([3], torch.int32) / 2).data.tolist() == [1.5]
    x = torch.randn(100).to(torch.bfloat16)
    assert torch.equal((tensor(x, torch.bfloat16) * 0.1).data, x * torch.tensor(0.1, dtype=torch.bfloat16))


@quick
@given(st.lists(int32, min_size=4, max_size=4), st.lists(int32, min_size=4, max_size=4))
def test_integer_tensors_wrap_and_truncate(a, b):
    x, y = tensor(a, torch.int32), tensor(b, torch.int32)
    with np.errstate(all="ignore"):
        m, n = np.array(a, np.int32), np.array(b, np.int32)
        assert (x + y).data.tolist() == (m + n).tolist() and (x * y).data.tolist() == (m * n).tolist()
        assert (x - 7).data.tolist() == (m - 7).tolist() and (-x).data.tolist() == (-m).tolist()
    wide = [(p, q) for p, q in zip(a, b, strict=True) if q and not (p == -(2**31) and q == -1)]
    if len(wide) == 4:
        assert (x // y).data.tolist() == [math.trunc(Fraction(p, q)) for p, q in wide]
        assert (x % y).data.tolist() == [p - q * math.trunc(Fraction(p, q)) for p, q in wide]


@quick
@given(st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3), st.integers(1, 2**32 - 1), st.integers(0, 31))
def test_unsigned_tensors(a, b, shift):
    x, m = tensor(a, torch.uint32), np.array(a, np.uint32)
    for result, expected in (
        (x + b, m + np.uint32(b)), (x * b, m * np.uint32(b)), (x // b, m // b), (x % b, m % b), (x ^ b, m ^ np.uint32(b)),
        (x << shift, m << np.uint32(shift)), (x >> shift, m >> np.uint32(shift)), (x > b, m > b), (~x, ~m),
    ):  # fmt: skip
        assert result.data.tolist() == expected.tolist()
    assert reductions.sum_(x, 0).value == sum(a) % 2**32
    assert registers.umulhi(x, Scalar(b, gl.uint32)).data.tolist() == [v * b >> 32 for v in a]


def test_shift_amounts_beyond_the_width_shift_all_bits_out():
    amounts = tensor([0, 1, 31, 32, 50], torch.int32)
    assert (1 << amounts).data.tolist() == [1, 2, -(2**31), 0, 0]
    assert (tensor([-5] * 5, torch.int32) >> amounts).data.tolist() == [-5, -3, -1, -1, -1]


def test_division_by_zero_in_a_lane_is_no_error():
    assert (tensor([7, 8], torch.int32) // tensor([2, 0], torch.int32)).data.tolist()[0] == 3


def test_a_number_divided_by_a_tensor_is_rounded_once():
    x = torch.rand(1000) + 0.1
    assert torch.equal((1.7 / tensor(x)).data, torch.div(torch.tensor(1.7), x))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_fma_rounds_once(kind):
    x, y, z = (torch.randn(2000).to(kind) for _ in range(3))
    expected = torch.addcmul(z.double(), x.double(), y.double()).to(kind)
    assert torch.equal(registers.fma(*(tensor(v, kind) for v in (x, y, z))).data, expected)
    assert torch.equal(registers.fma2(*(tensor(v, kind) for v in (x, y, z))).data, expected)
    if kind is torch.float32:
        assert not torch.equal((tensor(x) * tensor(y) + tensor(z)).data, expected)


def test_an_exponential_does_not_depend_on_the_numbers_beside_it():
    """PyTorch's own last bit does: of whole vectors of numbers and of those left over."""
    x = -20.0 * torch.rand(4099, generator=torch.Generator().manual_seed(0))
    parts = [registers.exp2(tensor(part.tolist())).data for part in x.split(3)]
    assert torch.equal(registers.exp2(tensor(x.tolist())).data, torch.cat(parts))


def test_conversions():
    x = tensor([1.0 + 2.0**-8 + 2.0**-9, -1.0 - 2.0**-8 - 2.0**-9])
    assert x.to(gl.bfloat16).data.tolist() == [1.0078125, -1.0078125]
    assert x.to(gl.bfloat16, fp_downcast_rounding="rtz").data.tolist() == [1.0, -1.0]
    assert tensor([2.7, -2.7, 1e20, -1e20, math.nan]).to(gl.int32).data.tolist() == [2, -2, 2**31 - 1, -(2**31), 0]
    assert tensor([1e9, -1e9]).to(gl.float8e4nv).data.float().tolist() == [448.0, -448.0]
    assert tensor([1.0]).to(gl.int32, bitcast=True).data.tolist() == [0x3F800000]
    assert tensor([300], torch.int32).to(gl.int8).data.tolist() == [44]
    with pytest.raises(IllegalOperation, match="bitcast of fp32 to int64"):
        tensor([1.0]).to(gl.int64, bitcast=True)


def test_pairs_of_fp4_in_a_byte():
    values = registers.fp4_to_fp(tensor([[0x20, 0xF9]], torch.uint8), gl.bfloat16, 1).data
    assert values.dtype == torch.bfloat16 and values.tolist() == [[0.0, 1.0, -0.5, -6.0]]


def test_every_type_has_a_name_on_both_sides():
    for kind in KINDS:
        assert torch_dtype(gluon_dtype(kind)) is kind
    with pytest.raises(Unsupported, match="fp8e4b15"):
        torch_dtype(gl.float8e4b15)


# ---- tensors


def test_tensors_broadcast_ones_and_add_no_dimension():
    row, column = tensor([1.0, 2.0])[:, None], tensor([10.0, 20.0, 30.0])[None, :]
    assert (row + column).data.tolist() == [[11, 21, 31], [12, 22, 32]]
    for other in (tensor([1.0, 2.0]), tensor([[1.0, 2.0]])):
        with pytest.raises(IllegalOperation, match="do not broadcast"):
            (row + column) + other


def test_a_tensor_is_no_condition():
    x = tensor([1.0, 2.0]) > 1.0
    with pytest.raises(IllegalOperation, match=r"use & \| ~"):
        bool(x and x)
    with pytest.raises(IllegalOperation, match="None and : alone"):
        x[0]
    assert (x & x | ~x).data.all() and not x.logical_and(~x).data.any() and x.logical_or(~x).data.all()


def test_layouts_follow_the_data():
    rows = Tensor(torch.zeros(8), gl.SliceLayout(1, MATRIX))
    matrix = rows[:, None] + tensor(torch.zeros(8, 4), layout=gl.AutoLayout())
    assert matrix.layout == MATRIX and (matrix * 2.0).type.layout == MATRIX
    assert reductions.sum_(matrix, 1).type.layout == gl.SliceLayout(1, MATRIX)
    assert registers.reshape(matrix, [4, 8]).layout == Inferred(2)
    assert gl.SliceLayout(0, registers.reshape(matrix, [4, 8]).type.layout).rank == 1
    assert matrix.type.shape == [8, 4] and matrix.type.element_ty == gl.float32 and matrix.type.is_block()
    assert matrix.shape[:1] + [2] == (8, 2)  # noqa: RUF005


def test_work_that_nobody_waited_for():
    work = SimpleNamespace(finished=False, description="wgmma at k.py:3")
    x = Tensor(torch.zeros(2, 2), None, None, work)
    assert x.shape == (2, 2)
    for use in (lambda: x + 1.0, lambda: x[None], lambda: reductions.max_(x, 1), lambda: registers.convert_layout(x, MATRIX)):
        with pytest.raises(Unfinished, match=r"wgmma at k.py:3, which nobody has waited for"):
            use()
    work.finished = True
    with pytest.raises(Unfinished, match=r"wgmma at k.py:3, which is not among the deps of the wait for it"):
        x + 1.0
    assert (Tensor(x.data) + 1.0).data.sum() == 4


@quick
@given(st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.int8, torch.bool]), st.booleans())
def test_where_selects_bits(kind, scalar):
    x, y = (torch.randint(-9, 9, (8, 8)).to(kind) for _ in range(2))
    if kind is torch.float32:
        x[0], y[1] = math.nan, -0.0
    condition = torch.rand(8, 8) > 0.5
    other = y[0, 0].item() if scalar else None
    result = registers.where_(
        tensor(condition, torch.bool), tensor(x, kind), Scalar(other, kind) if scalar else tensor(y, kind)
    )
    expected = torch.where(condition, x, other if scalar else y)
    assert torch.equal(result.data.nan_to_num(77), expected.nan_to_num(77)) and result.data.dtype == kind


def test_where_broadcasts_and_promotes():
    result = registers.where_(tensor([True, False], torch.bool)[:, None], tensor([[1.0, 2.0]]), float("-inf"))
    assert result.data.tolist() == [[1.0, 2.0], [-math.inf, -math.inf]]
    assert registers.where_(i32(1) > 0, i32(2), 3.5).dtype == gl.float32
    assert registers.where_(tensor([1, 0], torch.int32) > 0, i32(2), Scalar(3, gl.int64)).data.tolist() == [2, 3]


def test_nan_in_minima_and_maxima():
    x, y = tensor([math.nan, 1.0, math.nan]), tensor([2.0, math.nan, math.nan])
    assert registers.maximum(x, y).data[:2].tolist() == [2.0, 1.0]
    assert registers.minimum(x, y).data[:2].tolist() == [2.0, 1.0]
    assert registers.minimum(x, y, propagate_nan="ALL").data.isnan().all()
    m = tensor([[math.nan, 3.0], [math.nan, math.nan], [1.0, -math.inf]])
    assert reductions.max_(m, 1).data[[0, 2]].tolist() == [3.0, 1.0] and reductions.max_(m, 1).data[1].isnan()
    assert reductions.min_(m, 1).data[[0, 2]].tolist() == [3.0, -math.inf]


# ---- reductions and shapes


def add(a, b):
    return a + b


def compose(a, b, c, d):
    """x -> a x + b, then x -> c x + d: associative, not commutative."""
    return a * c, b * c + d


def larger_by_branch(a, b):
    if a > b:
        return a
    else:
        return b


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_reductions(axis):
    x = torch.randint(-50, 50, (4, 8, 16)).float()
    t = tensor(x)
    assert torch.equal(reductions.sum_(t, axis).data, x.sum(axis))
    assert torch.equal(reductions.reduce(t, axis, add).data, x.sum(axis))
    assert torch.equal(reductions.reduce(t, axis, add, keep_dims=True).data, x.sum(axis, keepdim=True))
    assert torch.equal(reductions.reduce(t, axis, larger_by_branch).data, x.amax(axis))
    values, places = reductions.max_(t, axis, return_indices=True)
    assert torch.equal(values.data, x.amax(axis)) and places.data.dtype == torch.int32
    assert torch.equal(x.gather(axis, places.data.long().unsqueeze(axis)).squeeze(axis), x.amax(axis))
    assert torch.equal(reductions.cumsum(t, axis).data, x.cumsum(axis))
    assert torch.equal(reductions.cumsum(t, axis, reverse=True).data, x.flip(axis).cumsum(axis).flip(axis))


def test_a_reduction_to_one_element_is_a_scalar():
    x = tensor([[1.0, 5.0], [5.0, 2.0]])
    assert reductions.max_(x).value == 5.0 and isinstance(reductions.sum_(x), Scalar)
    assert reductions.argmax(tensor([1.0, 5.0, 5.0]), 0).value == 1
    assert reductions.max_(x, keep_dims=True).data.tolist() == [[5.0]]
    assert reductions.reduce(tensor([1.0, 2.0]), 0, add).value == 3.0
    assert reductions.sum_(tensor([100, 100], torch.int8), 0).value == 200


def test_combining_keeps_the_order():
    a, b = (torch.randint(-3, 4, (8,)).float() for _ in range(2))
    m, n = 1.0, 0.0
    expected = []
    for c, d in zip(a.tolist(), b.tolist(), strict=True):
        m, n = m * c, n * c + d
        expected.append(n)
    assert reductions.reduce((tensor(a), tensor(b)), 0, compose)[1].value == n
    assert reductions.associative_scan((tensor(a), tensor(b)), 0, compose)[1].data.tolist() == expected


def test_functions_mapped_over_elements():
    def selu(x, alpha):
        if x > 0:
            return x
        return alpha * (registers.exp(x) - 1.0)

    x = torch.tensor([[1.0, -1.0], [2.0, -2.0]])
    result = reductions.map_elementwise(selu, tensor(x), tensor([[0.5, 0.5]]))
    torch.testing.assert_close(result.data, torch.where(x > 0, x, 0.5 * (x.exp() - 1)))
    swapped = reductions.map_elementwise(lambda a, b: (b, a), tensor([1.0, 2.0, 3.0, 4.0]), pack=2)
    assert swapped.data.tolist() == [2.0, 1.0, 4.0, 3.0]


def test_shapes():
    x = tensor(torch.arange(8.0).reshape(2, 4))
    low, high = registers.split(registers.reshape(x, 2, 2, 2))
    assert low.data.tolist() == [[0, 2], [4, 6]]
    assert torch.equal(registers.reshape(registers.join(low, high), [2, 4]).data, x.data)
    assert torch.equal(x.T.data, x.data.T) and torch.equal(x.permute((1, 0)).data, x.data.T) and x.trans().shape == (4, 2)
    assert x.expand_dims(0).shape == (1, 2, 4) and x.broadcast_to(2, 4).shape == (2, 4)
    assert x.sum(1).data.tolist() == [6, 22] and x.flip(1).data[0].tolist() == [3, 2, 1, 0]
    with pytest.raises(IllegalOperation, match=r"\[2, 4\] cannot be reshaped to \[3, 3\]"):
        x.reshape(3, 3)
    with pytest.raises(AttributeError):
        x.no_such_method  # noqa: B018


def test_products_see_what_the_tensor_core_sees():
    a, b, c = torch.randn(16, 32), torch.randn(32, 8), torch.randn(16, 8)
    half = registers.mma_v2(tensor(a, torch.bfloat16), tensor(b, torch.bfloat16), tensor(c))
    torch.testing.assert_close(half.data, c + a.bfloat16().float() @ b.bfloat16().float())
    exact = registers.dot_fma(tensor(a), tensor(b), tensor(c)).data
    torch.testing.assert_close(exact, c + a @ b)
    assert 1e-5 < (registers.mma_v2(tensor(a), tensor(b), tensor(c)).data - exact).abs().max() < 0.1
    with pytest.raises(IllegalOperation, match="multiplies"):
        registers.mma_v2(tensor(a), tensor(a), tensor(c))


def test_work_goes_to_the_right_pipe(machine):  # noqa: F811
    x, i = tensor(torch.ones(8, 8)), tensor(torch.ones(8, 8), torch.int32)
    for make, pipe, elements in (
        (lambda: x * 2.0, "fma", 64), (lambda: i * 2, "alu", 64), (lambda: x > 1.0, "alu", 64), (lambda: x[None], "free", 64),
        (lambda: registers.exp2(x), "mufu", 64), (lambda: 1.0 / x, "mufu", 64), (lambda: registers.fma2(x, x, x), "fma2", 64),
        (lambda: registers.add2(x, 1.0), "fma2", 64), (lambda: registers.max2(x, x), "alu", 64),
        (lambda: reductions.sum_(x, 1), "reduce fma", 64), (lambda: reductions.max_(x, 0), "reduce alu", 64),
        (lambda: registers.mma_v2(x, x, x), "mma", 512), (lambda: x.to(gl.bfloat16), "convert", 64),
        (lambda: registers.convert_layout(x, MATRIX), "shuffle", 64), (lambda: registers.convert_layout(x, None), "free", 64),
    ):  # fmt: skip
        machine.issued.clear()
        make()
        assert machine.issued == [(pipe, elements)], pipe


def test_what_a_change_of_layout_costs(machine):  # noqa: F811
    def accumulator(columns):
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])

    operand = gl.DotOperandLayout(operand_index=0, parent=accumulator(64), k_width=2)
    blocked = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    p, rows = Tensor(torch.ones(64, 128), accumulator(128)), Tensor(torch.ones(64), gl.SliceLayout(1, accumulator(128)))
    machine.issued.clear()
    for x, layout in ((p, operand), (p, blocked), (rows, gl.SliceLayout(1, accumulator(64))), (rows, Inferred(1))):
        assert registers.convert_layout(x, layout).layout == layout
    assert machine.issued == [("free", 64 * 128), ("shuffle", 64 * 128), ("free", 64), ("shuffle", 64)]


# ---- pointers


def test_loads_and_stores():
    array = Memory(torch.arange(64, dtype=torch.float32))
    pointers = Pointer(array, 8) + tensor([0, 1], torch.int32)[:, None] * 8 + tensor([0, 1, 2], torch.int64)[None, :]
    assert pointers.shape == (2, 3) and pointers.dtype.element_ty == gl.float32
    assert global_memory.load(pointers).data.tolist() == [[8, 9, 10], [16, 17, 18]]
    mask = tensor([True, False], torch.bool)[:, None]
    assert global_memory.load(pointers, mask=mask, other=-1.0).data[1].tolist() == [-1, -1, -1]
    assert global_memory.load(pointers, mask=mask).data[1].isnan().all()
    global_memory.store(pointers, 2, mask=mask)
    assert array.flat[8:20].tolist() == [2, 2, 2, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    assert global_memory.load(Pointer(array) + i32(5)).value == 5.0
    with pytest.raises(Unsupported, match="keeps pointers apart"):
        pointers.to(gl.int64)
    with pytest.raises(IllegalOperation, match="no pointer"):
        global_memory.load(tensor([1.0]))


def test_masked_integers_are_poison():
    array = Memory(torch.zeros(4, dtype=torch.int32))
    lane = global_memory.load(Pointer(array) + tensor([0, 1], torch.int32), mask=tensor([True, False], torch.bool)).data
    assert lane[0] == 0 and lane[1] > 2**30 and lane[1] % 2 == 1


def test_atomics():
    array = Memory(torch.zeros(4, dtype=torch.int32))
    same = Pointer(array) + tensor([1, 1, 2], torch.int32)
    global_memory.atomic_add(same, 5)
    assert array.flat.tolist() == [0, 10, 5, 0]
    assert global_memory.atomic_max(Pointer(array) + 2, 7).value == 5
    assert global_memory.atomic_cas(Pointer(array), 0, 9).value == 0
    assert global_memory.atomic_cas(Pointer(array), 0, 8).value == 9
    assert global_memory.atomic_load(Pointer(array)).value == 9 and array.flat.tolist() == [9, 10, 7, 0]


# ---- what the kernel promises


def test_promises_are_checked():
    assert program.multiple_of(i32(64), 16).value == 64
    for broken in (
        lambda: program.multiple_of(i32(60), 16),
        lambda: program.assume(i32(3) > 4),
        lambda: program.device_assert(tensor([1.0, 2.0]) > 1.0, "too small"),
        lambda: program.static_assert(False, "no"),
        lambda: program.expect_zero(tensor([1.0]), tensor([True], torch.bool)),
    ):
        with pytest.raises(SimulationError, match=r"test_tensor.py:\d+ in"):
            broken()
    program.device_assert(tensor([1.0, 2.0]) > 1.0, "", mask=tensor([False, True], torch.bool))
