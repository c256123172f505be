"""Conformance: what threads compute with values in registers, and what they read and write in global memory."""

import torch
from conformance import Case, blank, integers, plain
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from strobe.kernels.gluon import PropagateNan, partition_barrier

VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
BLOCK = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
PROPAGATE = gl.constexpr(PropagateNan.ALL)
NAN, INF = float("nan"), float("inf")


@gluon.jit
def block_offsets(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, BLOCK))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, BLOCK))
    return rows[:, None] * COLUMNS + columns[None, :]


# ---- integers


@gluon.jit
def integer_division(x, y, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    gl.store(out + i, gl.load(x + i) // gl.load(y + i))
    gl.store(out + N + i, gl.load(x + i) % gl.load(y + i))


@gluon.jit
def scalar_division(x, y, out, N: gl.constexpr):
    for i in range(N):
        gl.store(out + i, gl.load(x + i) // gl.load(y + i))
        gl.store(out + N + i, gl.load(x + i) % gl.load(y + i))


DIVIDENDS = torch.tensor([7, -7, 7, -7, 0, 6, -6, -1], dtype=torch.int32)
DIVISORS = torch.tensor([3, 3, -3, -3, 5, 3, 3, 8], dtype=torch.int32)
QUOTIENTS = torch.tensor([2, -2, -2, 2, 0, 2, -2, 0, 1, -1, 1, -1, 0, 0, 0, -1], dtype=torch.int32)


@gluon.jit
def integer_arithmetic(x, y, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    a, b = gl.load(x + i), gl.load(y + i)
    gl.store(out + i, a + b)
    gl.store(out + N + i, a * b)
    gl.store(out + 2 * N + i, a << 5)
    gl.store(out + 3 * N + i, a >> 3)
    gl.store(out + 4 * N + i, (a ^ b) & 255 | 256)
    gl.store(out + 5 * N + i, (a.to(gl.int64) * b.to(gl.int64) >> 32).to(gl.int32))


def wrapped(x: torch.Tensor) -> torch.Tensor:
    """int64 -> int32, modulo 2^32."""
    return ((x + 2**31) % 2**32 - 2**31).to(torch.int32)


A = torch.tensor([2**31 - 1, -(2**31), 12345678, -9], dtype=torch.int64)
B = torch.tensor([1, -1, 87654321, 100], dtype=torch.int64)
INTEGER_RESULTS = torch.cat([wrapped(x) for x in (A + B, A * B, A << 5, A >> 3, (A ^ B) & 255 | 256, A * B >> 32)])


@gluon.jit
def steps_to_one(x, out, N: gl.constexpr):
    """Scalars in loops and branches: how often n is halved or becomes 3 n + 1 until it is 1."""
    for i in range(N - 1, -1, -1):
        n = gl.load(x + i)
        steps = 0
        while n != 1:
            if n % 2 == 0:  # noqa: SIM108
                n = n // 2
            else:
                n = 3 * n + 1
            steps += 1
        gl.store(out + i, steps)


# ---- floats


@gluon.jit
def float_conversions(x, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    value = gl.load(x + i)
    gl.store(out + i, value.to(gl.bfloat16).to(gl.float32))
    gl.store(out + N + i, value.to(gl.float16).to(gl.float32))


ULP = 2.0**-7  # of bfloat16 at 1
TIES = [1 + ULP / 2, 1 + 3 * ULP / 2, 1 + ULP / 2 + 2**-20, -(1 + ULP / 2)]
FLOATS = torch.tensor([*TIES, 3.4e38, 65519.0, 65520.0, 2**-25, 3e-8, -INF, NAN, 1e-40, 1.0, -0.3, 1e5, 100.1])


@gluon.jit
def integer_conversions(x, n, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    gl.store(out + i, gl.load(x + i).to(gl.int32))
    gl.store(out + N + i, (gl.load(n + i).to(gl.float32)).to(gl.int32))


@gluon.jit
def min_and_max(x, y, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    a, b = gl.load(x + i), gl.load(y + i)
    gl.store(out + i, gl.maximum(a, b))
    gl.store(out + N + i, gl.minimum(a, b))
    gl.store(out + 2 * N + i, gl.maximum(a, b, propagate_nan=PROPAGATE))


@gluon.jit
def comparisons(x, y, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    a, b = gl.load(x + i), gl.load(y + i)
    gl.store(out + i, (a == b).to(gl.int32) + (a < b).to(gl.int32) * 2 + (a >= b).to(gl.int32) * 4 + (a != b).to(gl.int32) * 8)


@gluon.jit
def powers_of_two(x, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    gl.store(out + i, gl.exp2(gl.load(x + i)))


@gluon.jit
def powers_that_vanish(x, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    gl.store(out + i, (gl.exp2(gl.load(x + i)) > 0.0).to(gl.int32))


@gluon.jit
def logarithms(x, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    gl.store(out + i, gl.log2(gl.load(x + i)))


EXPONENTS = torch.tensor([-INF, INF, NAN, 0.0, -1.0, 0.5, 10.25, 127.0, 128.0, -126.0, -0.001, -1e30, -20.7, 3.3, 1.0, 100.5])
POSITIVE = torch.tensor([0.0, -1.0, INF, NAN, 1.0, 8.0, 0.1, 1e30])


@gluon.jit
def functions(x, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    value = gl.load(x + i)
    gl.store(out + i, gl.exp(value))
    gl.store(out + N + i, gl.log(value))
    gl.store(out + 2 * N + i, gl.sqrt(value))
    gl.store(out + 3 * N + i, gl.rsqrt(value))
    gl.store(out + 4 * N + i, gl.floor(-value) + gl.ceil(value) * 16 + gl.abs(-value))


@gluon.jit
def small_numbers(x, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    value = gl.load(x + i)
    gl.store(out + i, value * 0.5)
    gl.store(out + N + i, value + value)


SOME = torch.tensor([0.25, 1.0, 2.5, 7.75])
FUNCTIONS = torch.cat([SOME.exp(), SOME.log(), SOME.sqrt(), SOME.rsqrt(), (-SOME).floor() + SOME.ceil() * 16 + SOME])
TINY = torch.tensor([2.0**-126, 2.0**-140, 2.0**-149, 3 * 2.0**-149])


@gluon.jit
def fused_multiply_add(x, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    value = gl.load(x + i)
    gl.store(out + i, gl.fma(value, value, -gl.load(x + N + i)))


@gluon.jit
def choice(x, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    value = gl.load(x + i)
    gl.store(out + i, gl.where(value > 0.0, gl.log2(value), value * 0.0))


@gluon.jit
def division(x, y, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    gl.store(out + i, gl.load(x + i) / gl.load(y + i))


@gluon.jit
def promotion(x, y, out, N: gl.constexpr):
    """bfloat16 + bfloat16 rounds; bfloat16 + float32 does not; an integer takes part as a float."""
    i = gl.arange(0, N, VECTOR)
    a, b = gl.load(x + i), gl.load(y + i)
    gl.store(out + i, (a + a * 0.00390625).to(gl.float32))
    gl.store(out + N + i, a + b)
    gl.store(out + 2 * N + i, b * i)


PROMOTED = torch.cat(
    [torch.tensor([1.0, 2.0, 3.015625, 4.0]), 1.00390625 * torch.arange(1, 5), torch.arange(4) * torch.arange(1, 5) / 256]
)

# ---- over axes


@gluon.jit
def larger_magnitude(a, b):
    return gl.where(gl.abs(a) > gl.abs(b), a, b)


@gluon.jit
def reductions(x, out, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    value = gl.load(x + block_offsets(ROWS, COLUMNS))
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, BLOCK))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, BLOCK))
    gl.store(out + rows, gl.sum(value, 1))
    gl.store(out + ROWS + rows, gl.max(value, 1))
    gl.store(out + 2 * ROWS + rows, gl.min(value, 1))
    gl.store(out + 3 * ROWS + rows, gl.reduce(value, 1, larger_magnitude))
    gl.store(out + 4 * ROWS + columns, gl.sum(value, 0))


RATIOS = integers(8, 32, seed=1) + torch.arange(256).reshape(8, 32) / 256
REDUCED = torch.cat(
    [RATIOS.sum(1), RATIOS.amax(1), RATIOS.amin(1), RATIOS.gather(1, RATIOS.abs().argmax(1, True))[:, 0], RATIOS.sum(0)]
)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def running_sums(x, out, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    gl.store(out + block_offsets(ROWS, COLUMNS), gl.associative_scan(gl.load(x + block_offsets(ROWS, COLUMNS)), 1, add))


@gluon.jit
def maximum_beside_nan(x, out, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    value = gl.load(x + block_offsets(ROWS, COLUMNS))
    gl.store(out + gl.arange(0, ROWS, gl.SliceLayout(1, BLOCK)), gl.max(value, 1))


WITH_NAN = torch.tensor([[1.0, NAN, 3.0, 2.0], [NAN, NAN, NAN, NAN], [-INF, NAN, -INF, NAN], [NAN, 1.0, 2.0, 0.0]])


@gluon.jit
def reshapes(x, out, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    value = gl.load(x + block_offsets(ROWS, COLUMNS))
    pairs = gl.sum(gl.reshape(value, [ROWS, COLUMNS // 2, 2]), 2)
    left, right = gl.split(gl.reshape(value, [ROWS, COLUMNS // 2, 2]))
    halves = gl.permute(gl.join(left, right), (0, 2, 1))
    halves = gl.convert_layout(gl.reshape(halves, [ROWS, COLUMNS]), BLOCK)
    gl.store(out + block_offsets(ROWS, COLUMNS), halves)
    offsets = ROWS * COLUMNS + block_offsets(ROWS, COLUMNS // 2)
    gl.store(out + offsets, gl.convert_layout(pairs, BLOCK))


GRID = integers(8, 32, seed=2)
RESHAPED = torch.cat([GRID.reshape(8, 16, 2).permute(0, 2, 1).flatten(), GRID.reshape(8, 16, 2).sum(2).flatten()])

# ---- global memory and programs


@gluon.jit
def masked_access(x, out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    value = gl.load(x + i, mask=i % 3 != 0, other=5)
    gl.store(out + i, value, mask=i < N - 2)


@gluon.jit
def written_and_read_again(x, out, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """After a barrier a thread reads from global memory what another one of its CTA wrote there."""
    gl.store(x + block_offsets(ROWS, COLUMNS), gl.load(x + block_offsets(ROWS, COLUMNS)) + 1)
    partition_barrier()
    rows = gl.arange(0, ROWS, gl.SliceLayout(0, BLOCK))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(1, BLOCK))
    transposed = gl.load(x + columns[:, None] + rows[None, :] * COLUMNS)
    gl.store(out + columns[:, None] * ROWS + rows[None, :], transposed)


@gluon.jit
def programs(out):
    i, j = gl.program_id(0), gl.program_id(1)
    gl.store(out + i * gl.num_programs(1) + j, i * 100 + j * 10 + gl.num_programs(0))


@gluon.jit
def atomics(out, N: gl.constexpr):
    i = gl.arange(0, N, VECTOR)
    gl.atomic_add(out + i, i + gl.program_id(0))
    gl.atomic_max(out + N + i, i * (1 - 2 * gl.program_id(0)))
    ticket = gl.atomic_add(out + 2 * N, 1)
    gl.atomic_add(out + 2 * N + 1, ticket * ticket)


ATOMIC_RESULTS = torch.cat([4 * torch.arange(8) + 6, torch.arange(8), torch.tensor([4, 14])]).to(torch.int32)


def ints(n: int) -> torch.Tensor:
    return blank(n, dtype=torch.int32)


def vector(question, kernel, inputs, expected, n, **more) -> Case:
    """A case whose kernel takes vectors of n values."""
    out = blank(expected.numel(), dtype=expected.dtype)
    return Case(question, kernel, plain(*inputs, out=out), expected, arch=80, constants=(("N", n),), **more)


def matrix(question, kernel, x, expected, **more) -> Case:
    """A case whose kernel takes one matrix."""
    constants = (("ROWS", x.shape[0]), ("COLUMNS", x.shape[1]))
    return Case(question, kernel, plain(x, out=blank(expected.numel())), expected, arch=80, constants=constants, **more)


ORDINARY, UNORDERED = torch.tensor([1.0, NAN, 2.0, NAN]), torch.tensor([2.0, 1.0, NAN, NAN])
CASES = [
    vector("// and % truncate toward zero", integer_division, (DIVIDENDS, DIVISORS), QUOTIENTS, 8),
    vector("// and % of scalars truncate toward zero", scalar_division, (DIVIDENDS, DIVISORS), QUOTIENTS, 8),
    vector("int32 wraps, shifts, widens", integer_arithmetic, (A.int(), B.int()), INTEGER_RESULTS, 4),
    vector(
        "loops and branches of scalars",
        steps_to_one,
        (torch.tensor([1, 8, 27, 97], dtype=torch.int32),),
        torch.tensor([0, 3, 111, 118], dtype=torch.int32),
        4,
    ),
    vector(
        "float32 rounds to nearest even in bfloat16 and float16",
        float_conversions,
        (FLOATS,),
        torch.cat([FLOATS.bfloat16().float(), FLOATS.half().float()]),
        16,
    ),
    vector(
        "floats become integers toward zero, integers floats to nearest even",
        integer_conversions,
        (torch.tensor([2.9, -2.9, -0.5, 1e9]), torch.tensor([2**24 + 1, 2**24 + 3, -(2**24) - 1, 7], dtype=torch.int32)),
        torch.tensor([2, -2, 0, 10**9, 2**24, 2**24 + 4, -(2**24), 7], dtype=torch.int32),
        4,
    ),
    vector(
        "minimum and maximum pass NaN by, unless told not to",
        min_and_max,
        (ORDINARY, UNORDERED),
        torch.tensor([2.0, 1.0, 2.0, NAN, 1.0, 1.0, 2.0, NAN, 2.0, NAN, NAN, NAN]),
        4,
    ),
    vector("NaN compares as unordered", comparisons, (ORDINARY, UNORDERED), torch.tensor([10, 8, 8, 8], dtype=torch.int32), 4),
    vector("exp2 at its ends", powers_of_two, (EXPONENTS,), torch.exp2(EXPONENTS), 16, tolerance=1e-6),
    vector(
        "exp2 flushes denormal results to zero",
        powers_that_vanish,
        (torch.tensor([-126.0, -127.0, -140.0, -200.0]),),
        torch.tensor([1, 0, 0, 0], dtype=torch.int32),
        4,
    ),
    vector("log2 at its ends", logarithms, (POSITIVE,), torch.log2(POSITIVE), 8, tolerance=1e-6),
    vector("exp, log, sqrt, rsqrt, floor, ceil, abs", functions, (SOME,), FUNCTIONS, 4, tolerance=1e-6),
    vector("denormal numbers are kept", small_numbers, (TINY,), torch.cat([TINY * 0.5, TINY + TINY]), 4),
    vector(
        "fma rounds once",
        fused_multiply_add,
        (torch.tensor([1 + 2.0**-12] * 4 + [1 + 2.0**-11] * 4),),
        torch.full((4,), 2.0**-24),
        4,
    ),
    vector(
        "where ignores a NaN that it does not take",
        choice,
        (torch.tensor([4.0, -1.0, 0.0, 0.5]),),
        torch.tensor([2.0, 0, 0, -1]),
        4,
        tolerance=1e-6,
    ),
    vector(
        "division",
        division,
        (torch.tensor([1.0, 1.0, 0.0, 5.0]), torch.tensor([3.0, 0.0, 0.0, -INF])),
        torch.tensor([1 / 3, INF, NAN, 0]),
        4,
        tolerance=1e-6,
    ),
    vector("integers divide to a float", division, (DIVIDENDS, DIVISORS), DIVIDENDS / DIVISORS, 8, tolerance=1e-6),
    vector("types meet in the wider one", promotion, (torch.arange(1, 5).bfloat16(), torch.arange(1, 5) / 256), PROMOTED, 4),
    matrix("sums, maxima, own reductions over an axis", reductions, RATIOS, REDUCED, tolerance=1e-5),
    matrix("running sums along an axis", running_sums, GRID, GRID.cumsum(1).flatten()),
    matrix("global memory is read again after a barrier", written_and_read_again, GRID, (GRID + 1).T.flatten()),
    matrix("a maximum over an axis passes NaN by", maximum_beside_nan, WITH_NAN, torch.tensor([3.0, NAN, -INF, 2.0])),
    matrix("reshape, join, split and permute keep the row-major order", reshapes, GRID, RESHAPED),
    vector(
        "masked lanes load `other` and store nothing",
        masked_access,
        (torch.arange(8, dtype=torch.int32),),
        torch.tensor([5, 1, 2, 5, 4, 5, -777, -777], dtype=torch.int32),
        8,
    ),
    Case(
        "programs know their place in the grid",
        programs,
        plain(out=ints(6)),
        torch.tensor([3, 13, 103, 113, 203, 213], dtype=torch.int32),
        arch=80,
        grid=(3, 2),
    ),
    Case(
        "atomics add up over programs and return what was there",
        atomics,
        plain(out=torch.zeros(18, dtype=torch.int32)),
        ATOMIC_RESULTS,
        arch=80,
        grid=(4,),
        constants=(("N", 8),),
    ),
]
