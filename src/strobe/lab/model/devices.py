"""`strobe devices`: what each GPU that `strobe.device` knows has, by compute capability."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.table import Table

from strobe.device import KIB, KNOWN, MIB, Arch

REGISTERS_PER_THREAD, WARP = 255, 32
"""The most registers of a thread, and the threads of a warp, on all of them (Programming Guide)."""


def facts() -> dict[str, Any]:
    """All known GPUs as a JSON object, in the order of their compute capability. Sizes in bytes, rates per second, clocks in
    Hz."""
    return {"what": "devices", "devices": [_of(arch) for arch in sorted(KNOWN.values(), key=lambda arch: arch.capability)]}


def _of(arch: Arch) -> dict[str, Any]:
    return {
        "name": arch.name,
        "capability": f"{arch.capability // 10}.{arch.capability % 10}",
        "sms": arch.sms,
        "clock": arch.clock,
        "smem_per_block": arch.smem_per_block,
        "smem_per_sm": arch.smem_per_sm,
        "registers_per_thread": REGISTERS_PER_THREAD,
        "registers_per_sm": arch.registers_per_sm,
        "warps_per_sm": arch.threads_per_sm // WARP,
        "blocks_per_sm": arch.blocks_per_sm,
        "tmem_columns": arch.tmem_columns,
        "l2_bytes": arch.l2_bytes,
        "tensor_flops": arch.tensor_flops,
        "fp32_flops": arch.fp32_flops,
        "exp2_rate": arch.exp2_rate,
        "dram_bandwidth": arch.dram_bandwidth,
        "source": arch.source,
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """`facts` as two tables that fit 80 columns, a line for each GPU: what a multiprocessor has, and how fast the GPU is."""
    holds = {
        "": lambda one: one["name"],
        "capability": lambda one: one["capability"],
        "KiB a block": lambda one: f"{one['smem_per_block'] // KIB}",
        "KiB": lambda one: f"{one['smem_per_sm'] // KIB}",
        "registers": lambda one: f"{one['registers_per_sm']}",
        "warps": lambda one: str(one["warps_per_sm"]),
        "blocks": lambda one: str(one["blocks_per_sm"]),
    }
    rates = {
        "": lambda one: one["name"],
        "SMs": lambda one: str(one["sms"]),
        "MHz": lambda one: f"{one['clock'] / 1e6:.0f}",
        "16-bit": lambda one: f"{one['tensor_flops'] / 1e12:g}",
        "FP32": lambda one: f"{one['fp32_flops'] / 1e12:g}",
        "exp2 T/s": lambda one: f"{one['exp2_rate'] / 1e12:.3g}",
        "L2 MiB": lambda one: f"{one['l2_bytes'] / MIB:g}",
        "GB/s": lambda one: f"{one['dram_bandwidth'] / 1e9:.0f}",
    }
    return [
        _table(f"Of a multiprocessor: shared memory, at most {REGISTERS_PER_THREAD} registers a thread", holds, found),
        _table("Of the GPU by its data sheet: TFLOP/s (dense), exponentials, memory", rates, found),
    ]


def _table(title: str, columns: dict[str, Callable[[dict[str, Any]], str]], found: dict[str, Any]) -> Table:
    shown = Table(title=title, title_justify="left")
    for name in columns:
        shown.add_column(name, justify="right" if name else "left", no_wrap=True)
    for one in found["devices"]:
        shown.add_row(*(cell(one) for cell in columns.values()))
    return shown
