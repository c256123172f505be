"""Do bank conflicts cost what `strobe banks` counts? Cycles of a warp's accesses to shared memory, by the SM's clock.

The four warps of a CTA make the same access n times, each time 128 bytes further, which changes no bank. They share the unit
that serves shared memory, so the slope of the cycles over n, divided by four, is what one warp's access costs: its wavefronts,
if the model is right. That takes no hardware counter; with --counters Nsight Compute runs the same accesses, and what its own
counters grow by from one access to the next stands beside the model: wavefronts, and bank conflicts, which are those beyond the
least.

    python benchmarks/banks.py               # on a GPU, a minute; writes results/banks-<gpu>-<date>.json
    python benchmarks/banks.py --counters    # needs ncu and its permission; writes results/bank-counters-<gpu>-<date>.json
"""

import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from strobe.kernels.gluon import gl, gluon, partition_barrier
from strobe.lab.bench.machine import provenance, save, snapshot
from strobe.lab.counters import ncu
from strobe.lab.counters.profile import run_ncu
from strobe.lab.model.banks import ACCESSES, LANES, LAYOUTS, Access, Count, Layout, Tile, measure

LAUNCHES = 9
COUNTS = (16, 32, 64)
WARPS = 4
TILE = Tile(32, 128, 2)
BYTES = gl.constexpr(32768)
"""Of the buffer: the tile with padding, and 128 bytes for each of 64 accesses."""

LOADS = {
    2: "{ .reg .b16 t; ld.shared.b16 t, [$1]; cvt.u32.u16 $0, t; }",
    4: "ld.shared.b32 $0, [$1];",
    8: "{ .reg .b32 a, b; ld.shared.v2.b32 {a, b}, [$1]; xor.b32 $0, a, b; }",
    16: "{ .reg .b32 a, b, c, d; ld.shared.v4.b32 {a, b, c, d}, [$1]; xor.b32 a, a, b; xor.b32 c, c, d; xor.b32 $0, a, c; }",
}
"""By the bytes of a lane."""

LDMATRIX = (
    "{ .reg .b32 a, b, c, d; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {a, b, c, d}, [$1]; "
    "xor.b32 a, a, b; xor.b32 c, c, d; xor.b32 $0, a, c; }"
)
STORES = {
    2: "{ .reg .b16 z; mov.b16 z, 0; st.shared.b16 [$1], z; mov.b32 $0, 0; }",
    4: "{ .reg .b32 z; mov.b32 z, 0; st.shared.b32 [$1], z; mov.b32 $0, 0; }",
    8: "{ .reg .b32 z; mov.b32 z, 0; st.shared.v2.b32 [$1], {z, z}; mov.b32 $0, 0; }",
    16: "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$1], {z, z, z, z}; mov.b32 $0, 0; }",
}


@gluon.jit
def access_kernel(out, sink, offsets, n: gl.constexpr, ASM: gl.constexpr):
    """n times an access to shared memory at offsets[lane]; its cycles to out."""
    warps: gl.constexpr = gl.num_warps()
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    buffer = gl.allocate_shared_memory(gl.int32, [BYTES // 4], shared)
    buffer.store(gl.full([BYTES // 4], 0, gl.int32, lanes))
    offset = gl.load(offsets + gl.arange(0, 32 * warps, lanes) % 32)
    base = gl.inline_asm_elementwise(
        "{ mov.u32 $0, global_smem; add.u32 $0, $0, $1; }", "=r,r", [offset], dtype=gl.int32, is_pure=True, pack=1
    )
    found = offset * 0
    partition_barrier()
    begin = gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1)
    for i in gl.static_range(n):
        found = found ^ gl.inline_asm_elementwise(ASM, "=r,r", [base + 128 * i], dtype=gl.int32, is_pure=False, pack=1)
    # A load at the end comes after all stores; and the clock is read only once its predicate, what was found, is there.
    found = found ^ gl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [base & -4], dtype=gl.int32, is_pure=False, pack=1
    )
    end = gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $1, 0x7fffffff; mov.u64 $0, 0; @p mov.u64 $0, %clock64; }",
        "=l,r", [found], dtype=gl.int64, is_pure=False, pack=1,
    )  # fmt: skip
    gl.store(out, gl.max(end - begin, 0))
    gl.store(sink, gl.max(found, 0))


def offsets_of(tile: Tile, layout: Layout, access: Access) -> list[int]:
    """The byte that each lane names."""
    return [layout.place(tile, *access.at(lane, tile.itemsize)) for lane in range(LANES)]


def instructions_of(name: str, tile: Tile) -> dict[str, str]:
    """The instructions that make an access, by their names."""
    if name == "ldmatrix":
        return {"ldmatrix": LDMATRIX}
    size = ACCESSES[name].size(tile.itemsize)
    return {"load": LOADS[size], "store": STORES[size]}


def cycles(offsets: torch.Tensor, n: int, asm: str) -> float:
    """Median over launches of the slowest lane's cycles."""
    out = torch.zeros(1, dtype=torch.int64, device="cuda")
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    taken = []
    for _ in range(LAUNCHES + 2):
        access_kernel[(1,)](out, sink, offsets, n, asm, num_warps=WARPS)
        taken.append(int(out))
    return float(median(taken[2:]))


class Case(NamedTuple):
    """An access in a layout, by one of its instructions; counted: by the model."""

    access: str
    layout: str
    instruction: str
    counted: Count
    asm: str

    def offsets(self) -> torch.Tensor:
        places = offsets_of(TILE, LAYOUTS[self.layout], ACCESSES[self.access])
        return torch.tensor(places, dtype=torch.int32, device="cuda")

    def facts(self) -> dict:
        return {"access": self.access, "layout": self.layout, "instruction": self.instruction,
                "wavefronts": self.counted.wavefronts}  # fmt: skip


def cases() -> list[Case]:
    """Each access in each layout that it fits."""
    return [
        Case(access, layout, instruction, counted, asm)
        for (access, layout), counted in measure(TILE, LAYOUTS, ACCESSES).items()
        if isinstance(counted, Count)
        for instruction, asm in instructions_of(access, TILE).items()
    ]


def timed() -> list[dict]:
    """Each case with the cycles that are measured."""
    found = []
    for case in cases():
        offsets = case.offsets()
        taken = [cycles(offsets, n, case.asm) for n in COUNTS]
        each, once = np.polyfit(COUNTS, taken, 1)
        point = case.facts() | {"cycles": round(float(each) / WARPS, 2), "once": round(float(once), 1), "taken": taken}
        print(f"{case.access:12} {case.layout:10} {case.instruction:9} {case.counted.wavefronts:3} wavefronts "
              f"{point['cycles']:7.2f} cycles")  # fmt: skip
        found.append(point)
    return found


# ---- by Nsight Compute's counters

WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
FEW, MANY = COUNTS[0], COUNTS[-1]


def launch_all() -> None:
    """What ncu watches: each case with few and with many accesses, compiled before."""
    out, sink = (torch.zeros(1, dtype=dtype, device="cuda") for dtype in (torch.int64, torch.int32))
    for start in (lambda: None, torch.cuda.profiler.start):
        torch.cuda.synchronize()
        start()
        for case in cases():
            for n in (FEW, MANY):
                access_kernel[(1,)](out, sink, case.offsets(), n, case.asm, num_warps=WARPS)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def counted_by_ncu() -> list[dict]:
    """Each case with what the counters say of one access of one warp. ValueError without ncu, its permission, or a counter."""
    options = ["--config-file", "off", "--csv", "--page", "raw", "--profile-from-start", "off"]
    options += ["--kernel-name", "access_kernel", "--metrics", f"{WAVEFRONTS},{CONFLICTS}"]
    launches, found = ncu.read(run_ncu([*options, sys.executable, __file__, "--launch"])), []
    if len(launches) != 2 * len(cases()) or not all({WAVEFRONTS, CONFLICTS} <= launch.metrics.keys() for launch in launches):
        raise ValueError(f"ncu must count wavefronts and conflicts of {2 * len(cases())} launches, got {len(launches)}")
    for n, case in enumerate(cases()):
        few, many = launches[2 * n : 2 * n + 2]
        wavefronts, conflicts = (
            (many.metrics[name].base - few.metrics[name].base) / (WARPS * (MANY - FEW)) for name in (WAVEFRONTS, CONFLICTS)
        )
        beyond = case.counted.wavefronts - case.counted.free
        print(f"{case.access:12} {case.layout:10} {case.instruction:9} wavefronts {case.counted.wavefronts:3}, ncu "
              f"{wavefronts:6.2f}; conflicts {beyond:3}, ncu {conflicts:6.2f}")  # fmt: skip
        found.append(case.facts() | {"conflicts": beyond, "ncu_wavefronts": wavefronts, "ncu_conflicts": conflicts})
    return found


def main(arguments: list[str]) -> None:
    """ValueError without a GPU, and for what `counted_by_ncu` cannot do."""
    if arguments == ["--launch"]:
        return launch_all()
    if not torch.cuda.is_available():
        raise ValueError("benchmarks/banks.py needs a CUDA GPU, got a machine without one")
    by_ncu = "--counters" in arguments
    paths = [Path(argument) for argument in arguments if argument != "--counters"]
    what = "counters of" if by_ncu else "cycles of"
    report = {"what": f"bank conflicts, {what} one warp's access", **provenance(torch.device("cuda"))}
    report |= {
        "tile": TILE._asdict(),
        "points": counted_by_ncu() if by_ncu else timed(),
        "telemetry": snapshot(torch.device("cuda")),
    }
    gpu = report["device"]["name"].lower().removeprefix("nvidia ").replace(" ", "-")
    kind = "bank-counters" if by_ncu else "banks"
    target = paths[0] if paths else Path("benchmarks/results") / f"{kind}-{gpu}-{report['date'][:10]}.json"
    print(f"written: {save(target, report)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
