"""What the units of a Hopper SM cost, in cycles of its clock: the numbers behind `strobe.sim.costs`.

Every kernel reads the clock, lets one unit work `n` times, and reads the clock again. A line through the times of several
n gives a cost for each repetition (`each`) and what is paid once (`once`: latency, and the clock's own cycles).

    python benchmarks/unit_costs.py            # on a Hopper GPU, a minute; writes results/unit-costs-<gpu>-<date>.json
"""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch

from strobe.kernels.common.channel import make_barriers
from strobe.kernels.common.stamp import clock
from strobe.kernels.gluon import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from strobe.kernels.sm90 import forward
from strobe.kernels.sm90.config import Config
from strobe.kernels.sm90.layouts import accumulator, rows_of
from strobe.lab.bench.machine import provenance, save, snapshot

LAUNCHES = 9
UNROLLED = gl.constexpr(4)

# ---- kernels; each writes its cycles to out[CTA]


@gluon.jit
def wgmma_kernel(out, sink, n: gl.constexpr, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, REGISTERS: gl.constexpr):
    """n products [M, K] @ [K, N] in a row into one accumulator, A from registers or from shared memory; 64 rows a group."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[M // 16, 1], instr_shape=[16, N, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2)
    a = gl.full([M, K], 1.0, gl.bfloat16, operand)
    a_s = gl.allocate_shared_memory(gl.bfloat16, [M, K], shared)
    b_s = gl.allocate_shared_memory(gl.bfloat16, [N, K], shared)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [M // 16, 1], [1, 0])
    a_s.store(gl.full([M, K], 1.0, gl.bfloat16, flat))
    b_s.store(gl.full([N, K], 1.0, gl.bfloat16, flat))
    fence_async_shared()
    partition_barrier()
    acc = gl.full([M, N], 0.0, gl.float32, layout)
    begin = clock()
    for _ in gl.static_range(n):
        acc = warpgroup_mma(a if REGISTERS else a_s, b_s.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    gl.store(out + gl.program_id(0), clock() - begin)
    gl.store(sink, gl.max(gl.max(acc, 1), 0))


@gluon.jit
def convert(x):
    """float32 to bfloat16, two by two, and the pair's bits as float32 again, without an instruction."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; mov.b32 $0, t; mov.b32 $1, t; }",
        "=f,=f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def register_kernel(out, sink, n, a, b, OP: gl.constexpr):
    """n times UNROLLED times an operation on 64 float32 of every thread."""
    layout: gl.constexpr = gl.BlockedLayout([1, 64], [32, 1], [gl.num_warps(), 1], [1, 0])
    x = gl.full([32 * gl.num_warps(), 64], 0.5, gl.float32, layout) + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :] * a
    partition_barrier()
    begin = clock()
    for _ in range(n):
        for _ in gl.static_range(UNROLLED):
            if OP == "exp2":
                x = gl.exp2(x)
            elif OP == "fma":
                x = x * a + b
            elif OP == "add":
                x = x + b
            elif OP == "maximum":
                x = gl.maximum(x, b)
            elif OP == "convert to bf16":
                x = convert(x)
            elif OP == "fma and exp2":
                x = gl.exp2(x * a + b)
            b = b + a
    partition_barrier()
    gl.store(out + gl.program_id(0), clock() - begin)
    gl.store(sink, gl.max(gl.max(x, 1), 0))


@gluon.jit
def row_max_kernel(out, sink, n, a, COLUMNS: gl.constexpr):
    """n times the row maxima of a 64 x COLUMNS accumulator."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    s = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :] * a + gl.full([64, COLUMNS], 0.0, gl.float32, layout)
    top = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, layout))
    partition_barrier()
    begin = clock()
    for _ in range(n):
        top = gl.max(gl.maximum(s, top[:, None]), 1) + a
    partition_barrier()
    gl.store(out + gl.program_id(0), clock() - begin)
    gl.store(sink, gl.max(top, 0))


@gluon.jit
def softmax_kernel(out, sink, n, a, scale, C: gl.constexpr):
    """n times what a consumer of the Hopper forward does with the scores of a block, alone on its SM: the optimistic
    softmax, or the one with a running maximum."""
    layout: gl.constexpr = accumulator(C.tile_kv)
    s = gl.arange(0, C.tile_kv, gl.SliceLayout(0, layout))[None, :] * a + gl.full([64, C.tile_kv], 0.0, gl.float32, layout)
    m = gl.full([64], 0.0, gl.float32, rows_of(C.tile_kv))
    row_sum = forward.lane_sums(s)
    partition_barrier()
    begin = clock()
    for _ in range(n):
        if not C.optimistic:
            new_m = gl.maximum(m, forward.row_max(s) * scale)
            row_sum = row_sum * gl.convert_layout(gl.exp2(m - new_m), gl.SliceLayout(1, row_sum.type.layout))[:, None]
            m = new_m
        s = forward.weights(s, m, scale)
        row_sum = row_sum + forward.lane_sums(s)
    partition_barrier()
    gl.store(out + gl.program_id(0), clock() - begin)
    gl.store(sink, gl.max(gl.max(row_sum, 1), 0) + gl.max(gl.max(s, 1), 0))


@gluon.jit
def synchronise_kernel(out, n, WHAT: gl.constexpr):
    """n times a barrier of all warps, a fence of the async proxy, an arrival at an mbarrier, or a wait that is over."""
    bar = make_barriers(1, 1).index(0)
    fence_async_shared()
    partition_barrier()
    begin = clock()
    for _ in range(n):
        if WHAT == "barrier":
            partition_barrier()
        elif WHAT == "fence":
            fence_async_shared()
        elif WHAT == "arrive":
            mbarrier.arrive(bar, count=1)
        else:
            mbarrier.wait(bar, 1)
    gl.store(out + gl.program_id(0), clock() - begin)


@gluon.jit
def serve(mine, theirs, n):
    for i in range(n):
        mbarrier.wait(mine, i & 1)
        mbarrier.arrive(theirs, count=1)


@gluon.jit
def return_serve(out, mine, theirs, n):
    begin = clock()
    for i in range(n):
        mbarrier.arrive(theirs, count=1)
        mbarrier.wait(mine, i & 1)
    gl.store(out + gl.program_id(0), clock() - begin)


@gluon.jit
def ping_pong_kernel(out, n, WORKER_WARPS: gl.constexpr):
    """n round trips between a partition of 4 warps and one of WORKER_WARPS: two arrivals and two waits each."""
    bars = make_barriers(2, 1)
    fence_async_shared()
    gl.warp_specialize([(return_serve, (out, bars.index(0), bars.index(1), n)),
                        (serve, (bars.index(1), bars.index(0), n))], [WORKER_WARPS], [24])  # fmt: skip


@gluon.jit
def load_kernel(out, desc, n, step, STAGES: gl.constexpr):
    """n TMA copies of a block into shared memory, STAGES in flight; CTAs read `step` rows apart (0: all the same)."""
    buffers = gl.allocate_shared_memory(desc.dtype, [STAGES, desc.block_type.shape[0], desc.block_type.shape[1]], desc.layout)
    bars = make_barriers(STAGES, 1)
    fence_async_shared()
    partition_barrier()
    first = gl.program_id(0) * step
    begin = clock()
    for i in range(n + STAGES - 1):
        if i < n:
            mbarrier.expect(bars.index(i % STAGES), desc.block_type.nbytes)
            tma_load(desc, [first + i * desc.block_type.shape[0], 0], bars.index(i % STAGES), buffers.index(i % STAGES))
        done = i - (STAGES - 1)
        if done >= 0:
            mbarrier.wait(bars.index(done % STAGES), (done // STAGES) & 1)
    gl.store(out + gl.program_id(0), clock() - begin)


@gluon.jit
def store_kernel(out, desc, n, WARPS: gl.constexpr):
    """n times a block from registers to shared memory and by TMA to global memory, waited for."""
    buffer = gl.allocate_shared_memory(desc.dtype, desc.block_type.shape, desc.layout)
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 64, 16])
    x = gl.full(desc.block_type.shape, 1.0, desc.dtype, layout)
    begin = clock()
    for _ in range(n):
        buffer.store(x)
        fence_async_shared()
        partition_barrier()
        tma_store(desc, [gl.program_id(0) * desc.block_type.shape[0], 0], buffer)
        tma_store_wait(0)
        partition_barrier()
    gl.store(out + gl.program_id(0), clock() - begin)


@gluon.jit
def shared_kernel(out, sink, n, STORE: gl.constexpr):
    """n times 32 float32 of every thread to shared memory, or from it, 16 bytes at a time and free of bank conflicts. Two
    buffers take turns, else the compiler would load once."""
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=4, per_phase=1, max_phase=1, order=[1, 0])
    x = gl.full([8 * warps, 128], 1.0, gl.float32, layout)
    buffers = gl.allocate_shared_memory(gl.float32, [2, 8 * warps, 128], shared)
    buffers.index(0).store(x)
    buffers.index(1).store(x)
    partition_barrier()
    begin = clock()
    for i in range(n):
        if STORE:
            buffers.index(i & 1).store(x)
        else:
            x = x + buffers.index(i & 1).load(layout)
    partition_barrier()
    gl.store(out + gl.program_id(0), clock() - begin)
    gl.store(sink, gl.max(gl.max(x, 1), 0))


@gluon.jit
def chase_kernel(out, sink, links, n):
    """n dependent loads from global memory, past the first-level cache."""
    place = gl.program_id(0) * 0
    begin = clock()
    for _ in range(n):
        place = gl.load(links + place, cache_modifier=".cg")
    gl.store(sink, place.to(gl.float32))
    gl.store(out + gl.program_id(0), clock() - begin)


# ---- measuring


def cycles(launch: Callable[[torch.Tensor], object], ctas: int = 1) -> float:
    """Median over launches of the slowest CTA's cycles; launch(out) starts the kernel."""
    out = torch.zeros(ctas, dtype=torch.int64, device="cuda")
    taken = []
    for _ in range(LAUNCHES + 2):
        launch(out)
        taken.append(int(out.max()))
    return float(median(taken[2:]))


def line(of: Callable[[int], float], counts: tuple[int, ...]) -> dict:
    """The cost of n repetitions, by least squares: {"each", "once", "cycles": what was measured}."""
    taken = [of(n) for n in counts]
    each, once = np.polyfit(counts, taken, 1)
    return {"each": round(float(each), 2), "once": round(float(once), 1), "cycles": dict(zip(counts, taken, strict=True))}


def tensor_core(sink: torch.Tensor) -> dict[str, dict]:
    """wgmma: FLOP of a product, cycles for each and once."""
    results = {}
    for m, n, k, registers in (
        (64, 64, 64, False), (64, 128, 64, False), (64, 128, 128, False), (64, 256, 64, False), (64, 64, 128, True),
        (64, 128, 128, True), (64, 256, 64, True), (128, 128, 128, False), (128, 128, 128, True),
    ):  # fmt: skip

        def of(count, m=m, n=n, k=k, registers=registers):
            return cycles(lambda out: wgmma_kernel[(1,)](out, sink, count, m, n, k, registers, num_warps=m // 16))

        fitted = line(of, (1, 2, 4))  # from 8 on with A in registers, the compiler waits between them
        name = f"{m} x {n} x {k}, A in {'registers' if registers else 'shared memory'}"
        results[name] = fitted | {"flop_per_cycle": round(2 * m * n * k / fitted["each"])}
    return results


def registers(sink: torch.Tensor) -> dict[str, dict]:
    """Elements a cycle of the whole SM, by operation and warps."""
    results = {}
    for op in ("exp2", "fma", "add", "maximum", "convert to bf16", "fma and exp2"):
        for warps in (4, 8):

            def of(n, op=op, warps=warps):
                return cycles(lambda out: register_kernel[(1,)](out, sink, n, 0.001, 0.25, op, num_warps=warps))

            fitted = line(of, (8, 16, 32, 64))
            results[f"{op}, {warps} warps"] = fitted | {
                "elements_per_cycle": round(32 * warps * 64 * UNROLLED.value / fitted["each"], 1)
            }
    for columns in (64, 128):
        results[f"row maxima of 64 x {columns}"] = line(
            lambda n, columns=columns: cycles(lambda out: row_max_kernel[(1,)](out, sink, n, 0.001, columns, num_warps=4)),
            (8, 16, 32, 64),
        )  # fmt: skip
    for columns, optimistic in itertools.product((64, 128), (False, True)):
        config = Config(64, 64, 2, columns, 2, optimistic=optimistic)
        results[f"{'optimistic ' * optimistic}softmax of 64 x {columns}"] = line(
            lambda n, c=config: cycles(lambda out: softmax_kernel[(1,)](out, sink, n, 0.001, 0.1, c, num_warps=4)),
            (8, 16, 32, 64),
        )  # fmt: skip
    return results


def synchronisation() -> dict[str, dict]:
    results = {}
    for what in ("barrier", "fence", "arrive", "passing wait"):
        for warps in (1, 4, 8):
            results[f"{what}, {warps} warps"] = line(
                lambda n, what=what, warps=warps: cycles(lambda out: synchronise_kernel[(1,)](out, n, what, num_warps=warps)),
                (8, 16, 32, 64),
            )  # fmt: skip
    for warps in (1, 4):
        results[f"mbarrier round trip, 4 and {warps} warps"] = line(
            lambda n, warps=warps: cycles(lambda out: ping_pong_kernel[(1,)](out, n, warps, num_warps=4)), (8, 16, 32, 64)
        )
    return results


def descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([rows, x.shape[1]], gl.bfloat16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, x.shape[1]], layout)


def copies() -> dict[str, dict]:
    """TMA: one copy at a time (latency and bytes), and a ring of four (bandwidth), by one SM and by all."""
    results: dict[str, dict] = {}
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    small = torch.ones(8192, 64, dtype=torch.bfloat16, device="cuda")
    for rows in (8, 64, 128, 256):
        fitted = line(lambda n, rows=rows: loads(small, rows, n, 1, 0, 1), (4, 8, 16))
        results[f"load {rows * 128} bytes from L2, one at a time"] = fitted
    large = torch.ones(sms * 8192, 64, dtype=torch.bfloat16, device="cuda")
    for rows in (8, 128):
        fitted = line(lambda n, rows=rows: loads(large, rows, n, sms, 8192, 1, cold=True), (4, 8, 16))
        results[f"load {rows * 128} bytes from memory, one at a time, all SMs"] = fitted
    for name, ctas, step, x in (
        ("from L2, one SM", 1, 0, small),
        ("from L2, all SMs, the same", sms, 0, small),
        ("from memory, all SMs", sms, 8192, large),
    ):
        fitted = line(lambda n, x=x, ctas=ctas, step=step: loads(x, 128, n, ctas, step, 4, x is large), (16, 32, 64))
        results[f"load 16384 bytes {name}, 4 in flight"] = fitted | {"bytes_per_cycle": round(16384 / fitted["each"], 1)}
    out_desc = descriptor(torch.empty(64, 64, dtype=torch.bfloat16, device="cuda"), 64)
    results["store 8192 bytes and wait"] = line(
        lambda n: cycles(lambda out: store_kernel[(1,)](out, out_desc, n, 4, num_warps=4)), (8, 16, 32)
    )
    return results


def loads(x: torch.Tensor, rows: int, n: int, ctas: int, step: int, stages: int, cold: bool = False) -> float:
    """Cycles of n loads; cold: from memory, since a copy of 256 MB went through the L2 before."""
    desc, other = descriptor(x, rows), torch.empty(1 << 28 if cold else 1, dtype=torch.int8, device="cuda")

    def launch(out):
        other.zero_()
        load_kernel[(ctas,)](out, desc, n, step, stages, num_warps=1)

    return cycles(launch, ctas)


def memories(sink: torch.Tensor) -> dict[str, dict]:
    results = {}
    for store in (False, True):
        for warps in (4, 8):

            def of(n, store=store, warps=warps):
                return cycles(lambda out: shared_kernel[(1,)](out, sink, n, store, num_warps=warps))

            fitted = line(of, (8, 16, 32, 64))
            bytes_each = 32 * warps * 32 * 4
            name = f"shared memory {'store' if store else 'load'}, {warps} warps"
            results[name] = fitted | {"bytes_per_cycle": round(bytes_each / fitted["each"], 1)}
    links = (torch.arange(1 << 16, dtype=torch.int32, device="cuda") + 32) % (1 << 16)
    results["global load from L2"] = line(
        lambda n: cycles(lambda out: chase_kernel[(1,)](out, sink, links, n, num_warps=1)), (64, 128, 256)
    )
    return results


def main(path: Path | None) -> None:
    device = torch.device("cuda")
    sink = torch.zeros(1, device=device)
    report = {"what": "unit costs, cycles", **provenance(device)}
    sections = {
        "wgmma": lambda: tensor_core(sink),
        "registers": lambda: registers(sink),
        "synchronisation": synchronisation,
        "copies": copies,
        "memory": lambda: memories(sink),
    }
    for name, section in sections.items():
        report[name] = section()
        for what, result in report[name].items():
            print(f"{name:16} {what:60} { ({k: v for k, v in result.items() if k != 'cycles'}) }", flush=True)
    report["telemetry"] = snapshot(device)
    gpu = report["device"]["name"].lower().removeprefix("nvidia ").replace(" ", "-")
    target = path or Path("benchmarks/results") / f"unit-costs-{gpu}-{report['date'][:10]}.json"
    print(f"written: {save(target, report)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
