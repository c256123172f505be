"""Conformance: shared memory, barriers, copies, products, and the partitions of a CTA."""

import torch
from conformance import Case, blank, integers, plain
from conformance_registers import BLOCK, VECTOR, block_offsets
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from strobe.kernels.gluon import (
    TensorDescriptor,
    cp_async,
    fence_async_shared,
    mbarrier,
    partition_barrier,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LINEAR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ROW_MAJOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
OLD_ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2], instr_shape=[16, 8]))


@gluon.jit
def make_barrier(count: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=count)
    fence_async_shared()
    partition_barrier()
    return barrier


# ---- views of shared memory


@gluon.jit
def views(x, out):
    memory = gl.allocate_shared_memory(gl.int32, [2, 8, 16], ROW_MAJOR)
    memory.index(0).store(gl.load(x + block_offsets(8, 16)))
    memory.index(1).store(gl.load(x + 128 + block_offsets(8, 16)))
    memory.index(0).slice(4, 4, dim=0).store(gl.load(x + 256 + block_offsets(4, 16)))
    partition_barrier()
    gl.store(out + block_offsets(16, 8), memory.index(0).permute((1, 0)).load(BLOCK))
    gl.store(out + 128 + block_offsets(4, 32), memory.index(1).reshape([4, 32]).load(BLOCK))
    gl.store(out + 256 + block_offsets(8, 8), memory.index(1).slice(8, 8, dim=1).load(BLOCK))


def expected_views() -> torch.Tensor:
    x = torch.arange(320, dtype=torch.int32)
    first = torch.cat([x[:64], x[256:]]).reshape(8, 16)
    second = x[128:256].reshape(8, 16)
    return torch.cat([first.T.flatten(), second.flatten(), second[:, 8:].flatten()])


@gluon.jit
def other_types(x, out):
    i = gl.arange(0, 64, VECTOR)
    memory = gl.allocate_shared_memory(gl.int32, [64], LINEAR)
    memory.store(gl.load(x + i))
    partition_barrier()
    gl.store(out + i, reinterpret(memory, gl.float32, [64], LINEAR).load(VECTOR))
    j = gl.arange(0, 128, VECTOR)
    gl.store(out + 64 + j, reinterpret(memory, gl.bfloat16, [128], LINEAR).load(VECTOR).to(gl.float32))


BITS = integers(128, seed=3).bfloat16()

# ---- mbarriers


@gluon.jit
def fresh_barrier(out):
    barrier = make_barrier(1)
    mbarrier.wait(barrier, 1)
    gl.store(out, 1)


@gluon.jit
def arrivals_and_phases(out):
    barrier = make_barrier(2)
    mbarrier.arrive(barrier, count=1)
    mbarrier.arrive(barrier, count=1)
    mbarrier.wait(barrier, 0)
    mbarrier.arrive(barrier, count=2)
    mbarrier.wait(barrier, 1)
    mbarrier.arrive(barrier, count=2, pred=False)
    mbarrier.arrive(barrier, count=2)
    mbarrier.wait(barrier, 0)
    mbarrier.wait(barrier, 0)
    gl.store(out, 1)


# ---- TMA


@gluon.jit
def load_box(x_desc, y, x, out):
    """The box at [y, x], through a barrier that expects all its bytes."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    memory = gl.allocate_shared_memory(x_desc.dtype, [ROWS, COLUMNS], x_desc.layout)
    barrier = make_barrier(1)
    mbarrier.expect(barrier, x_desc.block_type.nbytes)
    tma_load(x_desc, [y, x], barrier, memory)
    mbarrier.wait(barrier, 0)
    gl.store(out + block_offsets(ROWS, COLUMNS), memory.load(BLOCK))


@gluon.jit
def two_copies(x_desc, out, EXPECTS: gl.constexpr):
    """Two boxes through one barrier, whose bytes are expected at once or in two parts."""
    memory = gl.allocate_shared_memory(x_desc.dtype, [2, 16, 64], x_desc.layout)
    barrier = make_barrier(EXPECTS)
    for _i in gl.static_range(EXPECTS):
        mbarrier.expect(barrier, 2 // EXPECTS * x_desc.block_type.nbytes)
    tma_load(x_desc, [0, 0], barrier, memory.index(0))
    tma_load(x_desc, [16, 0], barrier, memory.index(1))
    mbarrier.wait(barrier, 0)
    gl.store(out + block_offsets(16, 64), memory.index(0).load(BLOCK))
    gl.store(out + 16 * 64 + block_offsets(16, 64), memory.index(1).load(BLOCK))


@gluon.jit
def one_buffer_again(x_desc, out, TIMES: gl.constexpr):
    memory = gl.allocate_shared_memory(x_desc.dtype, [16, 64], x_desc.layout)
    barrier = make_barrier(1)
    for i in range(TIMES):
        mbarrier.expect(barrier, x_desc.block_type.nbytes)
        tma_load(x_desc, [i * 16, 0], barrier, memory)
        mbarrier.wait(barrier, i & 1)
        gl.store(out + i * 16 * 64 + block_offsets(16, 64), memory.load(BLOCK))
        partition_barrier()


@gluon.jit
def strided_box(x_desc, b, h, s, out):
    """A box of one head's rows out of [batch, heads, rows, columns]."""
    memory = gl.allocate_shared_memory(x_desc.dtype, [16, 64], SWIZZLED)
    barrier = make_barrier(1)
    mbarrier.expect(barrier, x_desc.block_type.nbytes)
    tma_load(x_desc, [b, h, s, 0], barrier, memory.reshape(x_desc.block_type.shape))
    mbarrier.wait(barrier, 0)
    gl.store(out + block_offsets(16, 64), memory.load(BLOCK))


@gluon.jit
def store_box(values, y, x, out_desc):
    memory = gl.allocate_shared_memory(out_desc.dtype, [16, 64], out_desc.layout)
    memory.store(gl.load(values + block_offsets(16, 64)))
    fence_async_shared()
    partition_barrier()
    tma_store(out_desc, [y, x], memory)
    tma_store_wait(0)


@gluon.jit
def store_and_overwrite(values, out_desc):
    """Once a store has been waited for, its buffer may take other values."""
    memory = gl.allocate_shared_memory(out_desc.dtype, [16, 64], out_desc.layout)
    for i in gl.static_range(2):
        memory.store(gl.load(values + i * 16 * 64 + block_offsets(16, 64)))
        fence_async_shared()
        partition_barrier()
        tma_store(out_desc, [i * 16, 0], memory)
        tma_store_wait(0)
        partition_barrier()


TMA_INPUT = integers(52, 72, seed=4, dtype=torch.float16) + 5  # no zeros: those that appear were filled in


def descriptor(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    dtype = {torch.float16: gl.float16, torch.float32: gl.float32}[x.dtype]
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


def box(x: torch.Tensor, top: int, left: int, rows: int = 16, columns: int = 64) -> torch.Tensor:
    """x[top:, left:] with zeros where x has nothing."""
    padded = torch.nn.functional.pad(x, (100, 100, 100, 100))
    return padded[top + 100 : top + 100 + rows, left + 100 : left + 100 + columns].clone()


def reads(*coordinates: int, shape: tuple[int, ...] = (16, 64), source: torch.Tensor = TMA_INPUT):
    """Arguments: a descriptor of `source` in blocks of the answer's last two sides, coordinates, and room for the answer."""

    def arguments(device):
        out = blank(*shape, dtype=source.dtype).to(device)
        return (descriptor(source.to(device), list(shape[-2:])), *coordinates, out), out

    return arguments


def writes(values: torch.Tensor, *coordinates: int):
    """Arguments: values, coordinates, and the descriptor of a blank [52, 72], which holds the answer."""

    def arguments(device):
        out = blank(52, 72, dtype=torch.float16).to(device)
        return (values.to(device), *coordinates, descriptor(out, [16, 64])), out

    return arguments


def written(values: torch.Tensor, top: int, left: int) -> torch.Tensor:
    """What `writes` leaves in its [52, 72]."""
    padded = torch.full((252, 272), -777, dtype=torch.float16)
    padded[100 + top :, 100 + left :][: values.shape[0], : values.shape[1]] = values
    return padded[100:152, 100:172].clone()


HEADS = integers(2, 20, 3, 64, seed=5, dtype=torch.float16) + 5  # [batch, rows, heads, columns]


def heads_arguments(device):
    x, out = HEADS.to(device), blank(16, 64, dtype=torch.float16).to(device)
    block = [1, 1, 16, 64]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float16)
    batch, row, head, column = x.stride()
    desc = TensorDescriptor(x, [2, 3, 20, 64], [batch, head, row, column], block, layout)
    return (desc, 0, 2, 8, out), out


# ---- cp.async


@gluon.jit
def copy_groups(x, out):
    """The older of two groups can be read while the younger may be under way."""
    memory = gl.allocate_shared_memory(gl.int32, [2, 16, 32], ROW_MAJOR)
    for i in gl.static_range(2):
        cp_async(memory.index(i), x + i * 512 + block_offsets(16, 32))
        async_copy.commit_group()
    async_copy.wait_group(1)
    partition_barrier()
    gl.store(out + block_offsets(32, 16), memory.index(0).permute((1, 0)).load(BLOCK))
    async_copy.wait_group(0)
    partition_barrier()
    gl.store(out + 512 + block_offsets(32, 16), memory.index(1).permute((1, 0)).load(BLOCK))


@gluon.jit
def masked_copy(x, out):
    memory = gl.allocate_shared_memory(gl.int32, [16, 32], ROW_MAJOR)
    memory.store(gl.full([16, 32], 7, gl.int32, BLOCK))
    partition_barrier()
    columns = gl.arange(0, 32, gl.SliceLayout(0, BLOCK))
    cp_async(memory, x + block_offsets(16, 32), mask=(columns < 20)[None, :])
    async_copy.commit_group()
    async_copy.wait_group(0)
    partition_barrier()
    gl.store(out + block_offsets(16, 32), memory.load(BLOCK))


COPIED = torch.arange(1, 1025, dtype=torch.int32).reshape(2, 16, 32)

# ---- products


@gluon.jit
def to_shared(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    memory = gl.allocate_shared_memory(x.dtype.element_ty, [ROWS, COLUMNS], SWIZZLED)
    memory.store(gl.load(x + block_offsets(ROWS, COLUMNS)))
    fence_async_shared()
    partition_barrier()
    return memory


@gluon.jit
def put(out, value, LAYOUT: gl.constexpr):
    """Store a product."""
    rows = gl.arange(0, value.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(out + rows[:, None] * value.shape[1] + columns[None, :], value)


@gluon.jit
def product(a, b, out, A_TRANSPOSED: gl.constexpr, B_TRANSPOSED: gl.constexpr, IN_REGISTERS: gl.constexpr):
    """A B, of matrices that lie in shared memory as they are or transposed; A perhaps in registers. The accumulator is
    full of NaN, and not used."""
    a_s = to_shared(a, 64, 64)
    b_s = to_shared(b, 64, 64)
    if A_TRANSPOSED:
        a_s = a_s.permute((1, 0))
    if B_TRANSPOSED:
        b_s = b_s.permute((1, 0))
    acc = gl.full([64, 64], float("nan"), gl.float32, ACCUMULATOR)
    if IN_REGISTERS:
        left = a_s.load(gl.DotOperandLayout(operand_index=0, parent=ACCUMULATOR, k_width=2))
        acc = warpgroup_mma(left, b_s, acc, use_acc=False, is_async=True)
    else:
        acc = warpgroup_mma(a_s, b_s, acc, use_acc=False, is_async=True)
    put(out, warpgroup_mma_wait(0, deps=[acc]), ACCUMULATOR)


@gluon.jit
def chain(a, b, out):
    """Products follow one another into the same accumulator, with no wait between them."""
    a_s = to_shared(a, 64, 64)
    b_s = to_shared(b, 64, 64)
    acc = gl.full([64, 64], 1.0, gl.float32, ACCUMULATOR)
    acc = warpgroup_mma(a_s, b_s, acc, is_async=True)
    acc = warpgroup_mma(b_s, a_s, acc, is_async=True)
    put(out, warpgroup_mma_wait(0, deps=[acc]), ACCUMULATOR)


@gluon.jit
def older_product_first(a, b, out):
    """wait(1) finishes the older of two products; the younger goes on."""
    a_s = to_shared(a, 64, 64)
    b_s = to_shared(b, 64, 64)
    zero = gl.zeros([64, 64], gl.float32, ACCUMULATOR)
    older = warpgroup_mma(a_s, b_s, zero, is_async=True)
    younger = warpgroup_mma(b_s, a_s, zero, is_async=True)
    older = warpgroup_mma_wait(1, deps=[older])
    put(out, older, ACCUMULATOR)
    younger = warpgroup_mma_wait(0, deps=[younger])
    put(out + 64 * 64, younger, ACCUMULATOR)


@gluon.jit
def product_of_registers(a, b, out):
    """mma.sync: both operands in registers, from shared memory; the accumulator counts."""
    a_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    b_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    a_s.store(gl.load(a + block_offsets(64, 64)))
    b_s.store(gl.load(b + block_offsets(64, 64)))
    partition_barrier()
    left = a_s.load(gl.DotOperandLayout(operand_index=0, parent=OLD_ACCUMULATOR, k_width=2))
    right = b_s.permute((1, 0)).load(gl.DotOperandLayout(operand_index=1, parent=OLD_ACCUMULATOR, k_width=2))
    put(out, mma_v2(left, right, gl.full([64, 64], 2.0, gl.float32, OLD_ACCUMULATOR)), OLD_ACCUMULATOR)


LEFT, RIGHT = integers(64, 64, seed=6, dtype=torch.bfloat16), integers(64, 64, seed=7, dtype=torch.bfloat16)
LEFT[0], RIGHT[:, 0] = 0, 0
LEFT[0, :3], RIGHT[:3, 0] = torch.tensor([2048.0, 1.0, -1.0]).bfloat16(), torch.tensor([2048.0, 3.0, 2.0]).bfloat16()
AB, BA = LEFT.float() @ RIGHT.float(), RIGHT.float() @ LEFT.float()

# ---- partitions


@gluon.jit
def returning(x, factor, TWICE: gl.constexpr):
    if TWICE:
        x = x + x
    return x * factor, factor + 1


@gluon.jit
def bystander(out, factor, N: gl.constexpr):
    gl.store(out + gl.arange(0, N, gl.BlockedLayout([1], [32], [1], [0])), factor * 10)


@gluon.jit
def returned_values(x, factor, out, N: gl.constexpr):
    """The default partition takes and returns tensors; workers take scalars and pointers."""
    i = gl.arange(0, N, VECTOR)
    value, more = gl.warp_specialize(
        [(returning, (gl.load(x + i), factor, True)), (bystander, (out + N, factor, N))], [1], [24]
    )
    gl.store(out + i, value + more)


@gluon.jit
def sender(x, memory, full, empty, items, N: gl.constexpr):
    for item in range(items):
        mbarrier.wait(empty.index(item % 2), ((item // 2) & 1) ^ 1)
        memory.index(item % 2).store(gl.load(x + item * N + gl.arange(0, N, VECTOR)))
        partition_barrier()
        mbarrier.arrive(full.index(item % 2), count=1)


@gluon.jit
def receiver(out, memory, full, empty, items, N: gl.constexpr):
    for item in range(items):
        mbarrier.wait(full.index(item % 2), (item // 2) & 1)
        value = memory.index(item % 2).load(VECTOR)
        partition_barrier()
        mbarrier.arrive(empty.index(item % 2), count=1)
        gl.store(out + item * N + gl.arange(0, N, VECTOR), value * 2)


@gluon.jit
def passed_on(x, out, items, N: gl.constexpr):
    """One partition writes a ring of two buffers that another reads."""
    memory = gl.allocate_shared_memory(gl.float32, [2, N], LINEAR)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    partition_barrier()
    gl.warp_specialize([
        (receiver, (out, memory, full, empty, items, N)),
        (sender, (x, memory, full, empty, items, N)),
    ], [4], [48])  # fmt: skip


@gluon.jit
def half_writer(x, memory, barrier, PART: gl.constexpr):
    memory.slice(PART * 8, 8, dim=0).store(gl.load(x + PART * 8 * 16 + block_offsets(8, 16)))
    partition_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def reader_of_both(out, memory, barrier):
    mbarrier.wait(barrier, 0)
    gl.store(out + block_offsets(16, 16), memory.permute((1, 0)).load(BLOCK))


@gluon.jit
def two_arrivals(x, out):
    """A barrier of two arrivals, each by a partition that has written half of a buffer."""
    memory = gl.allocate_shared_memory(gl.float32, [16, 16], ROW_MAJOR)
    barrier = make_barrier(2)
    gl.warp_specialize([
        (reader_of_both, (out, memory, barrier)),
        (half_writer, (x, memory, barrier, 0)),
        (half_writer, (x, memory, barrier, 1)),
    ], [4, 4], [48, 48])  # fmt: skip


ITEMS = integers(8, 64, seed=8)
SQUARE = integers(16, 16, seed=9)


def product_case(question: str, a, b, *, a_transposed=False, b_transposed=False, in_registers=False) -> Case:
    constants = (("A_TRANSPOSED", a_transposed), ("B_TRANSPOSED", b_transposed), ("IN_REGISTERS", in_registers))
    return Case(question, product, plain(a, b, out=blank(64, 64)), LEFT.float() @ RIGHT.float(), constants=constants)


def seen(kernel, question: str, *inputs, expected: torch.Tensor, **more) -> Case:
    """A case whose kernel takes tensors alone."""
    return Case(question, kernel, plain(*inputs, out=blank(*expected.shape, dtype=expected.dtype)), expected, **more)


def yes(kernel, question: str) -> Case:
    """A case whose kernel answers 1, if it comes to an end."""
    return seen(kernel, question, expected=torch.ones(1, dtype=torch.int32))


VALUES = TMA_INPUT[:32, :64].contiguous()
CASES = [
    seen(
        views,
        "views of shared memory see the same bytes",
        torch.arange(320, dtype=torch.int32),
        expected=expected_views(),
        arch=80,
    ),
    seen(
        other_types,
        "shared memory as another type has the same bits",
        BITS.view(torch.int32),
        expected=torch.cat([BITS.view(torch.float32), BITS.float()]),
        arch=80,
    ),
    yes(fresh_barrier, "a fresh mbarrier lets pass who waits for the phase before the first"),
    yes(arrivals_and_phases, "an mbarrier counts arrivals, and its phase flips"),
    Case("TMA loads a box", load_box, reads(4, 8), box(TMA_INPUT, 4, 8)),
    Case(
        "TMA loads float32",
        load_box,
        reads(40, 60, shape=(32, 16), source=TMA_INPUT.float()),
        box(TMA_INPUT, 40, 60, 32, 16).float(),
    ),
    Case("TMA fills with zeros beyond the end, and counts their bytes", load_box, reads(44, 40), box(TMA_INPUT, 44, 40)),
    Case("TMA fills with zeros before the start", load_box, reads(-3, -8), box(TMA_INPUT, -3, -8)),
    Case("a box that lies outside is zeros", load_box, reads(52, 0), torch.zeros(16, 64, dtype=torch.float16)),
    *(
        Case(
            f"two copies on one mbarrier, their bytes expected {('at once', 'in parts')[expects - 1]}",
            two_copies,
            reads(shape=(2, 16, 64)),
            torch.stack([box(TMA_INPUT, 0, 0), box(TMA_INPUT, 16, 0)]),
            constants=(("EXPECTS", expects),),
        )
        for expects in (1, 2)
    ),
    Case(
        "one buffer and its mbarrier serve again and again",
        one_buffer_again,
        reads(shape=(3, 16, 64)),
        torch.stack([box(TMA_INPUT, 16 * i, 0) for i in range(3)]),
        constants=(("TIMES", 3),),
    ),
    Case("a box of a strided tensor ends where its head ends", strided_box, heads_arguments, box(HEADS[0, :, 2], 8, 0)),
    Case("TMA stores a box and clips it at the end", store_box, writes(VALUES[:16], 44, 40), written(VALUES[:16], 44, 40)),
    Case("a buffer is free after its store was waited for", store_and_overwrite, writes(VALUES), written(VALUES, 0, 0)),
    seen(
        copy_groups,
        "cp.async: wait_group(1) finishes the older group",
        COPIED,
        expected=torch.stack([COPIED[0].T, COPIED[1].T]).contiguous(),
        arch=80,
    ),
    seen(
        masked_copy,
        "cp.async: masked lanes copy zeros",
        COPIED[0],
        expected=COPIED[0] * (torch.arange(32) < 20).int(),
        arch=80,
    ),
    product_case("wgmma multiplies, and ignores an accumulator full of NaN", LEFT, RIGHT),
    product_case("wgmma takes A transposed", LEFT.T.contiguous(), RIGHT, a_transposed=True),
    product_case("wgmma takes B transposed", LEFT, RIGHT.T.contiguous(), b_transposed=True),
    product_case("wgmma takes A from registers", LEFT, RIGHT, in_registers=True),
    product_case("wgmma takes float16", LEFT.half(), RIGHT.half()),
    seen(chain, "wgmmas follow one another into one accumulator", LEFT, RIGHT, expected=AB + BA + 1),
    seen(older_product_first, "wgmma wait(1) finishes the older product", LEFT, RIGHT, expected=torch.stack([AB, BA])),
    seen(product_of_registers, "mma.sync adds to its accumulator", LEFT, RIGHT.T.contiguous(), expected=AB + 2, arch=80),
    Case(
        "the default partition returns values, workers take scalars",
        returned_values,
        lambda device: ((integers(64).to(device), 3, out := blank(128).to(device)), out),
        torch.cat([integers(64) * 6 + 4, torch.full((64,), 30.0)]),
        constants=(("N", 64),),
    ),
    Case(
        "partitions pass values on through a ring in shared memory",
        passed_on,
        lambda device: ((ITEMS.to(device), out := blank(8, 64).to(device), 8), out),
        ITEMS * 2,
        constants=(("N", 64),),
    ),
    seen(
        two_arrivals, "two partitions arrive at one mbarrier, a third sees both halves", SQUARE, expected=SQUARE.T.contiguous()
    ),
]
