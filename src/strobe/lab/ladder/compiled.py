"""What the compiler makes of a rung, without a GPU: registers, shared memory, instructions of the loop, occupancy,
conflicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from strobe.device import Arch
from strobe.lab.binary.audit import parts_of
from strobe.lab.binary.offline import pretend_gpu
from strobe.lab.binary.sass import Instruction, counted, disassemble, flow_of, innermost_loops, resources_of
from strobe.lab.ladder.conflicts import Conflict, conflicts_in, worst
from strobe.lab.model.occupancy import Block, Occupancy
from strobe.ladder import Rung

SHOWN = (
    *("HGMMA", "HMMA", "FFMA", "FMUL", "FADD", "MUFU.EX2", "F2FP", "SHFL", "LDSM", "LDS", "STS", "LDG", "STG", "LDGSTS"),
    *("UTMALDG", "SYNCS", "BAR", "LDL", "STL"),
)
"""Instructions of the loop that a table shows: products, arithmetic, exponentials, then what moves data and what waits."""

KINDS = 3
"""The most kernels that a rung has; what it launches beyond that are the same again."""


@dataclass(frozen=True)
class Compiled:
    """One kernel of a rung. loop: the instructions of its main loops, of all warp roles, or of the whole text where it has no
    loop; spill_bytes: stores and loads; warnings: of ptxas; occupancy: None where the arch's limits are not known, or the
    kernel is too large."""

    name: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    threads: int
    loop: list[Instruction]
    conflicts: list[Conflict]
    occupancy: Occupancy | None
    warnings: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        return counted(instruction.name for instruction in self.loop)

    def facts(self) -> dict[str, Any]:
        """The kernel as a JSON object."""
        occupancy = self.occupancy
        return {
            "kernel": self.name,
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "smem_bytes": self.smem_bytes,
            "threads": self.threads,
            "blocks": occupancy.blocks if occupancy else None,
            "occupancy": occupancy.theoretical if occupancy else None,
            "binds": occupancy.binds if occupancy else [],
            "instructions": len(self.loop),
            "loop": self.counts,
            "conflicts": worst(self.conflicts),
            "accesses": [conflict._asdict() for conflict in self.conflicts],
        }


def compile_rung(
    rung: Rung, arch: Arch, head_dim: int, length: int = 4096, dtype: torch.dtype | None = None, tile: dict | None = None
) -> list[Compiled]:
    """Each kernel of a rung, compiled for an arch that need not be there; none of a rung without kernels of its own. dtype:
    None: float32 or bfloat16, as it takes. ValueError, before anything is compiled, for what it does not take. Takes a second
    or two a kernel."""
    dtype = dtype or (torch.float32 if rung.takes_fp32 else torch.bfloat16)
    reason = rung.refuses(length, head_dim, dtype, arch.capability)
    if rung.least and reason is not None:
        raise ValueError(reason)
    if not hasattr(rung.module, "launches"):
        return []
    q = torch.empty(16, length, head_dim, dtype=dtype, device="meta")
    found = {}
    for launch in rung.launches(q, q, q, q, **(tile or rung.tiles(head_dim)[0]))[:KINDS]:
        name = launch.kernel.fn.__name__
        if name not in found:  # a launch of the same kernel in another mode, such as a redo, does not count
            with pretend_gpu(arch.capability):
                compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
            found[name] = _compiled(name, compiled, arch)
    return list(found.values())


def _compiled(name: str, compiled, arch: Arch) -> Compiled:
    resources = resources_of(compiled)
    threads = compiled.metadata.num_warps * compiled.metadata.target.warp_size
    try:
        occupancy = Occupancy(arch, Block(threads, resources.registers, resources.smem_bytes, name))
    except ValueError:
        occupancy = None
    loop = [instruction for part in _loops(compiled.asm["cubin"]) for instruction in part if not _dummy(instruction)]
    return Compiled(
        name, resources.registers, resources.spill_bytes, resources.smem_bytes, threads, loop,
        conflicts_in(compiled.asm["ttgir"]), occupancy, resources.warnings,
    )  # fmt: skip


def _loops(cubin: bytes) -> list[list[Instruction]]:
    """The main loop of each kind of warp role, of consumers that are alike the first; of a kernel without tensor cores its
    innermost loop with multiply-adds, or all of it."""
    flow = flow_of(disassemble(cubin))
    loops = [part.loop for part in parts_of(flow) if part.loop]
    products = [loop for loop in loops if any(instruction.name in ("HMMA", "HGMMA") for instruction in loop)]
    if products:
        return [products[0], *(loop for loop in loops if loop not in products)]
    everything = set(range(len(flow.blocks)))
    found = innermost_loops(flow, everything, ("FFMA", "MUFU.EX2"))
    largest = max(found, key=lambda loop: len(loop), default=everything)
    return [flow.instructions(largest)]


def _dummy(instruction: Instruction) -> bool:
    """Whether it is one of the assembler's own loads into nothing, which order cp.async."""
    return instruction.name == "LDS" and instruction.operands.strip().startswith("RZ,")


def of_rung(kernels: list[Compiled]) -> dict[str, Any] | None:
    """One object for all kernels of a rung: the largest of what they take, the sum of their instructions. None without
    kernels."""
    if not kernels:
        return None
    facts = [kernel.facts() for kernel in kernels]
    tightest = min(facts, key=lambda one: one["blocks"] or 0)
    loop: dict[str, int] = {}
    for one in facts:
        for name, times in one["loop"].items():
            loop[name] = loop.get(name, 0) + times
    most = {
        name: max(one[name] for one in facts) for name in ("registers", "smem_bytes", "spill_bytes", "conflicts", "threads")
    }
    return (
        most
        | {name: tightest[name] for name in ("blocks", "occupancy", "binds")}
        | {
            "kernels": len(facts),
            "instructions": sum(one["instructions"] for one in facts),
            "loop": dict(sorted(loop.items(), key=lambda entry: -entry[1])),
            "accesses": [access for one in facts for access in one["accesses"]],
            "warnings": [warning for one in kernels for warning in one.warnings],
        }
    )
