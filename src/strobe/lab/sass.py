"""What the compiler made of a kernel: registers, spills, shared memory and the machine instructions that matter.

Uses the ptxas and nvdisasm that Triton's own package carries, so it needs neither a GPU nor a CUDA toolkit.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Audit:
    """name of the kernel and its arch; registers a thread at launch; bytes of shared memory and of spill stores and
    loads; counts of SASS mnemonics up to the first dot, and of MUFU by function; ptxas's warnings; seconds to compile."""

    name: str
    registers: int
    smem_bytes: int
    spill_bytes: int
    instructions: dict[str, int]
    warnings: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)


def audit(compiled, name: str, seconds: float = 0.0) -> Audit:
    """The Audit of a kernel that Triton compiled."""
    capability = compiled.metadata.target.arch
    report = _ptxas_report(compiled.asm["ptx"], capability)
    used = re.search(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    return Audit(
        name=name,
        registers=int(used.group(1)) if used else 0,
        smem_bytes=compiled.metadata.shared,
        spill_bytes=sum(map(int, spills)),
        instructions=count_instructions(disassemble(compiled.asm["cubin"])),
        warnings=tuple(line for line in report.splitlines() if "warning" in line.lower() or re.search(r"C75\d\d", line)),
        seconds=seconds,
    )


def disassemble(cubin: bytes) -> str:
    """SASS text of a cubin, by nvdisasm."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _run(knobs.nvidia.nvdisasm.path, "-c", str(path))


_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)", re.MULTILINE)


def count_instructions(sass: str) -> dict[str, int]:
    """How often each instruction stands in the text, most frequent first: "HGMMA", "UTMALDG", "MUFU.EX2", ..."""
    counts: Counter[str] = Counter()
    for match in _INSTRUCTION.finditer(sass):
        mnemonic, *modifiers = match.group(1).split(".")
        counts[f"{mnemonic}.{modifiers[0]}" if mnemonic == "MUFU" and modifiers else mnemonic] += 1
    return dict(counts.most_common())


def _ptxas_report(ptx: str, capability: int) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    suffix = "a" if capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        return _run(
            get_ptxas(capability).path, "-v", f"-arch=sm_{capability}{suffix}", str(path), "-o", f"{folder}/kernel.cubin"
        )


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout + done.stderr
