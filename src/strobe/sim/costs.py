"""Costs of the units of a multiprocessor, in cycles of its clock, for each arch; and where each number comes from.

Numbers for sm_90 were measured (`benchmarks/unit_costs.py`) wherever a kernel can. sm_100 has its rates from
NVIDIA and from papers; what nobody has published is taken over from sm_90, and marked as assumed. So are the latencies
of sm_80.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

MEASURED = "benchmarks/results/unit-costs-h200-2026-11-21.json"
GUIDE = "CUDA C++ Programming Guide, throughput of native arithmetic instructions"
FA4 = "Zadouri et al., FlashAttention-4 (arXiv 2603.05451)"
B200_CHAINS = "AndreSlavescu/flashinfer-competition, microbenchmarks/utcmma: dependent tcgen05.mma on a B200"

B300_CHAINS = "256 dependent instructions run at 16.4 TFLOP/s an SM on a B300 (Antoniomv7/gb300-microbench), the full rate"


class Cost(float):
    """A number that knows its source. assumed: neither measured here nor published for this arch; `source` says what for."""

    source: str
    assumed: bool

    def __new__(cls, value: float, source: str, assumed: bool = False) -> Cost:
        cost = super().__new__(cls, value)
        cost.source, cost.assumed = source, assumed
        return cost

    def __str__(self) -> str:
        return f"{float(self):g} ({'assumed: ' if self.assumed else ''}{self.source})"


@dataclass(frozen=True)
class Costs:
    """The costs of one arch. Times are in cycles, of a partition's own time unless said otherwise.

    arrive: an arrival at an mbarrier; wait: from a barrier's completion until a waiter goes on; passing_wait: a wait at a
    barrier that is complete already; named_barrier: bar.sync of 4 warps once the last is there; fence: of the async proxy.
    tma_issue: of one copy; tma_latency: from issue to completion of a small copy from L2, tma_latency_memory: from memory
    while all SMs load; tma_bytes: bytes a cycle and SM. cp_async_latency: from issue to completion of cp.async.
    mma_flops: FLOP a cycle with 2-byte operands; mma_issue: of one product; mma_latency: what a product takes beyond its
    mma_cycles (wgmma: until its wait is over; tcgen05: until the next may begin on the same accumulator); commit_latency: from
    a product's end to the arrival that tcgen05.commit makes; operand_bytes: of shared memory a cycle, for the operands that are
    read there.
    register_latency: of a dependent register operation; reduction_latency: what a reduction takes beyond the work
    of its pipe, as its steps wait for each other. interleaving: how much of the time that an
    operation keeps its pipe the compiler fills with later operations of the same warps: 0 none, 1 all.
    rates: work a cycle, by pipe: elements of "fma", "fma2" (packed pairs), "alu" (integers, compare, maximum, select),
    "convert" (float32 to 16 bits), "mufu", "shuffle", "global" and "cp_async", multiply-adds of "mma" (mma.sync), bytes of
    "shared", "tmem_load" and "tmem_store".
    """

    arch: int
    arrive: Cost
    wait: Cost
    passing_wait: Cost
    named_barrier: Cost
    fence: Cost
    tma_issue: Cost
    tma_latency: Cost
    tma_latency_memory: Cost
    tma_bytes: Cost
    cp_async_latency: Cost
    mma_flops: Cost
    mma_issue: Cost
    mma_latency: Cost
    commit_latency: Cost
    operand_bytes: Cost
    register_latency: Cost
    reduction_latency: Cost
    interleaving: Cost
    rates: Mapping[str, Cost]

    def rate(self, pipe: str) -> float:
        return self.rates[pipe]

    def unit(self, pipe: str) -> str:
        """The unit that a pipe's work occupies: packed pairs run where single ones do, conversions with the integers."""
        return {"fma2": "fma", "convert": "alu"}.get(pipe, pipe)

    def per_instruction(self, pipe: str) -> int:
        """Elements of a thread that one instruction takes, of memories bytes."""
        return {"fma2": 2, "convert": 2, "shared": 16, "tmem_load": 128, "tmem_store": 128}.get(pipe, 1)

    def mma_cycles(self, m: int, n: int, k: int, element_size: int, a_is_near: bool) -> float:
        """Cycles of a product [m, k] @ [k, n] on the tensor core of one SM. a_is_near: A is in registers or tensor memory.

        They are the larger of its arithmetic, whose rate halves as the elements double, and of reading its operands from
        shared memory: 64 x 64 x 64 on sm_90 is bound by both (measured: 4100 FLOP a cycle).
        """
        arithmetic = 2 * m * n * k / self.mma_flops * element_size / 2
        operands = (n * k + (0 if a_is_near else m * k)) * element_size
        return max(arithmetic, operands / self.operand_bytes)

    def named(self) -> dict[str, Cost]:
        """Every number by its name, rates as "rate of <pipe>"."""
        single = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("arch", "rates")}
        return single | {f"rate of {pipe}": cost for pipe, cost in self.rates.items()}


SM90 = Costs(
    arch=90,
    arrive=Cost(42, f"{MEASURED}: arrive, 4 warps"),
    wait=Cost(30, f"{MEASURED}: half of a round trip of 4 and 4 warps, less an arrival"),
    passing_wait=Cost(83, f"{MEASURED}: passing wait, 4 warps, with the barrier that the compiler puts before it"),
    named_barrier=Cost(22, f"{MEASURED}: barrier, 4 warps"),
    fence=Cost(15, f"{MEASURED}: fence, 4 warps"),
    tma_issue=Cost(20, "one elected thread, a few instructions", assumed=True),
    tma_latency=Cost(285, f"{MEASURED}: line through loads from L2, one at a time, less the arrival and the wait of one warp"),
    tma_latency_memory=Cost(860, f"{MEASURED}: load 1024 bytes from memory, less the arrival and the wait of one warp"),
    tma_bytes=Cost(72, f"{MEASURED}: from L2, all SMs, the same; one SM alone: 106; from memory: 15"),
    cp_async_latency=Cost(284, f"{MEASURED}: global load from L2; cp.async itself was not measured", assumed=True),
    mma_flops=Cost(4096, f"{MEASURED}: 64 x 128 x 128; H100 architecture white paper"),
    mma_issue=Cost(15, "of the 75 cycles that a product takes beyond its arithmetic", assumed=True),
    mma_latency=Cost(60, f"{MEASURED}: 75 once for A in shared memory, less mma_issue; A in registers: 90 to 117"),
    commit_latency=Cost(0, "sm_90 has no tcgen05.commit"),
    operand_bytes=Cost(128, f"{MEASURED}: 64 x 64 x 64 at full rate reads 16 KiB in 128 cycles"),
    register_latency=Cost(4, "Jia et al., Dissecting the Volta architecture (arXiv 1804.06826): dependent issue", assumed=True),
    reduction_latency=Cost(73, f"{MEASURED}: row maxima of 64 x 64 and 64 x 128: 201 and 329 cycles, in a line"),
    interleaving=Cost(0, "with none the periods of the Hopper forward already come out too short", assumed=True),
    rates=MappingProxyType(
        {
            "fma": Cost(128, f"{GUIDE}; {MEASURED}: 120 with a loop around it"),
            "fma2": Cost(128, "sm_90 has no packed instruction: two single ones"),
            "alu": Cost(64, f"{MEASURED}: maximum; {GUIDE}"),
            "convert": Cost(128, f"{MEASURED}: convert to bf16, packed in pairs"),
            "mufu": Cost(16, f"{MEASURED}: exp2; {GUIDE}"),
            "shuffle": Cost(32, GUIDE),
            "mma": Cost(1024, "half the rate of wgmma", assumed=True),
            "shared": Cost(128, f"{MEASURED}: 118 to 128; {GUIDE}: 32 banks of 4 bytes"),
            "global": Cost(32, "one warp's addresses a cycle", assumed=True),
            "cp_async": Cost(128, "an element of each lane of four warps", assumed=True),
        }
    ),
)


def _carried(costs: Costs, arch: int) -> Costs:
    """The same numbers for another arch, all of them assumed."""

    def carry(cost: Cost) -> Cost:
        return Cost(cost, f"as on sm_{costs.arch}", assumed=True)

    single = {name: carry(cost) for name, cost in costs.named().items() if not name.startswith("rate of ")}
    rates = {pipe: carry(cost) for pipe, cost in costs.rates.items()}
    return replace(costs, arch=arch, rates=MappingProxyType(rates), **single)


def _with_rates(costs: Costs, rates: dict[str, Cost]) -> Mapping[str, Cost]:
    return MappingProxyType({**costs.rates, **rates})


_SM80 = _carried(SM90, 80)
SM80 = replace(
    _SM80,
    mma_flops=Cost(2048, "A100 data sheet: 312 TFLOP/s on 108 SMs at 1.41 GHz"),
    rates=_with_rates(
        _SM80,
        {
            "fma": Cost(64, f"{GUIDE}; A100 data sheet: 19.5 TFLOP/s on 108 SMs at 1.41 GHz"),
            "fma2": Cost(64, "sm_80 has no packed instruction: two single ones"),
            "alu": Cost(64, GUIDE),
            "mufu": Cost(16, GUIDE),
            "shuffle": Cost(32, GUIDE),
            "mma": Cost(1024, "A100 data sheet: 312 TFLOP/s on 108 SMs at 1.41 GHz, a multiply-add is two"),
            "shared": Cost(128, f"{GUIDE}: 32 banks of 4 bytes"),
        },
    ),
)

_SM100 = _carried(SM90, 100)
SM100 = replace(
    _SM100,
    mma_flops=Cost(8192, f"HGX B200 data sheet: 2250 TFLOP/s on 148 SMs at 1.85 GHz; {FA4}"),
    mma_latency=Cost(10, f"{B200_CHAINS}: 128 x 128 x 16 in 74 cycles, 64 of arithmetic. Once a product: {B300_CHAINS}"),
    commit_latency=Cost(22, f"{B200_CHAINS}: commit and wait take 52 cycles, less `wait`"),
    operand_bytes=Cost(128, f"{FA4}: shared memory, 128 bytes a cycle"),
    rates=_with_rates(
        _SM100,
        {
            "fma": Cost(128, GUIDE),
            "fma2": Cost(128, "HGX B200 data sheet: 75 TFLOP/s of float32: a pair saves instructions, no time of the unit"),
            "alu": Cost(64, GUIDE),
            "mufu": Cost(16, FA4),
            "shuffle": Cost(32, GUIDE),
            "shared": Cost(128, FA4),
            "tmem_load": Cost(512, "128 lanes of 4 bytes a cycle", assumed=True),
            "tmem_store": Cost(256, "half of loads, as the ratio in Jarmusch et al. (arXiv 2512.02189)", assumed=True),
        },
    ),
)


def costs_of(arch: int) -> Costs:
    """The Costs of a compute capability (10 * major + minor). ValueError for an arch that has none."""
    for costs in (SM80, SM90, SM100):
        if arch // 10 == costs.arch // 10:
            return costs
    raise ValueError(f"costs are known for sm_80, sm_90 and sm_100, not for sm_{arch}")
