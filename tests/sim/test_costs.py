"""The costs of units: each has a source, and those that say they were measured are what was measured."""

import json
from pathlib import Path

import pytest

from strobe.sim.costs import MEASURED, SM80, SM90, SM100, costs_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("costs", [SM80, SM90, SM100], ids=lambda costs: f"sm_{costs.arch}")
def test_every_number_has_a_source(costs):
    assert all(cost.source for cost in costs.named().values())
    assert all(cost > 0 for name, cost in costs.named().items() if name not in ("commit_latency", "interleaving"))


def test_nothing_is_measured_on_a_gpu_that_was_not_there():
    for costs in (SM80, SM100):
        assert not [name for name, cost in costs.named().items() if MEASURED in cost.source]


def measured() -> dict[str, float]:
    """What the committed measurement says of the costs of sm_90."""
    report = json.loads((ROOT / MEASURED).read_text())
    wgmma, registers, synchronisation = report["wgmma"], report["registers"], report["synchronisation"]
    copies, memory = report["copies"], report["memory"]
    arrive = {warps: synchronisation[f"arrive, {warps} warps"]["each"] for warps in (1, 4)}
    wait = synchronisation["mbarrier round trip, 4 and 4 warps"]["each"] / 2 - arrive[4]
    small, large = (copies[f"load {size} bytes from L2, one at a time"]["each"] for size in (1024, 32768))
    from_l2 = small - (large - small) / (32768 - 1024) * 1024
    product = wgmma["64 x 128 x 128, A in shared memory"]
    return {
        "arrive": arrive[4],
        "wait": wait,
        "passing_wait": synchronisation["passing wait, 4 warps"]["each"],
        "named_barrier": synchronisation["barrier, 4 warps"]["each"],
        "fence": synchronisation["fence, 4 warps"]["each"],
        "tma_latency": from_l2 - arrive[1] - wait,
        "tma_latency_memory": copies["load 1024 bytes from memory, one at a time, all SMs"]["each"] - arrive[1] - wait,
        "tma_bytes": copies["load 16384 bytes from L2, all SMs, the same, 4 in flight"]["bytes_per_cycle"],
        "cp_async_latency": memory["global load from L2"]["each"],
        "mma_flops": product["flop_per_cycle"],
        "mma_latency": product["once"] - SM90.mma_issue,
        "reduction_latency": 2 * registers["row maxima of 64 x 64"]["each"] - registers["row maxima of 64 x 128"]["each"],
        "rate of fma": registers["fma, 8 warps"]["elements_per_cycle"],
        "rate of alu": registers["maximum, 8 warps"]["elements_per_cycle"],
        "rate of mufu": registers["exp2, 8 warps"]["elements_per_cycle"],
        "rate of shared": memory["shared memory load, 8 warps"]["bytes_per_cycle"],
    }


def test_measured_costs_are_those_of_the_measurement():
    costs, found = SM90.named(), measured()
    assert {name: found[name] for name in found} == pytest.approx({name: float(costs[name]) for name in found}, rel=0.07)


def test_products_are_bound_by_arithmetic_or_by_their_operands():
    assert SM90.mma_cycles(64, 128, 128, 2, False) == 512
    assert SM90.mma_cycles(64, 128, 128, 1, False) == 256
    assert SM100.mma_cycles(128, 128, 128, 2, False) == 512
    assert SM100.mma_cycles(128, 64, 128, 2, False) == 384  # 48 KiB of operands, 256 cycles of arithmetic
    assert SM100.mma_cycles(128, 64, 128, 2, True) == 256


def test_archs():
    assert costs_of(90) is SM90 and costs_of(103) is SM100 and costs_of(86) is SM80
    with pytest.raises(ValueError, match="not for sm_75"):
        costs_of(75)
