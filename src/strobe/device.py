"""Arch: the facts of a GPU that kernels, the cost model and dispatch reason with.

Figures are NVIDIA's own: peak rates and memory from the data sheet or architecture white paper named in `source`,
shared memory, registers, blocks and tensor memory per multiprocessor from the CUDA C++ Programming Guide ("Technical
Specifications per Compute Capability"; "Shared Memory" of each capability). Rates are dense (no sparsity), with float32
accumulation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Arch:
    """One kind of device. Sizes in bytes, rates per second, clocks in Hz; capability is 10 * major + minor, 0: a CPU."""

    name: str
    capability: int
    sms: int = 0
    clock: float = 0.0
    """Boost clock, the one that the peak rates are quoted at."""
    tensor_flops: float = 0.0
    """fp16 (and, from sm_80 on, bf16) matrix multiply-adds, counted as two."""
    fp32_flops: float = 0.0
    dram_bandwidth: float = 0.0
    dram_bytes: int = 0
    l2_bytes: int = 0
    smem_per_sm: int = 0
    smem_per_block: int = 0
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048
    blocks_per_sm: int = 0
    smem_reserved: int = 0
    """Shared memory of each block that the driver takes."""
    smem_carveouts: tuple[int, ...] = ()
    """What a multiprocessor may set aside as shared memory, ascending; the rest of its memory is L1 cache."""
    tmem_columns: int = 0
    source: str = ""

    @property
    def is_gpu(self) -> bool:
        return self.capability > 0

    @property
    def is_untried(self) -> bool:
        """Whether Strobe was never run on such a device: it is no NVIDIA GPU and no CPU."""
        return not self.is_gpu and self.name not in ("CPU", "meta")

    @property
    def fp8_flops(self) -> float:
        """e4m3 and e5m2 operations a second: where tensor cores take them twice those of 16 bits, by the same sources,
        elsewhere 0."""
        return 2 * self.tensor_flops if self.capability >= 89 else 0.0

    @property
    def exp2_rate(self) -> float:
        """Exponentials a second: the special-function units do 16 a clock on each multiprocessor, on all archs here."""
        return 16 * self.sms * self.clock

    @property
    def smem_bandwidth(self) -> float:
        """Bytes of shared memory a second: 32 banks of 4 bytes a clock on each multiprocessor, on all archs here (Programming
        Guide)."""
        return 128 * self.sms * self.clock

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.capability})" if self.is_gpu else self.name


def _carveouts(*kib: int) -> tuple[int, ...]:
    return tuple(size * KIB for size in kib)


_SM75 = Arch(
    "", 75, smem_per_sm=64 * KIB, smem_per_block=64 * KIB, threads_per_sm=1024, blocks_per_sm=16,
    smem_carveouts=_carveouts(32, 64),
)  # fmt: skip
_SM80 = Arch(
    "", 80, smem_per_sm=164 * KIB, smem_per_block=163 * KIB, blocks_per_sm=32, smem_reserved=KIB,
    smem_carveouts=_carveouts(0, 8, 16, 32, 64, 100, 132, 164),
)  # fmt: skip
_SM86 = Arch(
    "", 86, smem_per_sm=100 * KIB, smem_per_block=99 * KIB, threads_per_sm=1536, blocks_per_sm=16, smem_reserved=KIB,
    smem_carveouts=_carveouts(0, 8, 16, 32, 64, 100),
)  # fmt: skip
_SM89 = replace(_SM86, capability=89, blocks_per_sm=24)
_SM90 = replace(
    _SM80, capability=90, smem_per_sm=228 * KIB, smem_per_block=227 * KIB,
    smem_carveouts=_carveouts(0, 8, 16, 32, 64, 100, 132, 164, 196, 228),
)  # fmt: skip
_SM100 = replace(_SM90, capability=100, tmem_columns=512)
_SM120 = replace(_SM89, capability=120)


def _gpu(family: Arch, name, sms, mhz, tensor_tflops, fp32_tflops, gb_s, gib, l2_mib, source) -> Arch:
    return replace(
        family, name=name, sms=sms, clock=mhz * 1e6, tensor_flops=tensor_tflops * 1e12, fp32_flops=fp32_tflops * 1e12,
        dram_bandwidth=gb_s * 1e9, dram_bytes=gib * GIB, l2_bytes=int(l2_mib * MIB), source=source,
    )  # fmt: skip


KNOWN: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        _gpu(_SM75, "T4", 40, 1590, 65, 8.1, 320, 16, 4, "NVIDIA T4 data sheet; Turing architecture white paper"),
        _gpu(_SM80, "A100", 108, 1410, 312, 19.5, 2039, 80, 40, "A100 80GB SXM data sheet; A100 architecture white paper"),
        _gpu(_SM86, "A10", 72, 1695, 125, 31.2, 600, 24, 6, "NVIDIA A10 data sheet; GA102 white paper"),
        _gpu(_SM86, "RTX 3090", 82, 1695, 71, 35.6, 936, 24, 6, "Ampere GA102 architecture white paper"),
        _gpu(_SM89, "L4", 58, 2040, 121, 30.3, 300, 24, 48, "NVIDIA L4 data sheet; Ada architecture white paper"),
        _gpu(_SM89, "RTX 4090", 128, 2520, 165.2, 82.6, 1008, 24, 72, "Ada GPU architecture white paper"),
        _gpu(_SM90, "H100", 132, 1830, 989.4, 66.9, 3350, 80, 50, "H100 SXM5 data sheet; H100 architecture white paper"),
        _gpu(_SM90, "H200", 132, 1830, 989.4, 66.9, 4800, 141, 50, "H200 SXM data sheet; H100 architecture white paper"),
        _gpu(_SM100, "B200", 148, 1850, 2250, 75, 8000, 180, 126, "HGX B200 data sheet; Blackwell architecture brief"),
        _gpu(_SM120, "RTX 5090", 170, 2407, 209.5, 104.8, 1792, 32, 96, "RTX Blackwell GPU architecture white paper"),
    )
}

CPU = Arch("CPU", 0)


def arch_of(device: torch.device) -> Arch:
    """The Arch of a torch device: a known GPU by its name, else what the driver reports and its family's limits. One that is
    neither an NVIDIA GPU nor a CPU has a name alone."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return _cuda_arch(index)
    return CPU if device.type == "cpu" else Arch(device.type, 0)


@functools.cache
def _cuda_arch(index: int) -> Arch:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:  # its numbers of archs are other ones
        return Arch(f"{properties.name} under ROCm", 0)
    capability = 10 * properties.major + properties.minor
    # Longest name first: "A100" holds "A10", and "RTX 4090" is not an "L4".
    for name in sorted(KNOWN, key=len, reverse=True):
        if name in properties.name and KNOWN[name].capability == capability:
            return replace(KNOWN[name], sms=properties.multi_processor_count, l2_bytes=properties.L2_cache_size)
    return Arch(
        properties.name,
        capability,
        sms=properties.multi_processor_count,
        dram_bytes=properties.total_memory,
        l2_bytes=properties.L2_cache_size,
        smem_per_sm=properties.shared_memory_per_multiprocessor,
        smem_per_block=getattr(properties, "shared_memory_per_block_optin", 48 * KIB),
        registers_per_sm=getattr(properties, "regs_per_multiprocessor", 65536),
        threads_per_sm=properties.max_threads_per_multi_processor,
    )
