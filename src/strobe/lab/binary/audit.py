"""`strobe audit`: what the compiler made of a kernel, ours for any GPU or anybody's cubin, and what is wrong with it.

Our kernels are compiled offline, for GPUs that are not there; ptxas says what it spilled and which products it made serial. A
cubin says less: its registers and its instructions. Either way the control flow gives the warp roles and each one's main loop.

What is called a warning is of two kinds. Spills, serial products and narrow loads are facts of the text. That registers change
hands through shared memory, and that the products of a cubin are serial, is inferred from patterns, and says so. Wrong code is
what `sass.wrong_code` finds, patterns of ptxas's known mistakes, and `barriers.lost_barriers` (docs/upstream.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from strobe.call.dispatch import backend_module
from strobe.device import KNOWN, Arch
from strobe.kernels import has_triton
from strobe.lab.bench import decode_peers
from strobe.lab.bench.plan import Point
from strobe.lab.binary import offline
from strobe.lab.binary.barriers import lost_barriers
from strobe.lab.binary.offline import Made
from strobe.lab.binary.sass import (
    TENSOR_CORES,
    Flow,
    Instruction,
    counted,
    disassemble,
    flow_of,
    main_loop,
    resources_of,
    resources_of_cubin,
    role_blocks,
    wrong_code,
)
from strobe.lab.progress import each
from strobe.masks import Causal, Full
from strobe.problem import AttentionProblem, Phase
from strobe.serving.problem import DecodeOperands, DecodeProblem

# ---- what can be compiled

ARCHS: dict[str, Arch] = {
    "sm_80": KNOWN["A100"],
    "sm_86": KNOWN["RTX 3090"],
    "sm_89": KNOWN["RTX 4090"],
    "sm_90a": KNOWN["H200"],
    "sm_100a": KNOWN["B200"],
    "sm_120": KNOWN["RTX 5090"],
}
"""Names of what is compiled for, and a GPU of each, whose shared memory the configs are chosen for."""


class Kernel(NamedTuple):
    """One of ours, which is audited in `dtype` if no other is asked for."""

    compile: Callable[[AttentionProblem, Arch], list[Made]]
    refuses: Callable[[AttentionProblem, Arch], str | None]
    arch: str
    phase: Phase = "forward"
    dtype: str = "bf16"
    deterministic: bool = False


def _refuses(backend: str) -> Callable[[AttentionProblem, Arch], str | None]:
    return lambda problem, arch: backend_module(backend).refuses(problem, arch)


HEADS_OF_A_STEP = 64, 8
"""Query and key heads of a decode step that is audited."""


def _decode(queries: int, dtype: str = "bf16") -> Kernel:
    """A decode step over pages, of so many queries of each sequence, in place of a forward of as many keys."""

    def described(problem: AttentionProblem) -> tuple[DecodeProblem, DecodeOperands]:
        cache = next(name for name, dtype in decode_peers.CACHES.items() if dtype == problem.dtype)
        lengths = problem.lengths
        point = decode_peers.Point(lengths.batch, lengths.seqlen_kv, *HEADS_OF_A_STEP, problem.head_dim, queries, cache=cache)
        return decode_peers.described(point, deterministic=False)

    def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
        if (dtype == "fp8") != (problem.dtype.itemsize == 1):
            return f"is audited over a cache of {dtype}, not of {str(problem.dtype).removeprefix('torch.')}"
        if problem.head_dim != problem.head_dim_v:
            return f"is audited with one head dim for k and v, not {problem.head_dim} and {problem.head_dim_v}"
        if problem.mask not in (Full(), Causal()):
            return f"is audited with a full or a causal mask, not {problem.mask}"
        return backend_module("decode").refuses(described(problem)[0], arch)

    return Kernel(lambda problem, arch: offline.decode(*described(problem), arch), refuses, "sm_90a", dtype=dtype)


KERNELS: dict[str, Kernel] = {
    "portable-forward": Kernel(offline.portable_forward, _refuses("portable"), "sm_80"),
    "portable-backward": Kernel(offline.portable_backward, _refuses("portable"), "sm_80", "backward"),
    "sm80-forward": Kernel(offline.sm80_forward, _refuses("sm80"), "sm_80"),
    "sm80-backward": Kernel(offline.sm80_backward, _refuses("sm80"), "sm_80", "backward"),
    "sm90-forward": Kernel(offline.sm90_forward, _refuses("sm90"), "sm_90a"),
    "sm90-backward": Kernel(offline.sm90_backward, _refuses("sm90"), "sm_90a", "backward"),
    "sm90-split": Kernel(offline.sm90_backward, _refuses("sm90"), "sm_90a", "backward", deterministic=True),
    "sm90-fp8": Kernel(offline.sm90_fp8, _refuses("sm90_fp8"), "sm_90a", dtype="fp8"),
    "sm100-forward": Kernel(offline.sm100_forward, _refuses("sm100"), "sm_100a"),
    "decode": _decode(1),
    "decode-16": _decode(16),
    "decode-fp8": _decode(4, "fp8"),
}
"""By name, with the arch that it is compiled for if none is named."""


# ---- reports


@dataclass(frozen=True)
class Part:
    """A warp role, or a kernel without roles: its instructions in the order of the text, and those of its main loop."""

    name: str
    instructions: list[Instruction]
    loop: list[Instruction]

    def counts(self) -> dict[str, int]:
        return counted(instruction.name for instruction in self.instructions)

    def loop_counts(self) -> dict[str, int]:
        return counted(instruction.name for instruction in self.loop)


@dataclass(frozen=True)
class Report:
    """One kernel. smem_bytes: of a cubin what it declares, without what a launch adds; spill_bytes: ptxas's count of stores and
    loads, None for a cubin, which does not say; ptxas: what else it said, by name (`Resources.ptxas`)."""

    name: str
    arch: str
    registers: int
    smem_bytes: int
    spill_bytes: int | None
    parts: tuple[Part, ...]
    warnings: tuple[str, ...]
    ptxas: dict[str, float | None] = field(default_factory=dict)

    def as_json(self) -> dict:
        parts = {part.name: {"instructions": part.counts(), "main_loop": part.loop_counts()} for part in self.parts}
        facts = {name: getattr(self, name) for name in ("name", "arch", "registers", "smem_bytes", "spill_bytes")}
        said = {"ptxas": self.ptxas} if self.ptxas else {}
        return facts | said | {"parts": parts, "warnings": list(self.warnings)}


def reports_of(kernels: Iterable[str], points: Sequence[Point], own_dtype: bool = False) -> list[Report]:
    """The Reports of each of KERNEL, KERNEL@ARCH (by the names of KERNELS and ARCHS) at each point, or of a cubin file; several
    of a kernel that runs as several, or of a cubin that holds several. own_dtype: a kernel's own instead of the points'.
    ValueError, before anything is compiled, for what is none of them, or what a kernel does not take. Compiling takes 2 to 20
    seconds on a core."""
    jobs = [job for kernel in kernels for job in _jobs(kernel, points, own_dtype)]
    return [report for job in each(jobs, "compiling") for report in job()]


def _jobs(what: str, points: Sequence[Point], own_dtype: bool) -> list[Callable[[], list[Report]]]:
    name, _, arch_name = what.partition("@")
    if name in KERNELS:
        own = [replace(point, dtype=KERNELS[name].dtype) for point in points]
        return [_job(name, arch_name, point) for point in (own if own_dtype else points)]
    path = Path(what)
    if not path.exists():
        raise ValueError(f"a kernel must be one of {', '.join(KERNELS)}, or a cubin file, got {what!r}")
    found = reports_of_cubin(path)
    return [lambda: found]


def _job(name: str, arch_name: str, point: Point) -> Callable[[], list[Report]]:
    kernel = KERNELS[name]
    arch_name = arch_name or kernel.arch
    if arch_name not in ARCHS:
        raise ValueError(f"an arch must be one of {', '.join(ARCHS)}, got {arch_name!r}")
    problem = replace(point.problem(), phase=kernel.phase, deterministic=kernel.deterministic)
    reason = kernel.refuses(problem, ARCHS[arch_name])
    if reason is not None:
        raise ValueError(f"{name} {reason}")
    return lambda: [_of_made(made, arch_name, point.length) for made in kernel.compile(problem, ARCHS[arch_name])]


def _of_made(made: Made, arch: str, length: int) -> Report:
    resources = resources_of(made.kernel)
    sass = disassemble(made.kernel.asm["cubin"])
    parts = parts_of(flow_of(sass), made.roles)
    warnings = (
        *_spills(resources.spill_bytes, parts),
        *_serial(resources.warnings),
        *_in_loops(parts, _narrow_loads, _narrow_shared_loads, _round_trips),
        *layout_conflicts(made.kernel.asm["ttgir"]),
        *wrong_code(sass),
        *lost_barriers(made.kernel.asm["ttgir"]),
    )
    name = f"{made.name}, S={length}"
    return Report(
        name, arch, resources.registers, resources.smem_bytes, resources.spill_bytes, parts, warnings, resources.ptxas()
    )


def reports_of_cubin(path: Path) -> list[Report]:
    """A Report of each kernel in a cubin file. ValueError if it is none."""
    if not has_triton():
        raise ValueError("reading a cubin needs nvdisasm, which comes with Triton, which is not installed")
    try:
        sass, resources = disassemble(path.read_bytes()), resources_of_cubin(path)
    except (OSError, RuntimeError):
        raise ValueError(f"a cubin must be a file that nvdisasm reads, got {path}") from None
    arch, texts = _arch_of(sass), kernels_in(sass)
    reports = []
    for name, (registers, smem_bytes) in resources.items():
        parts = parts_of(flow_of(texts[name]))
        warnings = (
            *_spills(None, parts),
            *_in_loops(parts, _waits, _narrow_loads, _narrow_shared_loads, _round_trips),
            *wrong_code(texts[name]),
        )
        reports.append(Report(name, arch, registers, smem_bytes, None, parts, warnings))
    return reports


def kernels_in(sass: str) -> dict[str, str]:
    """The text of each kernel, by its name, from that of a whole cubin."""
    pieces = re.split(r"^\s*\.section\s+\.text\.([^,\s]+),.*$", sass, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def _arch_of(sass: str) -> str:
    """Newer cubins name it; older ones have flags, one of which stands for the "a" of sm_90a."""
    if found := re.search(r"\.target\s+(sm_\w+)", sass):
        return found[1]
    found = re.search(r"EF_CUDA_SM(\d+)", sass)
    return f"sm_{found[1]}{'a' * ('EF_CUDA_ACCELERATORS' in sass)}" if found else "unknown arch"


LOOPS: tuple[Iterable[str], ...] = (TENSOR_CORES, ("UTMALDG", "LDGSTS"), ("MUFU.EX2",), ("LDTM",), ("UTMASTG", "UTMAREDG"))
"""What a main loop is known by: by the first of these that a role has in a loop."""


def parts_of(flow: Flow, roles: tuple[str, ...] = ()) -> tuple[Part, ...]:
    """The roles, by their names; without names those that have a loop, by their numbers. A kernel without roles is one part."""
    found = role_blocks(flow, max(1, len(roles)))
    names = roles or (("kernel",) if len(found) == 1 else tuple(f"role {i}" for i in range(len(found))))
    parts = []
    for name, blocks in zip(names, found, strict=False):  # beyond named roles: padding warps, and the exit
        loops = (main_loop(flow, blocks, tuple(marks)) for marks in LOOPS)
        parts.append(Part(name, flow.instructions(blocks), flow.instructions(next(filter(None, loops), set()))))
    if not roles:
        parts = [part for part in parts if part.loop] or parts[:1]
    return tuple(parts)


# ---- warnings


def _spills(spill_bytes: int | None, parts: Iterable[Part]) -> Iterator[str]:
    loops = {part.name: part.loop_counts() for part in parts}
    inside = [
        f"{counts.get('LDL', 0)} LDL and {counts.get('STL', 0)} STL in the main loop of {name}"
        for name, counts in loops.items()
        if counts.keys() & {"LDL", "STL"}
    ]
    where = "; ".join(inside) if inside else "none of them in a main loop"
    moves = sum(instruction.name in ("LDL", "STL") for part in parts for instruction in part.instructions)
    if spill_bytes:
        yield f"registers are spilled, {spill_bytes} bytes: {where}"
    elif moves:
        yield f"{moves} loads and stores of local memory, for spilled registers or an array: {where}"


def _serial(ptxas: Iterable[str]) -> Iterator[str]:
    """ptxas's own words, once for each reason."""
    reasons = [found for line in ptxas if (found := re.search(r"\((C75\d\d)\).*serialized due to (.*?) in the function", line))]
    for (code, reason), times in counted((found[1], found[2]) for found in reasons).items():
        yield f"wgmma is made serial in {times} place{'s' * (times > 1)}, ptxas's {code}: {reason}"
    others = [line for line in ptxas if "serialized due to" not in line]
    yield from (f"ptxas: {line.split(':', 1)[-1].strip()}" for line in others)


def _in_loops(parts: Iterable[Part], *findings: Callable[[Part], str | None]) -> Iterator[str]:
    """What was found in the main loops, once for all the parts in which it is the same."""
    for finding in findings:
        found: dict[str, list[str]] = {}
        for part in parts:
            if sentence := finding(part):
                found.setdefault(sentence, []).append(part.name)
        yield from (f"{sentence} in the main loop of {', '.join(names)}" for sentence, names in found.items())


def _waits(part: Part) -> str | None:
    """Serial products, by what ptxas makes of them: a wait for each."""
    products = sum(instruction.name in ("HGMMA", "QGMMA", "IGMMA") for instruction in part.loop)
    waits = sum(instruction.mnemonic.startswith("WARPGROUP.DEPBAR") for instruction in part.loop)
    serial = products > 1 and waits >= products
    return f"wgmma seems to be serial: {waits} waits for {products} products" if serial else None


def _narrow_loads(part: Part) -> str | None:
    loads = [instruction.mnemonic for instruction in part.loop if instruction.name == "LDG"]
    narrow = [load for load in loads if not {"64", "128"} & set(load.split("."))]
    return f"{len(narrow)} of {len(loads)} LDG load 4 bytes a lane or less" if narrow else None


def _narrow_shared_loads(part: Part) -> str | None:
    """Loads of one or two bytes a lane: each is a wavefront of its own, in which most of the 128 bytes are nobody's."""
    loads = [instruction.mnemonic for instruction in part.loop if instruction.name == "LDS"]
    narrow = [load for load in loads if {"U8", "S8", "U16", "S16"} & set(load.split("."))]
    return f"{len(narrow)} of {len(loads)} LDS load 2 bytes a lane or less" if narrow else None


def _round_trips(part: Part) -> str | None:
    """Stores to shared memory, a barrier, and loads from it, in this order around the loop: what a layout conversion compiles
    to. A kernel may also mean it: the statistics that a producer stored, or a product's operand on its way there."""
    kinds = {"STS": "s", "STSM": "s", "BAR": "b", "LDS": "l", "LDSM": "l"}
    order = "".join(kinds.get(instruction.name, "") for instruction in part.loop)
    if not re.search("s[sl]*b[sb]*l", order * 2):
        return None
    counts = part.loop_counts()
    stores, loads = (
        " and ".join(f"{counts[name]} {name}" for name in names if name in counts)
        for names in (("STS", "STSM"), ("LDS", "LDSM"))
    )
    return f"perhaps a layout conversion through shared memory, inferred from the order: {stores}, a barrier, {loads}"


def layout_conflicts(ttgir: str) -> Iterator[str]:
    """Loads of 16-bit tiles from shared memory whose swizzle leaves conflicts, by Triton's own layouts (see
    strobe.lab.model.banks). A tile in chunks of 16 bytes is taken to be read by ldmatrix, another one in pairs."""
    from strobe.lab.model.banks import ACCESSES, Layout, Tile, count, swizzled

    shared = re.findall(
        r"^(#\w+) = #ttg.swizzled_shared<\{vec = (\d+), perPhase = (\d+), maxPhase = (\d+), order = \[1, 0\]", ttgir, re.M
    )
    layouts = {name: tuple(map(int, numbers)) for name, *numbers in shared}
    loads = re.findall(r"ttg\.local_load .*?!ttg\.memdesc<(\d+)x(\d+)x(?:bf16|f16), (#\w+)", ttgir)
    for (rows, columns, name), times in counted(loads).items():
        if name not in layouts:
            continue
        vector, per_phase, max_phase = layouts[name]
        tile = Tile(int(rows), int(columns), 2)
        access = "ldmatrix" if vector >= 8 else "fragment"

        def place(tile: Tile, row: int, byte: int, numbers=(2 * vector, per_phase, max_phase)) -> int:
            return swizzled(tile, row, byte, *numbers)

        try:
            found = count(tile, Layout("", place), ACCESSES[access])
        except ValueError:
            continue  # a tile smaller than what a warp reads at once
        if found.wavefronts > found.free:
            yield (
                f"bank conflicts: {times} load{'s' * (times > 1)} of a {rows} x {columns} tile from shared memory with vec "
                f"{vector}, perPhase {per_phase}, maxPhase {max_phase}, {found.ways:g} times as many wavefronts as without"
            )


# ---- as JSON and as text


def facts(reports: list[Report]) -> dict:
    """The Reports as a JSON object, without the instructions themselves."""
    return {"what": "audit", "kernels": [report.as_json() for report in reports]}


def listing(reports: list[Report]) -> str:
    """The main loop of every part, as text."""
    pieces = []
    for report in reports:
        for part in report.parts:
            head = f"// {report.name}, {report.arch}: main loop of {part.name}, {len(part.loop)} instructions"
            pieces.append("\n".join([head, *map(str, part.loop)]))
    return "\n\n".join(pieces) + "\n"
