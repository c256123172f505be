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
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from strobe.lab.binary.barriers import lost_barriers

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Audit:
    """name of the kernel and its arch; registers a thread at launch; bytes of shared memory and of spill stores and
    loads; counts of SASS mnemonics up to the first dot, and of MUFU by function; the same for each role, if the roles were
    named (code that roles share counts for each of them); listings, each role's mnemonics in the order of the text; main_loops,
    the counts in the innermost loop with tensor cores of the roles that have one; ptxas's warnings; seconds to compile; threads
    of a block, those of all roles; what ptxas made wrong, `wrong_code`."""

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
    wrong_code: tuple[str, ...] = ()

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
        return "\n".join([*lines, *(f"warning: {warning}" for warning in (*self.warnings, *self.wrong_code))])


MATTERS = (
    *("HGMMA", "UTCHMMA", "UTMALDG", "UTMASTG", "LDTM", "STTM", "MUFU.EX2", "FFMA", "FFMA2", "SHFL", "LDS", "STS"),
    *("BAR", "SYNCS", "UTCBAR", "LDL", "STL"),
)
"""Instructions to count: those of tensor cores, TMA, tensor memory, exponentials, shuffles, shared memory and barriers, and
spills (LDL, STL)."""


def audit(compiled, name: str, seconds: float = 0.0, roles: tuple[str, ...] = ()) -> Audit:
    """The Audit of a kernel that Triton compiled. roles: names of its warp partitions, in the order of their list."""
    resources = resources_of(compiled)
    sass = disassemble(compiled.asm["cubin"])
    listings = list_by_role(sass, roles) if roles else {}
    loops = list_by_role(sass, roles, main_loop) if roles else {}
    return Audit(
        name=name,
        registers=resources.registers,
        smem_bytes=resources.smem_bytes,
        spill_bytes=resources.spill_bytes,
        instructions=count_instructions(sass),
        roles={role: counted(names) for role, names in listings.items()},
        listings=listings,
        main_loops={role: counted(names) for role, names in loops.items() if names},
        warnings=resources.warnings,
        seconds=seconds,
        threads=compiled.metadata.num_warps * compiled.metadata.target.warp_size,
        wrong_code=(*wrong_code(sass), *lost_barriers(compiled.asm["ttgir"])),
    )


@dataclass(frozen=True)
class Resources:
    """Registers a thread at launch; bytes of shared memory, and of spill stores and loads; ptxas's warnings; bytes of the stack
    frame and of constant memory, named barriers, and milliseconds that ptxas took, each None where it did not say."""

    registers: int
    smem_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...]
    stack_bytes: int | None = None
    constant_bytes: int | None = None
    barriers: int | None = None
    ptxas_ms: float | None = None

    def ptxas(self) -> dict[str, float | None]:
        """What ptxas said beside registers and spills, by name."""
        return {name: getattr(self, name) for name in ("stack_bytes", "barriers", "constant_bytes", "ptxas_ms")}


def resources_of(compiled) -> Resources:
    """What a kernel that Triton compiled takes."""
    report = _ptxas_report(compiled)
    used = re.search(r"Used (\d+) registers", report)
    return Resources(
        registers=int(used.group(1)) if used else 0,
        smem_bytes=compiled.metadata.shared,
        spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report))),
        warnings=tuple(line for line in report.splitlines() if "warning" in line.lower() or re.search(r"C75\d\d", line)),
        stack_bytes=_said(r"(\d+) bytes stack frame", report, int),
        constant_bytes=_said(r"(\d+) bytes cmem\[0\]", report, int),
        barriers=_said(r"used (\d+) barriers", report, int),
        ptxas_ms=_said(r"Compile time = ([\d.]+) ms", report, float),
    )


def _said(pattern: str, report: str, kind: Callable[[str], T]) -> T | None:
    """A number of ptxas's report; None where it is not there."""
    found = re.search(pattern, report)
    return kind(found[1]) if found else None


def resources_of_cubin(path: Path) -> dict[str, tuple[int, int]]:
    """Registers, and bytes of shared memory that it declares, of each kernel in a cubin file, by cuobjdump."""
    from triton import knobs

    report = _run(knobs.nvidia.cuobjdump.path, "-res-usage", str(path))
    found = re.findall(r"Function (\S+):\s+REG:(\d+) .*?SHARED:(\d+)", report)
    return {name: (int(registers), int(smem_bytes)) for name, registers, smem_bytes in found}


def disassemble(cubin: bytes) -> str:
    """SASS text of a cubin, by nvdisasm."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _run(knobs.nvidia.nvdisasm.path, "-c", str(path))


_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+((?:@!?U?P\w+\s+)?)([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)(.*)")
_LABEL = re.compile(r"(\S+):\s*$")


@dataclass(frozen=True)
class Instruction:
    """guard: "@P0 " or nothing; mnemonic: with all its modifiers, "LDG.E.128"; operands: the rest of the line."""

    guard: str
    mnemonic: str
    operands: str

    @property
    def name(self) -> str:
        """The mnemonic up to its first dot; a MUFU with its function: "MUFU.EX2"."""
        name, *modifiers = self.mnemonic.split(".")
        return f"{name}.{modifiers[0]}" if name == "MUFU" and modifiers else name

    def __str__(self) -> str:
        return f"{self.guard}{self.mnemonic}{self.operands}".rstrip(" ;")


def count_instructions(sass: str) -> dict[str, int]:
    """How often each instruction stands in the text, most frequent first: "HGMMA", "UTMALDG", "MUFU.EX2", ..."""
    found = (_INSTRUCTION.match(line) for line in sass.splitlines())
    return counted(Instruction(*match.groups()).name for match in found if match)


def counted(things: Iterable[T]) -> dict[T, int]:
    """How often each occurs, the most frequent first."""
    return dict(Counter(things).most_common())


# ---- control flow


@dataclass
class Block:
    """Instructions that run one after the other, the labels that the last ones name, and whether the next block follows."""

    instructions: list[Instruction] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    falls_through: bool = True

    @property
    def names(self) -> list[str]:
        return [instruction.name for instruction in self.instructions]


Successors = list[set[int]]
"""For each block, the indices of the blocks that may come after it."""


@dataclass(frozen=True)
class Flow:
    """A kernel's blocks in the order of the text, the blocks that may come after each, and the places of the labels."""

    blocks: list[Block]
    successors: Successors
    labels: dict[str, int]

    @cached_property
    def predecessors(self) -> Successors:
        """For each block, the indices of the blocks that may come before it."""
        found: Successors = [set() for _ in self.blocks]
        for i, after in enumerate(self.successors):
            for j in after:
                if j < len(found):
                    found[j].add(i)
        return found

    def instructions(self, chosen: Iterable[int]) -> list[Instruction]:
        """The instructions of the chosen blocks, in the order of the text."""
        return [instruction for i in sorted(chosen) for instruction in self.blocks[i].instructions]

    def holds(self, i: int, names: Collection[str]) -> bool:
        return any(name in names for name in self.blocks[i].names)


def flow_of(sass: str) -> Flow:
    blocks, labels = _blocks(sass)
    return Flow(blocks, [_successors(i, block, labels) for i, block in enumerate(blocks)], labels)


def role_blocks(flow: Flow, named: int = 1) -> list[set[int]]:
    """The blocks of each warp partition, the default one first, with the kernel's set-up; after the roles come what padding
    warps do, and the exit. Only all blocks if the kernel does not branch to partitions. ValueError if there are fewer than were
    named."""
    switches = [i for i, block in enumerate(flow.blocks) if "BRX" in block.names]
    workers = [flow.labels[label] for label in flow.blocks[switches[0]].targets] if len(switches) == 1 else []
    # In a cluster the first case is no role: there the waiting warps take part in a barrier of the whole cluster.
    workers = [worker for worker in workers if "UCGABAR_ARV" not in flow.blocks[worker].names]
    if len(workers) < named - 1:
        raise ValueError(f"{named} roles were named, the kernel branches to {len(workers)} besides the first")
    if not workers:
        return [set(range(len(flow.blocks)))]
    loop = _waiting_loop(flow.successors, switches[0])
    return [_reached(flow.successors, entry, loop) for entry in (0, *workers)]


def list_by_role(
    sass: str, roles: tuple[str, ...], part: Callable[[Flow, set[int]], set[int]] | None = None
) -> dict[str, list[str]]:
    """The instructions of each warp partition, the first of which is the default one, with the kernel's set-up; only those of
    some of its blocks if `part` chooses some. ValueError if the kernel does not branch to that many."""
    flow = flow_of(sass)
    chosen = (part(flow, blocks) if part else blocks for blocks in role_blocks(flow, len(roles)))
    return {
        role: [instruction.name for instruction in flow.instructions(blocks)]
        for role, blocks in zip(roles, chosen, strict=False)
    }


TENSOR_CORES = (
    *("HMMA", "IMMA", "DMMA", "QMMA", "OMMA", "HGMMA", "QGMMA", "IGMMA"),
    *("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA"),
)
"""Products: of a warp (mma.sync), of a warpgroup (wgmma), of tensor memory (tcgen05)."""


def main_loop(flow: Flow, role: set[int], names: Collection[str] = TENSOR_CORES) -> set[int]:
    """The blocks of a role's innermost loop that has instructions of these names. Of several such loops it is the one in which
    they are the densest: a loop over full tiles rather than one that masks. Empty if they are in no loop."""

    def density(loop: set[int]) -> float:
        found = [instruction.name for instruction in flow.instructions(loop)]
        return sum(name in names for name in found) / len(found)

    return max(innermost_loops(flow, role, names), key=density, default=set())


def innermost_loops(flow: Flow, inside: set[int], names: Collection[str]) -> list[set[int]]:
    """The loops among some blocks that hold instructions of these names, and no smaller loop that does: what is left of a loop
    without its entries may hold one."""
    left, found = {i for i in inside if flow.holds(i, names)}, []
    while left:
        loop = _loop(flow.successors, left.pop(), inside)
        left -= loop
        if loop:
            outside = set(range(len(flow.blocks))) - loop
            inner = loop - set().union(*(flow.successors[before] for before in outside))
            found += innermost_loops(flow, inner, names) or [loop]
    return found


def _loop(successors: Successors, block: int, inside: set[int]) -> set[int]:
    """The blocks that lead from a block back to it, going through those `inside` alone; none if it is in no loop."""
    without = set(range(len(successors))) - inside
    after = set().union(*(_reached(successors, i, without) for i in successors[block]))
    return {i for i in after if block in _reached(successors, i, without)}


def natural_loops(flow: Flow) -> list[set[int]]:
    """All loops: of each head, which every way from the kernel's entry into the loop passes, what leads back to it."""
    found: dict[int, set[int]] = {}
    for end, heads in enumerate(flow.successors):
        for head in heads:
            if head <= end and end not in _reached(flow.successors, 0, {head}):
                found.setdefault(head, {head}).update(_reached(flow.predecessors, end, {head}))
    return list(found.values())


def _blocks(sass: str) -> tuple[list[Block], dict[str, int]]:
    """The blocks in the order of the text, and the labels of those that have one."""
    blocks, labels = [Block()], {}
    for line in sass.splitlines():
        label, match = _LABEL.match(line), _INSTRUCTION.match(line)
        if label:
            if blocks[-1].instructions:
                blocks.append(Block())
            labels[label[1]] = len(blocks) - 1
        elif match:
            instruction, block = Instruction(*match.groups()), blocks[-1]
            block.instructions.append(instruction)
            name, operands = instruction.name, instruction.operands
            if name != "RET":  # which names the function that it is in
                block.targets += re.findall(r"`\((\S+?)\)", operands) + re.findall(r"\.L_x_\d+(?=[,\"])", operands)
            if name in ("BRA", "BRX", "EXIT", "RET"):
                # A branch may be conditional by its guard or by a predicate among its operands (BRA.U UP0, ...).
                block.falls_through = bool(instruction.guard or re.match(r"\s+!?U?P", operands))
                blocks.append(Block())
    return blocks, labels


def _successors(i: int, block: Block, labels: dict[str, int]) -> set[int]:
    return {labels[target] for target in block.targets} | ({i + 1} if block.falls_through and block.instructions else set())


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


# ---- mistakes of ptxas (docs/upstream.md)

_REGISTER = re.compile(r"\bUR(\d+)\b")
_WRITES_UNIFORM = ("U", "S2UR", "R2UR", "REDUX", "LDCU", "VOTEU", "CS2UR")


def wrong_code(sass: str) -> tuple[str, ...]:
    """What ptxas is known to get wrong, a sentence for each instruction."""
    return (
        *(f"wrong code: `{one}` reads a register that nothing before it has written" for one in unwritten(sass)),
        *(f"wrong code: `{one}` takes a descriptor from a loop that may not have run" for one in left_over(sass)),
    )


def unwritten(sass: str) -> tuple[str, ...]:
    """Instructions that read a uniform register which no instruction before them in the text writes, other than in a
    descriptor: a mistake of ptxas, which has made such code of rows of shared memory of two widths (CUDA 12.8). A copy that
    the next instruction writes over is not one: nobody uses it."""
    written: set[int] = set()
    found: list[str] = []
    copied: range | None = None  # into what, by the last instruction, if it is the last one found
    for instruction in (Instruction(*match.groups()) for match in map(_INSTRUCTION.match, sass.splitlines()) if match):
        into = _written(instruction)
        operands = instruction.operands.rstrip(" ;").split(",")[bool(into) :]
        read = [int(number) for x in operands if "desc[" not in x for number in _REGISTER.findall(x)]
        if copied and copied[0] in into[:1] and copied[0] not in read and not instruction.guard:
            found.pop()
        copied = None
        if not written.issuperset(read):
            found.append(str(instruction))
            copied = into if instruction.mnemonic == "UMOV" else None
        written.update(into)
        written.update(read)  # told once
    return tuple(found)


def left_over(sass: str) -> tuple[str, ...]:
    """Products that take a descriptor, or a part of one, from a loop before them that may not have run: a mistake of
    ptxas (CUDA 12.8), which has made the descriptor of what two loops multiply by in the first one alone. A loop that reads
    what the register held before it, to carry it on or to put it back, has not made it. What a descriptor is made of is not
    looked at."""
    flow = flow_of(sass)
    loops = natural_loops(flow)
    return tuple(
        str(product)
        for i, block in enumerate(flow.blocks)
        for k, product in enumerate(block.instructions)
        if any(
            _is_left(flow, loops, register, writer, i)
            for register in _descriptors(product)
            for writer in _writers(flow, register, i, k)
        )
    )


def _written(instruction: Instruction) -> range:
    """The uniform registers that an instruction writes."""
    if not instruction.mnemonic.startswith(_WRITES_UNIFORM):
        return range(0)
    target = _REGISTER.fullmatch(instruction.operands.split(",")[0].strip(" ;"))
    if target is None:
        return range(0)
    modifiers = instruction.mnemonic.split(".")
    width = 4 if "128" in modifiers else 2 if "64" in modifiers or "WIDE" in modifiers else 1
    return range(int(target[1]), int(target[1]) + width)


def _reads(instruction: Instruction, register: int) -> bool:
    """Whether an instruction names a uniform register as one to read, or the first one of its pair, or has it in a
    descriptor."""
    operands = instruction.operands.split(",")[bool(_written(instruction)) :]
    named = {int(number) for x in operands for number in _REGISTER.findall(x)}
    pair = ".64" in instruction.mnemonic and register - 1 in named
    return register in named or pair or register in _descriptors(instruction)


def _descriptors(product: Instruction) -> tuple[int, ...]:
    """The uniform registers in which a product has its descriptors: two for each operand of tcgen05; of wgmma four for both
    operands in turn, the last two if the first operand is in registers."""
    if product.name.startswith("UTC"):
        return tuple(int(first) + i for first in re.findall(r"gdesc\[UR(\d+)\]", product.operands) for i in range(2))
    found = re.search(r"(, R\d+, )?gdesc\[UR(\d+)\]", product.operands)
    return tuple(range(int(found[2]) + 2 * bool(found[1]), int(found[2]) + 4)) if found else ()


def _writers(flow: Flow, register: int, block: int, end: int) -> Iterator[int]:
    """The blocks that may have written what a uniform register holds ahead of instruction `end` of a block."""
    seen: set[int] = set()
    left = [(block, end)]
    while left:
        block, end = left.pop()
        for instruction in reversed(flow.blocks[block].instructions[:end]):
            if register in _written(instruction):
                yield block
                if not instruction.guard:
                    break
        else:
            left += [(i, len(flow.blocks[i].instructions)) for i in flow.predecessors[block] - seen]
            seen |= flow.predecessors[block]


def _is_left(flow: Flow, loops: list[set[int]], register: int, writer: int, reader: int) -> bool:
    """Whether a block writes a register in loops that the reader is not in, and that a way to it passes by."""
    left = [loop for loop in loops if writer in loop and reader not in loop]
    passed_by = bool(left) and reader in _reached(flow.successors, 0, {writer})
    return passed_by and not any(_takes_over(flow, loop, register) for loop in left)


def _takes_over(flow: Flow, loop: set[int], register: int) -> bool:
    """Whether a loop reads what a register held before it."""
    return any(
        writer not in loop
        for i in loop
        for k, instruction in enumerate(flow.blocks[i].instructions)
        if _reads(instruction, register)
        for writer in _writers(flow, register, i, k)
    )


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
