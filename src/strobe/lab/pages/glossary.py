"""What machine instructions do, since when, and what they cost.

What an instruction does and the oldest generation that has it: NVIDIA's CUDA Binary Utilities, "Instruction Set Reference",
and the PTX instruction that the compiler makes it of. Costs are cycles of one multiprocessor's unit for one warp's
instruction, from the sources named; an instruction without a cost has none that was published or measured here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from strobe.sim.costs import FA4, GUIDE, SM80, SM90, SM100


class Entry(NamedTuple):
    """group: what it belongs to; meaning; since: the oldest compute capability of which this holds; cost, with its source."""

    group: str
    meaning: str
    since: str
    cost: str = ""


def _per_warp(rate: float) -> str:
    """Cycles of one warp's 32 lanes at a rate of lanes a cycle."""
    return f"{32 / rate:g} cycle{'s' * (rate != 32)}"


_SHARED = "CUDA C++ Programming Guide, shared memory: 32 banks of 4 bytes a cycle"
_WAVEFRONT = f"1 cycle for each wavefront, 128 bytes if free of conflicts ({_SHARED})"

GLOSSARY: dict[str, Entry] = {
    "HMMA": Entry(
        "tensor cores",
        "mma.sync: one warp's product of 16-bit operands in registers",
        "sm_70",
        f"16x8x16: {2 * 16 * 8 * 16 / SM80.mma_flops:g} cycles on sm_80 ({SM80.mma_flops.source})",
    ),
    "QMMA": Entry("tensor cores", "mma.sync of 8-bit floats in registers", "sm_89"),
    "OMMA": Entry("tensor cores", "mma.sync of 4-bit floats with block scales in registers", "sm_120"),
    "IMMA": Entry("tensor cores", "mma.sync of integers in registers", "sm_72"),
    "DMMA": Entry("tensor cores", "mma.sync of float64 in registers", "sm_80"),
    "HGMMA": Entry(
        "tensor cores",
        "wgmma: an asynchronous product of four warps, B (and A) read from shared memory",
        "sm_90a",
        f"64xNx16: N/{SM90.mma_flops / (2 * 64 * 16):g} cycles ({SM90.mma_flops.source})",
    ),
    "QGMMA": Entry(
        "tensor cores", "wgmma of 8-bit floats", "sm_90a", "64xNx32: N/2 cycles (H100 data sheet: twice the 16-bit rate)"
    ),
    "IGMMA": Entry("tensor cores", "wgmma of integers", "sm_90a"),
    "UTCHMMA": Entry(
        "tensor cores",
        "tcgen05.mma of 16-bit operands: one thread starts it, the result is in tensor memory",
        "sm_100a",
        f"128xNx16: N/{SM100.mma_flops / (2 * 128 * 16):g} cycles ({SM100.mma_flops.source})",
    ),
    "UTCQMMA": Entry("tensor cores", "tcgen05.mma of 8-bit floats", "sm_100a"),
    "UTCIMMA": Entry("tensor cores", "tcgen05.mma of integers", "sm_100a"),
    "UTCOMMA": Entry("tensor cores", "tcgen05.mma of 4-bit floats with block scales", "sm_100a"),
    "WARPGROUP": Entry(
        "tensor cores", "wgmma.fence (ARRIVE) and wait_group (DEPBAR); as many as products: they run one by one", "sm_90a"
    ),
    "UTMALDG": Entry(
        "TMA",
        "cp.async.bulk.tensor: one thread has a tile copied to shared memory; the unit computes addresses and swizzles",
        "sm_90",
        f"{SM90.tma_latency:g} cycles until a small one from L2 is there ({SM90.tma_latency.source})",
    ),
    "UTMASTG": Entry("TMA", "cp.async.bulk.tensor: a tile of shared memory copied to global memory", "sm_90"),
    "UTMAREDG": Entry("TMA", "cp.reduce.async.bulk.tensor: a tile of shared memory added to global memory", "sm_90"),
    "UBLKCP": Entry("TMA", "cp.async.bulk: contiguous bytes copied, without a tensor map", "sm_90"),
    "LDGSTS": Entry(
        "global memory",
        "cp.async: global to shared memory past the registers; the threads compute the addresses",
        "sm_80",
    ),
    "LDG": Entry(
        "global memory",
        "load to registers; .128 is 16 bytes a lane, without a width 4",
        "all",
        f"{SM90.cp_async_latency:g} cycles from L2 on sm_90 ({SM90.cp_async_latency.source.split(';')[0]})",
    ),
    "STG": Entry("global memory", "store from registers", "all"),
    "ATOMG": Entry("global memory", "atomic operation that returns the old value", "all"),
    "RED": Entry("global memory", "atomic operation without a result", "all"),
    "LDS": Entry("shared memory", "load to registers", "all", _WAVEFRONT),
    "STS": Entry("shared memory", "store from registers", "all", _WAVEFRONT),
    "LDSM": Entry(
        "shared memory",
        "ldmatrix: 8x8 tiles of 16-bit numbers, in the layout of mma.sync's operands (MT: transposed)",
        "sm_75",
        f"1 cycle a tile if its 8 rows of 16 bytes fall in different banks ({_SHARED})",
    ),
    "STSM": Entry("shared memory", "stmatrix: the way back of ldmatrix", "sm_90", "as LDSM"),
    "LDTM": Entry(
        "tensor memory",
        "tcgen05.ld: lanes and columns of tensor memory to registers",
        "sm_100a",
        f"{SM100.rate('tmem_load'):g} bytes a cycle (assumed: {SM100.rates['tmem_load'].source})",
    ),
    "STTM": Entry(
        "tensor memory",
        "tcgen05.st: registers to tensor memory",
        "sm_100a",
        f"{SM100.rate('tmem_store'):g} bytes a cycle (assumed: {SM100.rates['tmem_store'].source})",
    ),
    "MUFU.EX2": Entry(
        "arithmetic",
        "exp2 on the special-function unit",
        "all",
        f"{_per_warp(SM90.rate('mufu'))} ({SM90.rates['mufu'].source}; sm_100: {FA4})",
    ),
    "FFMA": Entry(
        "arithmetic",
        "float32 multiply-add",
        "all",
        f"{_per_warp(SM90.rate('fma'))} on sm_90, {_per_warp(SM80.rate('fma'))} on sm_80 ({GUIDE})",
    ),
    "FADD": Entry("arithmetic", "float32 sum: the rows' sums", "all", f"as FFMA ({GUIDE})"),
    "FMUL": Entry("arithmetic", "float32 product: scaling, rescaling O", "all", f"as FFMA ({GUIDE})"),
    "FMNMX": Entry("arithmetic", "float32 minimum or maximum: the rows' maxima", "all"),
    "FFMA2": Entry("arithmetic", "two float32 multiply-adds: saves issue slots, not time of the unit", "sm_100"),
    "F2FP": Entry(
        "arithmetic", "two float32 rounded and packed", "sm_80", f"0.5 cycles on sm_90 ({SM90.rates['convert'].source})"
    ),
    "SHFL": Entry("between lanes", "shuffle: a row's lanes exchange maxima and sums", "all", f"{_per_warp(32)} ({GUIDE})"),
    "BAR": Entry(
        "waiting",
        "barrier of a CTA, or of some of its warps (bar.sync, bar.arrive)",
        "all",
        f"{SM90.named_barrier:g} cycles for 4 warps on sm_90 ({SM90.named_barrier.source})",
    ),
    "SYNCS": Entry(
        "waiting",
        "mbarrier: arrivals, expected bytes, and the test of a phase",
        "sm_90",
        f"{SM90.arrive:g} cycles an arrival ({SM90.arrive.source})",
    ),
    "ACQBULK": Entry("waiting", "griddepcontrol.wait: for the launches ahead, and what they wrote", "sm_90"),
    "PREEXIT": Entry("waiting", "griddepcontrol.launch_dependents: the next launch may begin", "sm_90"),
    "DEPBAR": Entry("waiting", "waits until few enough groups of cp.async, or other scoreboards, are open", "all"),
    "LDGDEPBAR": Entry("waiting", "cp.async.commit_group", "sm_80"),
    "UTCBAR": Entry("waiting", "tcgen05.commit: products arrive at an mbarrier when they are done", "sm_100a"),
    "LDL": Entry("spills", "load from local memory, which is cached global memory: a spilled register, or an array", "all"),
    "STL": Entry("spills", "store to local memory", "all"),
}
"""By name as in `sass.Instruction.name`, in the order in which tables show them."""


def explained(names: Iterable[str]) -> dict[str, Entry]:
    """The entries of the names that are in the glossary, in its order."""
    occurring = set(names)
    return {name: entry for name, entry in GLOSSARY.items() if name in occurring}
