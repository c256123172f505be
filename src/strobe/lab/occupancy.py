"""How many blocks of a kernel a multiprocessor runs at once, which resource says so, and how a grid then comes in waves.

The arithmetic is that of CUDA's own calculator (cuda_occupancy.h) and of Nsight Compute's occupancy section: registers are
given to warps in units of 256, within each quarter of a multiprocessor; shared memory to blocks in units of 128 bytes, with
1 KiB more for the driver from sm_80 on; and of the sizes that shared memory can be set to, the driver takes the smallest that
holds the blocks that the other resources allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.table import Table

from strobe.device import KIB, Arch
from strobe.lab.plan import Point

_WARP = 32
_QUARTERS = 4
"""Sub-partitions of a multiprocessor: each has its own registers and runs its own warps."""
_REGISTER_UNIT = 256
_SMEM_UNIT = 128
_MAX_THREADS, _MAX_REGISTERS = 1024, 255


@dataclass(frozen=True)
class Block:
    """What a block of a kernel takes: threads, registers of each thread at launch, bytes of shared memory (static and
    dynamic). name: of the kernel, to be shown."""

    threads: int
    registers: int
    smem_bytes: int
    name: str = "kernel"

    @property
    def warps(self) -> int:
        return -(-self.threads // _WARP)

    @property
    def registers_per_warp(self) -> int:
        return _round_up(self.registers * _WARP, _REGISTER_UNIT)


@dataclass(frozen=True)
class Occupancy:
    """A block on an arch. ValueError for an arch whose limits are not known, and for a block that it does not take."""

    arch: Arch
    block: Block

    def __post_init__(self):
        arch, block = self.arch, self.block
        if not (arch.blocks_per_sm and arch.smem_carveouts):
            raise ValueError(f"occupancy: the limits of {arch} are not known")
        limits = {
            "threads": (block.threads, 1, _MAX_THREADS),
            "registers": (block.registers, 1, _MAX_REGISTERS),
            "bytes of shared memory": (block.smem_bytes, 0, arch.smem_per_block),
            "registers of all threads": (self._registers, 1, arch.registers_per_sm),
        }
        for name, (value, least, most) in limits.items():
            if not least <= value <= most:
                raise ValueError(f"occupancy: a block on {arch} must have {least} to {most} {name}, got {value}")

    @property
    def _registers(self) -> int:
        """Of a block whose warps are shared out evenly to the quarters."""
        return _round_up(self.block.warps, _QUARTERS) * self.block.registers_per_warp

    @property
    def smem_allocated(self) -> int:
        """Bytes that a block takes, with the driver's."""
        return _round_up(self.block.smem_bytes + self.arch.smem_reserved, _SMEM_UNIT)

    @cached_property
    def limits(self) -> dict[str, int]:
        """Blocks of a multiprocessor that each resource allows, as Nsight Compute names them: SM, registers, shared memory,
        warps. Without any shared memory the third is what the second smallest is."""
        others = self._other_limits
        smem = self.smem_carveout // self.smem_allocated if self.smem_allocated else min(others.values())
        return {"SM": others["SM"], "registers": others["registers"], "shared memory": smem, "warps": others["warps"]}

    @property
    def _other_limits(self) -> dict[str, int]:
        arch, block = self.arch, self.block
        warps_by_registers = arch.registers_per_sm // _QUARTERS // block.registers_per_warp * _QUARTERS
        return {
            "SM": arch.blocks_per_sm,
            "registers": warps_by_registers // block.warps,
            "warps": arch.threads_per_sm // _WARP // block.warps,
        }

    @property
    def smem_carveout(self) -> int:
        """Bytes that the driver sets aside as shared memory of a multiprocessor."""
        needed = min(self._other_limits.values()) * self.smem_allocated
        return next((size for size in self.arch.smem_carveouts if size >= needed), self.arch.smem_carveouts[-1])

    @property
    def blocks(self) -> int:
        """Of a multiprocessor at once."""
        return min(self.limits.values())

    @property
    def binds(self) -> list[str]:
        """The resources that allow no more. Shared memory only where its largest size allows no more: a smaller one was
        chosen because of the others."""
        smem = self.arch.smem_carveouts[-1] // self.smem_allocated if self.smem_allocated else self.blocks + 1
        most = self._other_limits | {"shared memory": smem}
        return [name for name in self.limits if most[name] == self.blocks]

    @property
    def warps(self) -> int:
        """Of a multiprocessor at once."""
        return self.blocks * self.block.warps

    @property
    def theoretical(self) -> float:
        """The share of the warps that a multiprocessor can hold."""
        return self.warps * _WARP / self.arch.threads_per_sm

    def waves(self, grid: int) -> Waves:
        """How a grid of so many blocks runs."""
        return Waves(grid, self.blocks * self.arch.sms)


@dataclass(frozen=True)
class Waves:
    """A grid on a GPU that runs `at_once` blocks: if all take as long, it runs in full waves and perhaps a tail."""

    grid: int
    at_once: int

    @property
    def number(self) -> float:
        """Nsight Compute's "Waves Per SM"."""
        return self.grid / self.at_once

    @property
    def full(self) -> int:
        return self.grid // self.at_once

    @property
    def tail(self) -> float:
        """The share of the GPU that the last, incomplete wave keeps busy; 0: there is none."""
        return self.grid % self.at_once / self.at_once

    @property
    def efficiency(self) -> float:
        """The share of the GPU that is busy over all waves."""
        return self.number / -(-self.grid // self.at_once) if self.grid else 0.0


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


# ---- our own kernels


BACKENDS = ("sm90", "portable")
"""Backends whose forward can be compiled for its numbers, without its GPU."""


def compiled(backend: str, point: Point, arch: Arch) -> tuple[Block, int]:
    """What the compiler says that the forward of a backend takes at a point, and how many tiles it then has. ValueError with
    the backend's reason for what it does not take. Seconds on two CPU cores."""
    from strobe.dispatch import backend_module
    from strobe.lab import offline
    from strobe.lab.cost import Tiling

    problem, module = point.problem(), backend_module(backend)
    reason = module.refuses(problem, arch)
    if reason is not None:
        raise ValueError(f"occupancy: {backend} {reason}")
    asked = ((point.head_dim, point.head_dim_v), problem.mask, problem.dtype, point.length)
    if backend == "sm90":
        found = offline.audit_sm90_forward(*asked, config=module.config(problem, arch))
    else:
        found = offline.audit_portable_forward(*asked, arch)
    block = Block(found.threads, found.registers, found.smem_bytes, f"{backend} {point}")
    return block, Tiling(problem, module.config(problem, arch).tile_q).tiles


def takers(point: Point, arch: Arch) -> list[str]:
    """Those of BACKENDS that take a point. ValueError with their reasons if none does."""
    from strobe.dispatch import backend_module

    reasons = {backend: backend_module(backend).refuses(point.problem(), arch) for backend in BACKENDS}
    taking = [backend for backend, reason in reasons.items() if reason is None]
    if not taking:
        raise ValueError("occupancy: " + "; ".join(f"{backend} {reason}" for backend, reason in reasons.items()))
    return taking


# ---- what it says


def facts(occupancies: list[tuple[Occupancy, int | None]]) -> dict:
    """Of blocks on one arch, each with the blocks (tiles) of its grid or None, as a JSON object."""
    return {
        "what": "occupancy",
        "arch": str(occupancies[0][0].arch),
        "sms": occupancies[0][0].arch.sms,
        "warps_per_sm": occupancies[0][0].arch.threads_per_sm // _WARP,
        "kernels": [_of_kernel(found, grid) for found, grid in occupancies],
    }


def _of_kernel(found: Occupancy, grid: int | None) -> dict:
    kernel = {
        "name": found.block.name,
        "threads": found.block.threads,
        "registers": found.block.registers,
        "smem_bytes": found.block.smem_bytes,
        "limits": found.limits,
        "binds": found.binds,
        "smem_carveout": found.smem_carveout,
        "blocks": found.blocks,
        "warps": found.warps,
        "theoretical": found.theoretical,
    }
    if grid is None:
        return kernel
    waves = found.waves(grid)
    return kernel | {
        "grid": grid,
        "waves": waves.number,
        "full_waves": waves.full,
        "tail": waves.tail,
        "efficiency": waves.efficiency,
    }


def table(found: dict) -> Table:
    """`facts` as a table, a column for each kernel."""
    shown = Table(title=f"{found['arch']}, {found['sms']} SMs of {found['warps_per_sm']} warps")
    shown.add_column("", no_wrap=True)
    for kernel in found["kernels"]:
        shown.add_column(kernel["name"], justify="right")

    def row(label: str, cell) -> None:
        shown.add_row(label, *(cell(kernel) for kernel in found["kernels"]))

    for name in ("threads", "registers", "smem_bytes"):
        row({"smem_bytes": "bytes of shared memory"}.get(name, name), lambda kernel, name=name: str(kernel[name]))
    shown.add_section()
    for name in found["kernels"][0]["limits"]:
        row(f"block limit {name}", lambda kernel, name=name: _limit(kernel, name))
    shown.add_section()
    row("active warps", lambda kernel: str(kernel["warps"]))
    row("theoretical occupancy", lambda kernel: f"{kernel['theoretical']:.2%}")
    row("KiB of shared memory set up", lambda kernel: f"{kernel['smem_carveout'] / KIB:g}")
    if "grid" in found["kernels"][0]:
        row("grid", lambda kernel: str(kernel["grid"]))
        row("waves", lambda kernel: f"{kernel['waves']:.2f}")
        row("busy over all waves", lambda kernel: f"{kernel['efficiency']:.0%}")
    return shown


def _limit(kernel: dict, name: str) -> str:
    return f"{kernel['limits'][name]}{' <' if name in kernel['binds'] else '  '}"


def sentence(kernel: dict) -> str:
    """What limits a kernel of `facts`."""
    blocks = f"{kernel['blocks']} block{'s' if kernel['blocks'] > 1 else ''} of an SM by its {' and '.join(kernel['binds'])}"
    waves = f"; {kernel['waves']:.2f} waves" if "waves" in kernel else ""
    tail = f", the last on {kernel['tail']:.0%} of the GPU" if kernel.get("tail") else ""
    return f"{kernel['name']}: {blocks}{waves}{tail}"


def draw(found: dict, path: Path) -> Path:
    """Writes the block limits as bars, those that bind in colour; PNG or SVG by the path's suffix."""
    from strobe.lab.plot import STROBE, plt, save

    kernels = found["kernels"]
    figure, panels = plt.subplots(1, len(kernels), figsize=(0.8 + 3.4 * len(kernels), 2.6), squeeze=False)
    for panel, kernel in zip(panels[0], kernels, strict=True):
        names = list(kernel["limits"])
        colors = [STROBE if name in kernel["binds"] else "#BBBBBB" for name in names]
        bars = panel.barh(names, list(kernel["limits"].values()), color=colors)
        panel.bar_label(bars, padding=3, fontsize=8)
        panel.set_title(f"{kernel['name']}\n{kernel['warps']} warps, {kernel['theoretical']:.1%}", fontsize=9)
        panel.set_xlabel("blocks of an SM", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Block limits, {found['arch']}", fontsize=10)
    figure.tight_layout()
    return save(figure, path, dpi=110)
