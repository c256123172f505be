"""What the compiler made of a kernel: registers, spills, shared memory and the machine instructions that matter.

Uses the ptxas and nvdisasm that Triton's own package carries, so it needs neither a GPU nor a CUDA toolkit.

A warp-specialised kernel is counted role by role. Triton gives the first partition the kernel's own path; the other warps
wait in a loop, and an indirect branch (BRX) takes each to its partition, in the order of `gl.warp_specialize`'s list. So a
role is what the control flow reaches from its branch target without going back through that loop.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Audit:
    """name of the kernel and its arch; registers a thread at launch; bytes of shared memory and of spill stores and
    loads; counts of SASS mnemonics up to the first dot, and of MUFU by function; the same for each role, if the roles were
    named (code that roles share counts for each of them); listings, each role's mnemonics in the order of the text; main_loops,
    the counts in the innermost loop with wgmma's of the roles that have one; ptxas's warnings; seconds to compile; threads of
    a block, those of all roles."""

    name: str
    registers: int
    smem_bytes: int
    spill_bytes: int
    instructions: dict[str, int]
    roles: dict[str, dict[str, int]] = field(default_factory=dict)
    listings: dict[str, list[str]] = field(default_factory=dict, repr=False)
    main_loops: dict[str, dict[str, int]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    threads: int = 0

    def __str__(self) -> str:
        """The numbers, and a table of the roles' instructions that matter."""
        shown = [name for name in MATTERS if self.instructions.get(name)]
        width = max([len(role) for role in self.roles], default=0)
        lines = [
            f"{self.name}: {self.registers} registers, {self.smem_bytes} bytes of shared memory, {self.spill_bytes} of spills"
        ]
        if self.roles:
            lines.append(" " * width + "".join(f"{name:>10}" for name in shown))
        for role, counts in self.roles.items():
            lines.append(f"{role:{width}}" + "".join(f"{counts.get(name, 0):>10}" for name in shown))
        return "\n".join(lines + [f"warning: {warning}" for warning in self.warnings])


MATTERS = (
    *("HGMMA", "UTCHMMA", "UTMALDG", "UTMASTG", "LDTM", "STTM", "MUFU.EX2", "FFMA", "FFMA2", "SHFL", "LDS", "STS"),
    *("BAR", "SYNCS", "UTCBAR", "LDL", "STL"),
)
"""Of tensor cores, TMA, tensor memory, exponentials, shuffles, shared memory, barriers; LDL and STL are spills."""


def audit(compiled, name: str, seconds: float = 0.0, roles: tuple[str, ...] = ()) -> Audit:
    """The Audit of a kernel that Triton compiled. roles: names of its warp partitions, in the order of their list."""
    report = _ptxas_report(compiled)
    used = re.search(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    sass = disassemble(compiled.asm["cubin"])
    listings = list_by_role(sass, roles) if roles else {}
    loops = list_by_role(sass, roles, main_loop) if roles else {}
    return Audit(
        name=name,
        registers=int(used.group(1)) if used else 0,
        smem_bytes=compiled.metadata.shared,
        spill_bytes=sum(map(int, spills)),
        instructions=count_instructions(sass),
        roles={role: _counted(names) for role, names in listings.items()},
        listings=listings,
        main_loops={role: _counted(names) for role, names in loops.items() if names},
        warnings=tuple(line for line in report.splitlines() if "warning" in line.lower() or re.search(r"C75\d\d", line)),
        seconds=seconds,
        threads=compiled.metadata.num_warps * compiled.metadata.target.warp_size,
    )


def disassemble(cubin: bytes) -> str:
    """SASS text of a cubin, by nvdisasm."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _run(knobs.nvidia.nvdisasm.path, "-c", str(path))


_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)(.*)")
_LABEL = re.compile(r"(\S+):\s*$")


def count_instructions(sass: str) -> dict[str, int]:
    """How often each instruction stands in the text, most frequent first: "HGMMA", "UTMALDG", "MUFU.EX2", ..."""
    found = (_INSTRUCTION.match(line) for line in sass.splitlines())
    return _counted(_name(match[2]) for match in found if match)


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _name(mnemonic: str) -> str:
    name, *modifiers = mnemonic.split(".")
    return f"{name}.{modifiers[0]}" if name == "MUFU" and modifiers else name


# ---- roles


@dataclass
class Block:
    """Instructions that run one after the other, the labels that the last ones name, and whether the next block follows."""

    names: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    falls_through: bool = True


Successors = list[set[int]]
"""Of each block."""


def list_by_role(
    sass: str, roles: tuple[str, ...], part: Callable[[list[Block], Successors, set[int]], set[int]] | None = None
) -> dict[str, list[str]]:
    """The instructions of each warp partition, the first of which is the default one, with the kernel's set-up; only those of
    some of its blocks if `part` chooses some. ValueError if the kernel does not branch to that many."""
    blocks, labels = _blocks(sass)
    switches = [i for i, block in enumerate(blocks) if "BRX" in block.names]
    workers = [labels[label] for label in blocks[switches[0]].targets] if len(switches) == 1 else []
    # In a cluster the first case is no role: there the waiting warps take part in a barrier of the whole cluster.
    workers = [worker for worker in workers if "UCGABAR_ARV" not in blocks[worker].names]
    if not workers or len(workers) < len(roles) - 1:
        raise ValueError(f"{len(roles)} roles were named, the kernel branches to {len(workers)} besides the first")
    successors = [_successors(i, block, labels) for i, block in enumerate(blocks)]
    loop = _waiting_loop(successors, switches[0])
    entries = [0, *workers]
    listings = {}
    for role, entry in zip(roles, entries, strict=False):  # beyond the roles: padding warps, and the exit
        reached = _reached(successors, entry, loop)
        chosen = part(blocks, successors, reached) if part else reached
        listings[role] = [name for i in sorted(chosen) for name in blocks[i].names]
    return listings


def main_loop(blocks: list[Block], successors: Successors, role: set[int]) -> set[int]:
    """Of a role's blocks those of its innermost loop with a wgmma: what is left of a loop without its entries may hold one."""
    found: set[int] = set()
    inside = role
    while True:
        loops = [_loop(successors, i, inside) for i in inside if "HGMMA" in blocks[i].names]
        loop = max(loops, key=len, default=set())
        if not loop:
            return found
        found = loop
        inside = loop - set().union(*(successors[before] for before in range(len(successors)) if before not in loop))


def _loop(successors: Successors, block: int, inside: set[int]) -> set[int]:
    """The blocks that lead from a block back to it, going through those `inside` alone; none if it is in no loop."""
    without = set(range(len(successors))) - inside
    after = set().union(*(_reached(successors, i, without) for i in successors[block]))
    return {i for i in after if block in _reached(successors, i, without)}


def _blocks(sass: str) -> tuple[list[Block], dict[str, int]]:
    """The blocks in the order of the text, and the labels of those that have one."""
    blocks, labels = [Block()], {}
    for line in sass.splitlines():
        label, instruction = _LABEL.match(line), _INSTRUCTION.match(line)
        if label:
            if blocks[-1].names:
                blocks.append(Block())
            labels[label[1]] = len(blocks) - 1
        elif instruction:
            guard, mnemonic, operands = instruction.groups()
            block = blocks[-1]
            block.names.append(_name(mnemonic))
            if block.names[-1] != "RET":  # which names the function that it is in
                block.targets += re.findall(r"`\((\S+?)\)", operands) + re.findall(r"\.L_x_\d+(?=[,\"])", operands)
            if block.names[-1] in ("BRA", "BRX", "EXIT", "RET"):
                # A branch may be conditional by its guard or by a predicate among its operands (BRA.U UP0, ...).
                conditional = guard or re.match(r"\s+!?U?P", operands)
                block.falls_through = bool(conditional)
                blocks.append(Block())
    return blocks, labels


def _successors(i: int, block: Block, labels: dict[str, int]) -> set[int]:
    return {labels[target] for target in block.targets} | ({i + 1} if block.falls_through and block.names else set())


def _reached(successors: list[set[int]], start: int, without: set[int]) -> set[int]:
    """The blocks that control flow from `start` comes to, not going through those in `without`."""
    seen: set[int] = set()
    left = [start]
    while left:
        i = left.pop()
        if i not in seen and i not in without and i < len(successors):
            seen.add(i)
            left += successors[i]
    return seen


def _waiting_loop(successors: list[set[int]], switch: int) -> set[int]:
    """The loop around a switch: what every path from the kernel's entry to it must pass, and what it comes back to."""
    returns = _reached(successors, switch, set())
    return {i for i in returns if switch not in _reached(successors, 0, {i})}


def _ptxas_report(compiled) -> str:
    """What ptxas says when Triton compiles this kernel's PTX once more: its options decide about registers, and differ
    between versions of Triton."""
    from triton import knobs
    from triton.compiler.compiler import make_backend

    target = compiled.metadata.target
    backend = make_backend(target)
    asked = compiled.metadata._asdict()
    options = backend.parse_options({name: asked[name] for name in ("enable_fp_fusion", "ptx_options") if name in asked})
    said = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(compiled.asm["ptx"], {}, options, target.arch)
    return said.getvalue()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout + done.stderr
