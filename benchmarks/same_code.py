"""Whether two versions of Strobe compile to the same machine code, problem by problem; on a machine without a GPU.

A version is a revision of git, or a folder that holds a `strobe` package, itself or in `src`: "." is the working tree. Both
compile each problem of `same_code_probe.py`, on each Triton, with the config that their dispatch would choose. Same means the
same PTX but for comments, line numbers and names of functions, and the same grid, warps, shared memory and descriptors. Other
PTX may be arguments in another order alone. So ptxas compiles it, and same then means the same instructions and registers, but
for the places of arguments in the constant bank ("moved" in the table).
What it does not see is which numbers and addresses the host code hands to a kernel, and how long it takes to.

With `--json` the proof is added to those in the file, with the hashes of the kernels' sources in both versions. A result that
was measured with the sources of OLD then counts as fresh with those of NEW (`strobe.lab.pages.sources.changed`).

    python benchmarks/same_code.py HEAD~1 . [--kernels "sm90 forward,portable"] [--tritons installed,.venv/triton-3.6]
        [--diffs FOLDER] [--cache FOLDER] [--json benchmarks/results/same-code.json]
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import same_code_probe as probe
from compare_versions import ROOT, unpacked
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from strobe.lab.bench.machine import provenance, save
from strobe.lab.pages import sources

OLDEST_TRITON = Path(sys.prefix) / "triton-3.6"
INSTALLED = "installed"


# ---- what is the same


_NO_CODE = re.compile(r"^\s*\.section\s+\.debug\w*\s*\{.*?^\s*\}|/\*.*?\*/|//[^\n]*", re.DOTALL | re.MULTILINE)
_NO_CODE_LINE = re.compile(r"\s*(\.loc\s|\.file\s|\$L__(tmp|func_begin|func_end|info_string|debug)\w*:\s*$)")
_FUNCTION = re.compile(r"^\s*((?:\.(?:visible|weak|extern)\s+)?)\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", re.MULTILINE)


_SCALAR = re.compile(r"^(\.param )\.[usf](\d+ \w+,?)$", re.MULTILINE)


def normalised(ptx: str) -> str:
    """PTX without comments, debug lines, what functions are called (the first one is `function_0` in every version; what is
    defined elsewhere keeps its name), and of scalar parameters the type, as that stands in the instruction that loads it."""
    code = "\n".join(line.strip() for line in _NO_CODE.sub("", ptx).splitlines() if not _NO_CODE_LINE.match(line))
    names = dict.fromkeys(name for link, name in _FUNCTION.findall(code) if ".extern" not in link)
    if names:
        numbers = {name: f"function_{i}" for i, name in enumerate(names)}
        longest_first = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        code = re.sub(rf"(?<![\w$])({longest_first})(?![\w$])|(?<![\w$])({longest_first})(?=_param_\d)",
                      lambda found: numbers[found[1] or found[2]], code)  # fmt: skip
    code = _SCALAR.sub(r"\1.b\2", code)
    return re.sub(r"\n{2,}", "\n", code).strip() + "\n"


ARGUMENTS = {"sm_80": 0x160, "sm_90a": 0x210, "sm_100a": 0x380}
"""Where the arguments of a kernel begin in constant bank 0."""


def without_places(sass: str, first: int) -> str:
    """Machine code in which an argument, in the bank from a byte on, has the number of its first use instead of its place."""
    places: dict[int, int] = {}

    def numbered(found: re.Match) -> str:
        place = int(found[1], 16)
        return found[0] if place < first else f"argument_{places.setdefault(place, len(places))}"

    return re.sub(r"c\[0x0\]\[(0x[0-9a-f]+)\]", numbered, sass)


def ptxas_of(target: str, compiler: str) -> str:
    """The name of the ptxas that a Triton takes for a target, from its compiler's text: the newer one from some arch on."""
    least = re.search(r"def get_ptxas\(.*?\barch (?:<|>=) (\d+)", compiler, re.DOTALL)
    arch = re.search(r"\d+", target)
    assert least is not None and arch is not None
    return "ptxas-blackwell" if int(arch[0]) >= int(least[1]) else "ptxas"


def machine_code(ptx: str, tools: Path) -> str:
    """SASS of normalised PTX by the ptxas of a folder, without the places of arguments."""
    target, compiler = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0], (tools.parent / "compiler.py").read_text()
    ptxas = tools / ptxas_of(target, compiler)
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        flags = re.findall(r"--regAllocOptLevel=\d", compiler)  # as this Triton does
        command = [ptxas, *flags, f"--gpu-name={target}", source, "-o", cubin]
        subprocess.run(command, check=True, capture_output=True)
        sass = subprocess.run([tools / "nvdisasm", "-c", cubin], check=True, capture_output=True, text=True).stdout
    return without_places(sass, ARGUMENTS[target])


class Launch(NamedTuple):
    """facts: as JSON, those of `probe.FACTS` and, of a main launch, the grid."""

    name: str
    facts: str
    code: str

    @property
    def is_main(self) -> bool:
        return self.name.startswith("main ")


class Compiled(NamedTuple):
    """What a version made of a case. missing: why its small launches are not all there."""

    launches: tuple[Launch, ...] = ()
    error: str | None = None
    missing: str | None = None


class Verdict(NamedTuple):
    """What differs between two versions, in words, and the difference in full; what only one of them has compiled; the launches
    whose machine code is the same but for the places of arguments."""

    differ: tuple[str, ...] = ()
    diff: str = ""
    alone: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()


def compared(old: Compiled, new: Compiled, machine_code: Callable[[str], str]) -> Verdict:
    """All main launches must be the same, and the small ones that both versions have compiled. machine_code: of PTX, asked for
    where that differs."""
    errors = [f"{side} does not compile: {each.error}" for side, each in (("OLD", old), ("NEW", new)) if each.error]
    if errors:
        return Verdict(tuple(errors))
    pairs, alone = [], [f"{side}: {each.missing}" for side, each in (("OLD", old), ("NEW", new)) if each.missing]
    mains = [[launch for launch in each.launches if launch.is_main] for each in (old, new)]
    if len(mains[0]) != len(mains[1]):
        return Verdict((f"{len(mains[0])} main kernels became {len(mains[1])}",))
    pairs += zip(*mains, strict=True)
    small = [{launch.name: launch for launch in each.launches if not launch.is_main} for each in (old, new)]
    pairs += [(launch, small[1][name]) for name, launch in small[0].items() if name in small[1]]
    alone += [f"{side}: {name}" for side, a, b in (("OLD", *small), ("NEW", *small[::-1])) for name in a if name not in b]
    found, moved = [], []
    for before, after in pairs:
        found += _other_facts(before, after)
        if before.code != after.code:
            made = [machine_code(each.code) for each in (before, after)]
            if made[0] == made[1]:
                moved.append(after.name)
            else:
                found.append(_other_code(before, after, *made))
    return Verdict(tuple(told for told, _ in found), "\n".join(diff for _, diff in found), tuple(alone), tuple(moved))


def _other_facts(old: Launch, new: Launch) -> Iterable[tuple[str, str]]:
    """In words, and as a difference."""
    if old.facts != new.facts:
        facts = [json.loads(each.facts) for each in (old, new)]
        for name in sorted({*facts[0], *facts[1]}):
            before, after = (each.get(name) for each in facts)
            if before != after:
                yield f"{new.name}: {name} {before} became {after}", f"{new.name}: {name}\n- {before}\n+ {after}\n"


_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


def _other_code(old: Launch, new: Launch, *sass: str) -> tuple[str, str]:
    """In words, with the instructions that there are more or fewer of, and as a difference of PTX."""
    texts = [each.code.splitlines() for each in (old, new)]
    lines = list(difflib.unified_diff(*texts, f"OLD {old.name}", f"NEW {new.name}", lineterm="", n=2))
    changed = sum(line[:1] in "+-" for line in lines[2:])
    before, after = (Counter(_INSTRUCTION.findall(text)) for text in sass)
    more = [f"{after[name] - before[name]:+} {name}" for name in sorted({*before, *after}) if before[name] != after[name]]
    counts = f"{', '.join(more) or 'the same number of each instruction'}, of {before.total()}"
    return f"{new.name}: {changed} lines of PTX differ; {counts}", "\n".join(lines)


# ---- compiling


def compiled_by(
    folder: Path, triton: str, kernels: list[str], cache: Path, done: Callable[[probe.Case, Compiled], None]
) -> str:
    """Compiles the cases with the version in a folder, on a Triton, and returns which Triton that is. done: told of each case.
    cache: Triton's."""
    with tempfile.TemporaryDirectory() as out:
        paths = [*([] if triton == INSTALLED else [str(Path(triton).resolve())]), str(folder)]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "TRITON_CACHE_DIR": str(cache),
            "TRITON_DISABLE_LINE_INFO": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command, version = [sys.executable, str(Path(probe.__file__)), out, *kernels], ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for text in process.stdout:
                line = json.loads(text)
                version = line["triton"]
                done(probe.CASES[line["case"]], _read(line, Path(out)))
        if process.returncode:
            sys.exit(f"what compiles {folder} on Triton {triton} failed, with status {process.returncode}")
        return version


def _read(line: dict, folder: Path) -> Compiled:
    if "error" in line:
        return Compiled(error=line["error"])
    launches = []
    for i, (name, facts) in enumerate(line["launches"]):
        path = folder / f"{line['case']}-{i}.ptx"
        launches.append(Launch(name, json.dumps(facts, sort_keys=True), normalised(path.read_text())))
        path.unlink()
    return Compiled(tuple(launches), missing=line["missing"])


# ---- the proof


Verdicts = dict[str, dict[probe.Case, Verdict]]
"""Triton's version -> case -> verdict."""


def proof_of(old: Path, new: Path, commits: tuple[str, str], verdicts: Verdicts) -> dict:
    """One entry of the file's `proofs`. old, new: folders with a `strobe` package."""
    packages = [sources.texts_in(folder / "strobe") for folder in (old, new)]
    kernels = {}
    for kernel in dict.fromkeys(case.kernel for cases in verdicts.values() for case in cases):
        of_kernel = [
            (f"{case}, Triton {triton}", verdict)
            for triton, cases in verdicts.items()
            for case, verdict in cases.items()
            if case.kernel == kernel
        ]
        before, after = (sources.made_of(files, kernel) for files in packages)
        kernels[kernel] = {
            "tritons": [triton for triton, cases in verdicts.items() if any(case.kernel == kernel for case in cases)],
            "compared": len(of_kernel),
            "differ": [f"{name}: {'; '.join(verdict.differ)}" for name, verdict in of_kernel if verdict.differ],
            "moved": [name for name, verdict in of_kernel if verdict.moved],
            "only in one": sorted({name for _, verdict in of_kernel for name in verdict.alone}),
            "old": before,
            "new": after,
        }
    return {"old": commits[0], "new": commits[1], "kernels": kernels}


def commit_of(version: str) -> str:
    """Of a revision, or of a folder in a repository: with "+" if its source was changed since."""
    folder = Path(version) if Path(version).is_dir() else ROOT

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True).stdout.strip()

    if folder is ROOT:
        return git("rev-parse", "--short=10", version)
    return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "--", "src", "strobe") else "")


def write(path: Path, proof: dict) -> None:
    """Adds a proof to a file, in the place of what an earlier one of the same two versions says of the same kernels."""
    earlier = json.loads(path.read_text())["proofs"] if path.exists() else []
    versions = proof["old"], proof["new"]
    kept = [each for each in earlier if (each["old"], each["new"]) != versions]
    for same in (each for each in earlier if each not in kept):
        proof = {**proof, "kernels": same["kernels"] | proof["kernels"]}
    save(path, {"what": "same code", **provenance("compiled for GPUs that are not there"), "proofs": [*kept, proof]})


def table(verdicts: Verdicts) -> Table:
    shown = Table("kernel", "problem", *(f"Triton {version}" for version in verdicts), box=None)
    for case in dict.fromkeys(case for cases in verdicts.values() for case in cases):
        words = [_word(cases.get(case)) for cases in verdicts.values()]
        shown.add_row(case.kernel, str(case), *words)
    return shown


def _word(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    same = "same, moved" if verdict.moved else "same"
    return "[red]differs[/]" if verdict.differ else same + " *" * bool(verdict.alone)


def told(verdicts: Verdicts, lines: int = 12) -> Iterable[str]:
    """What differs, each with the first lines of it, and what could not be compared."""
    for version, cases in verdicts.items():
        for case, verdict in cases.items():
            if verdict.differ:
                head = "\n".join(verdict.diff.splitlines()[:lines])
                yield f"{case.kernel}: {case}, Triton {version}: {'; '.join(verdict.differ)}\n{head}"
    alone = sorted({f"{case.kernel}: {name}" for cases in verdicts.values() for case, v in cases.items() for name in v.alone})
    if alone:
        yield "* compiled in one version only, so not compared:\n" + "\n".join(alone)


def keep_diffs(folder: Path, verdicts: Verdicts) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for version, cases in verdicts.items():
        for case, verdict in cases.items():
            if verdict.diff:
                name = re.sub(r"\W+", "-", f"{case.kernel} {case} triton {version}")
                (folder / f"{name}.diff").write_text(verdict.diff)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("--kernels", default=",".join(dict.fromkeys(case.kernel for case in probe.CASES)))
    default = ",".join([INSTALLED, *([str(OLDEST_TRITON)] if OLDEST_TRITON.exists() else [])])
    parser.add_argument("--tritons", default=default, help="folders with a triton package, or the word installed")
    parser.add_argument("--diffs", type=Path, help="a folder for what differs")
    parser.add_argument("--cache", type=Path, help="a folder for what is compiled of commits: a later run takes it from there")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.kernels, options.tritons = options.kernels.split(","), options.tritons.split(",")
    if unknown := [kernel for kernel in options.kernels if kernel not in sources.KERNELS]:
        parser.error(f"a kernel must be one of {', '.join(sources.KERNELS)}, got {unknown[0]!r}")
    return options


class Version(NamedTuple):
    """folder: holds its `strobe` package. cache: where Triton keeps what this version compiles."""

    name: str
    commit: str
    folder: Path
    cache: Path

    @classmethod
    def of(cls, name: str, given: str, parent: Path, cache: Path | None) -> Version:
        """Unpacked below a parent. What an earlier run has compiled is used for a commit, not for changes that are in none."""
        folder, commit = Path(tempfile.mkdtemp(dir=parent)), commit_of(given)
        unpacked(given, folder)
        kept = None if cache is None or not commit or commit.endswith("+") else cache / commit
        return cls(name, commit, folder, kept or Path(tempfile.mkdtemp(dir=parent)))


def tools_of(triton: str) -> Path:
    """The folder of a Triton's ptxas."""
    package = Path(triton) / "triton"
    if triton == INSTALLED:
        found = importlib.util.find_spec("triton")
        assert found is not None and found.origin is not None
        package = Path(found.origin).parent
    return package / "backends" / "nvidia" / "bin"


def verdicts_of(old: Version, new: Version, triton: str, kernels: list[str], console: Console) -> Verdicts:
    """Of one Triton. What differs is printed as soon as it is known."""
    total, before, found = sum(case.kernel in kernels for case in probe.CASES), {}, {}
    tools = tools_of(triton)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks = [progress.add_task(version.name, total=total) for version in (old, new)]

        def keep(case: probe.Case, compiled: Compiled) -> None:
            before[case] = compiled
            progress.advance(tasks[0])

        def compare(case: probe.Case, compiled: Compiled) -> None:
            found[case] = compared(before.pop(case), compiled, lambda ptx: machine_code(ptx, tools))
            progress.advance(tasks[1])
            if found[case].differ:
                progress.console.print(f"{case.kernel}: {case}: {'; '.join(found[case].differ)}", markup=False, highlight=False)

        for version, task, done in zip((old, new), tasks, (keep, compare), strict=True):
            number = compiled_by(version.folder, triton, kernels, version.cache, done)
            progress.update(task, total=progress.tasks[task].completed)  # an old Triton has fewer cases
    return {number: found}


def main() -> None:
    options, console = parsed(), Console()
    with tempfile.TemporaryDirectory() as folder:
        sides = (("OLD", options.old), ("NEW", options.new))
        old, new = (Version.of(name, given, Path(folder), options.cache) for name, given in sides)
        verdicts: Verdicts = {}
        for triton in options.tritons:
            console.print(f"{old.commit} and {new.commit} on Triton {Path(triton).name}", highlight=False)
            verdicts |= verdicts_of(old, new, triton, options.kernels, console)
        proof = proof_of(old.folder, new.folder, (old.commit, new.commit), verdicts)
    console.print(table(verdicts))
    for text in told(verdicts):
        console.print(text, markup=False, highlight=False)
    for kernel, facts in proof["kernels"].items():
        console.print(f"{kernel}: {facts['compared']} compared, {len(facts['differ'])} differ")
    if options.diffs:
        keep_diffs(options.diffs, verdicts)
    if options.json:
        write(options.json, proof)
    sys.exit(any(facts["differ"] for facts in proof["kernels"].values()))


if __name__ == "__main__":
    main()
