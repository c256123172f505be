"""Computes how many blocks of a kernel a multiprocessor runs at once, which resource limits them, and in how many waves a grid
runs.

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
from strobe.lab.bench.plan import Point

_WARP = 32
_QUARTERS = 4
"""Sub-partitions of a multiprocessor: each has its own registers and runs its own warps."""
_REGISTER_UNIT = 256
_SMEM_UNIT = 128
_MAX_THREADS, _MAX_REGISTERS = 1024, 255


@dataclass(frozen=True)
class Block:
    """What a block of a kernel needs: threads, registers of each thread at launch, bytes of shared memory (static and dynamic).
    name: that of the kernel, to be shown."""

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
    """How a block occupies an arch. ValueError for an arch whose limits are not known, and for a block that is too large for
    it."""

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
        """Registers that a block takes, its warps shared out evenly to the quarters of a multiprocessor."""
        return _round_up(self.block.warps, _QUARTERS) * self.block.registers_per_warp

    @property
    def smem_allocated(self) -> int:
        """Bytes of shared memory that a block takes, including those for the driver."""
        return _round_up(self.block.smem_bytes + self.arch.smem_reserved, _SMEM_UNIT)

    @cached_property
    def limits(self) -> dict[str, int]:
        """Resource -> how many blocks of a multiprocessor it allows. The names are Nsight Compute's: SM, registers, shared
        memory, warps. For a block without shared memory, that one is the smallest of the others."""
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
        """Bytes that the driver sets aside in a multiprocessor as shared memory."""
        needed = min(self._other_limits.values()) * self.smem_allocated
        return next((size for size in self.arch.smem_carveouts if size >= needed), self.arch.smem_carveouts[-1])

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor runs at once."""
        return min(self.limits.values())

    @property
    def binds(self) -> list[str]:
        """The resources that allow no more blocks. Shared memory is one only if its largest size allows no more: a smaller size
        was chosen because the other resources need no larger one."""
        smem = self.arch.smem_carveouts[-1] // self.smem_allocated if self.smem_allocated else self.blocks + 1
        most = self._other_limits | {"shared memory": smem}
        return [name for name in self.limits if most[name] == self.blocks]

    @property
    def warps(self) -> int:
        """Warps that a multiprocessor runs at once."""
        return self.blocks * self.block.warps

    @property
    def theoretical(self) -> float:
        """The share of the warps that a multiprocessor could hold which run at once."""
        return self.warps * _WARP / self.arch.threads_per_sm

    def waves(self, grid: int) -> Waves:
        """The waves in which a grid of so many blocks runs."""
        return Waves(grid, self.blocks * self.arch.sms)


@dataclass(frozen=True)
class Waves:
    """A grid on a GPU that runs `at_once` blocks at a time. If all blocks take equally long, these are full waves and perhaps a
    tail."""

    grid: int
    at_once: int

    @property
    def number(self) -> float:
        """How many waves there are, a part of one included: Nsight Compute's "Waves Per SM"."""
        return self.grid / self.at_once

    @property
    def full(self) -> int:
        return self.grid // self.at_once

    @property
    def tail(self) -> float:
        """The share of the GPU that the last, incomplete wave keeps busy; 0 if there is no such wave."""
        return self.grid % self.at_once / self.at_once

    @property
    def efficiency(self) -> float:
        """The share of the GPU that is busy, on average over all waves."""
        return self.number / -(-self.grid // self.at_once) if self.grid else 0.0


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


# ---- our own kernels


BACKENDS = ("sm90", "portable")
"""Backends whose forward can be compiled without its GPU, to learn what its blocks need."""


def compiled(backend: str, point: Point, arch: Arch) -> tuple[Block, int]:
    """Compiles the forward of a backend for a point. Returns what a block of it needs and how many tiles the problem has.
    ValueError with the backend's reason if it does not take the point. Takes some seconds on two CPU cores."""
    from strobe.call.dispatch import backend_module
    from strobe.kernels.sm90.config import Config as HopperConfig
    from strobe.lab.binary import offline
    from strobe.lab.model.cost import Tiling

    problem, module = point.problem(), backend_module(backend)
    reason = module.refuses(problem, arch)
    if reason is not None:
        raise ValueError(f"occupancy: {backend} {reason}")
    config = module.config(problem, arch)
    if backend == "sm90":
        found = offline.sm90_forward(problem, arch, config)[0].audit()
    else:
        asked = (point.head_dim, point.head_dim_v), problem.mask, problem.dtype, point.length
        found = offline.audit_portable_forward(*asked, arch)
    block = Block(found.threads, found.registers, found.smem_bytes, f"{backend} {point}")
    tiles = Tiling(problem, config.tile_q).tiles
    if isinstance(config, HopperConfig):
        tiles = tiles // problem.group * config.tiles_of(problem.group)
    return block, tiles


def takers(point: Point, arch: Arch) -> list[str]:
    """The backends of `BACKENDS` that take a point. ValueError with their reasons if none does."""
    from strobe.call.dispatch import backend_module

    reasons = {backend: backend_module(backend).refuses(point.problem(), arch) for backend in BACKENDS}
    taking = [backend for backend, reason in reasons.items() if reason is None]
    if not taking:
        raise ValueError("occupancy: " + "; ".join(f"{backend} {reason}" for backend, reason in reasons.items()))
    return taking


# ---- what it says


def facts(occupancies: list[tuple[Occupancy, int | None]]) -> dict:
    """The occupancies of kernels on one arch as a JSON object. Each comes with the number of blocks of its grid, or None."""
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
    """A sentence that tells what limits a kernel of `facts`."""
    blocks = f"{kernel['blocks']} block{'s' if kernel['blocks'] > 1 else ''} of an SM by its {' and '.join(kernel['binds'])}"
    waves = f"; {kernel['waves']:.2f} waves" if "waves" in kernel else ""
    tail = f", the last on {kernel['tail']:.0%} of the GPU" if kernel.get("tail") else ""
    return f"{kernel['name']}: {blocks}{waves}{tail}"


def draw(found: dict, path: Path) -> Path:
    """Writes the block limits as bars, those that bind in colour; PNG or SVG by the path's suffix."""
    from strobe.lab.bench.plot import STROBE, plt, save

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
