"""What one version of Strobe compiles for `CASES`: the part of `same_code.py` that runs within that version.

The version is the one that comes first on PYTHONPATH. It uses what versions have in common: the public `explain`, which says
what problem a call is, and the functions of the lab's `offline`, which choose configs as the dispatch does. Beside the main
kernels of a case it compiles the small ones around them, as far as this version tells which these are. ptxas does not run: it
makes the same of the same PTX.

    python benchmarks/same_code_probe.py FOLDER [KERNEL ...]

prints a line of JSON for each case, and writes the PTX of each launch to a file in the folder.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

LENGTH = 4096
BATCH = 256
"""Enough tiles of one head to fill any GPU."""


class Case(NamedTuple):
    """A call of `strobe.attention` in words; each word of `others` is one of `_keywords` or of `_problem`. Or one of
    `strobe.decode`, of kernel "decode", with words of `_step`."""

    kernel: str
    head_dims: tuple[int, int]
    mask: str = "full"
    others: tuple[str, ...] = ()
    backward: bool = False

    def __str__(self) -> str:
        dims = f"{self.head_dims[0]}" if self.head_dims[0] == self.head_dims[1] else f"{self.head_dims}"
        return ", ".join(["backward" if self.backward else "forward", dims, self.mask, *self.others])


HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
MASKS = ("full", "causal", "window")
VARIANTS = (
    ("fp16",),
    ("cut",),
    ("varlen",),
    ("gqa",),
    ("gqa", "varlen"),
    ("seqused",),
    ("softcap",),
    ("alibi", "sinks"),
    ("softcap", "bias", "documents"),
    ("functions",),
    ("dropout",),
)
"""Each of causal attention of head dim 128."""
STEPS = (
    ("page 16",),
    ("page 64",),
    ("one request", "page 64"),
    ("4 queries", "page 64"),
    ("16 queries", "page 64"),
    ("16 queries", "page 16"),
    ("e4m3", "page 64"),
    ("tree", "4 queries"),
    ("deterministic", "page 64"),
    ("one request", "16 queries", "page 64"),
    ("8 requests", "16 queries", "page 64"),
    ("16 queries",),
    ("16 queries", "e4m3", "page 64"),
    ("one request", "4 queries", "e4m3", "page 64"),
    ("16 queries", "deterministic", "page 64"),
    ("one request", "1024 keys", "deterministic", "page 64"),
)
STEPS_OF_OTHER_DIMS = (
    ("one request", "page 64"),
    ("4 queries", "page 64"),
    ("16 queries", "page 64"),
    ("16 queries", "page 16"),
    ("4 queries", "e4m3", "page 64"),
)
FEW_VARIANTS = (("gqa", "varlen"), ("softcap", "bias", "documents"), ("functions",))


def _cases(kernel: str, head_dims, masks=MASKS, variants=(), backward=False) -> list[Case]:
    plain = [Case(kernel, dims, mask, (), backward) for dims in head_dims for mask in masks]
    return plain + [Case(kernel, (128, 128), "causal", words, backward) for words in variants]


CASES = [
    *_cases("sm90 forward", HEAD_DIMS, variants=[*VARIANTS, ("decode",)]),
    *_cases("sm90 backward", HEAD_DIMS, variants=[*VARIANTS, ("deterministic",)], backward=True),
    Case("sm90 backward", (64, 64), "full", ("deterministic",), backward=True),
    Case("sm90 backward", (256, 256), "causal", ("softcap", "bias", "documents"), backward=True),
    Case("sm90 backward", (256, 256), "causal", ("varlen",), backward=True),
    *_cases("sm90 fp8", ((64, 64), (128, 128), (256, 256)), ("full", "causal"), [("varlen",), ("gqa",)]),
    *_cases("portable", ((64, 64), (128, 128)), variants=FEW_VARIANTS),
    *_cases("portable", ((64, 64), (128, 128)), variants=FEW_VARIANTS, backward=True),
    *_cases("sm80 forward", ((64, 64), (128, 128)), variants=FEW_VARIANTS),
    *_cases("sm80 backward", ((64, 64), (128, 128)), variants=FEW_VARIANTS, backward=True),
    *_cases("decode", ((64, 64), (128, 128), (256, 256)), ("causal",), STEPS),
    *(Case("decode", (dim, dim), "causal", words) for dim in (64, 256) for words in STEPS_OF_OTHER_DIMS),
    *(Case("decode", (576, 512), "causal", words) for words in (("page 64",), ("one request", "page 64"))),
    *_cases("sm100 forward", ((64, 64), (128, 128)), variants=[("gqa", "varlen"), ("decode",)]),
]
ARCHS = {"portable": "A100", "sm80 forward": "A100", "sm80 backward": "A100", "sm100 forward": "B200"}
"""Those that aren't for an H200."""

BACKENDS = {
    "sm90 forward": "strobe.kernels.sm90.backend",
    "sm90 backward": "strobe.kernels.sm90.backend",
    "sm90 fp8": "strobe.kernels.sm90.fp8_backend",
    "portable": "strobe.kernels.portable.backend",
    "sm80 forward": "strobe.kernels.sm80.backend",
    "sm80 backward": "strobe.kernels.sm80.backend",
    "decode": "strobe.kernels.decode.backend",
    "sm100 forward": "strobe.kernels.sm100.backend",
}
OLDEST = {"sm100 forward": (3, 8)}
"""The first Triton that compiles a kernel, where that is not the first of all."""

FACTS = (
    *("num_warps", "num_ctas", "cluster_dims", "shared", "tmem_size", "launch_pdl", "launch_cooperative_grid", "maxnreg"),
    *("global_scratch_size", "profile_scratch_size", "tensordesc_meta"),
)
"""What Triton says of a kernel beside its PTX."""


# ---- what may differ between versions: how a problem is made, where the functions are that compile


def _problem(case: Case) -> Any:
    """The AttentionProblem of this version, or its DecodeProblem, from the public `explain`, on tensors without data."""
    import torch

    import strobe

    if case.kernel == "decode":
        with contextlib.redirect_stdout(io.StringIO()):
            q, cache, keywords = _step(case)
            return strobe.explain(q, cache, **keywords).problem
    length_q = 1 if "decode" in case.others else 1000 if "cut" in case.others else LENGTH
    length = 1000 if "cut" in case.others else LENGTH
    batch = 2 if "decode" in case.others else BATCH
    heads, heads_kv = (8, 2) if "gqa" in case.others else (1, 1)
    dtype = torch.float16 if "fp16" in case.others else torch.bfloat16

    def new(length: int, heads: int, dim: int):
        shape = (batch * length,) if "varlen" in case.others else (batch, length)
        return torch.empty(*shape, heads, dim, dtype=dtype, device="meta", requires_grad=case.backward)

    dim, dim_v = case.head_dims
    q, k, v = new(length_q, heads, dim), new(length, heads_kv, dim), new(length, heads_kv, dim_v)
    with contextlib.redirect_stdout(io.StringIO()):
        found = strobe.explain(q, k, v, **_keywords(case, batch, heads, length_q, length))
    problem = found.backward.problem if case.backward else found.problem
    return replace(problem, dtype=torch.float8_e4m3fn) if case.kernel == "sm90 fp8" else problem


def _keywords(case: Case, batch: int, heads: int, length_q: int, length: int) -> dict:
    import torch

    import strobe

    def new(*shape: int, dtype=torch.float32, learned: bool = False):
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=learned)

    mask = {"full": strobe.Full(), "causal": strobe.Causal(), "window": strobe.Window(1023, 0)}[case.mask]
    score: dict[str, Any] = {}
    keywords: dict[str, Any] = {}
    if "varlen" in case.others:
        starts = new(batch + 1, dtype=torch.int32)
        keywords |= dict(cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=length_q, max_seqlen_kv=length)
    if "seqused" in case.others:
        keywords |= dict(seqused_q=new(batch, dtype=torch.int32), seqused_kv=new(batch, dtype=torch.int32))
    if "softcap" in case.others:
        score |= dict(softcap=30.0)
    if "alibi" in case.others:
        score |= dict(alibi=new(heads))
    if "sinks" in case.others:
        score |= dict(sinks=new(heads, learned=case.backward))
    if "bias" in case.others:
        score |= dict(bias=new(batch, heads, length_q, length, dtype=torch.bfloat16, learned=case.backward))
    if "documents" in case.others:
        mask &= strobe.Document(new(batch, length, dtype=torch.int32))
    if "functions" in case.others:
        mask &= strobe.Visible(_sparse)
        score |= dict(function=_steeper, function_gradient=_steeper_gradient)
    if "dropout" in case.others:
        keywords |= dict(dropout_p=0.1)
    return keywords | dict(mask=mask, score=strobe.Score(**score), deterministic="deterministic" in case.others)


def _step(case: Case) -> tuple[Any, Any, dict]:
    """q, a cache and keywords of `strobe.decode`: 16 heads on 2, keys enough that all multiprocessors have work where the case
    does not say how many."""
    import torch

    import strobe

    def numbers(word: str, default: int) -> int:
        return next((int(n) for each in case.others for n in each.split() if n.isdigit() and word in each), default)

    def new(*shape: int, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    batch = numbers("requests", 1 if "one request" in case.others else BATCH)
    length = numbers("keys", LENGTH)
    queries, page, (dim, dim_v) = numbers("queries", 1), numbers("page", length), case.head_dims
    table = new(batch, length // page, dtype=torch.int32) if page < length else None
    kind = torch.float8_e4m3fn if "e4m3" in case.others else torch.bfloat16
    k = new(batch * length // page, page, 2, dim, dtype=kind)
    v = new(*k.shape, dtype=kind) if dim == dim_v else None
    cache = strobe.Cache(k, v, new(batch, dtype=torch.int32), table, head_dim_v=None if dim == dim_v else dim_v)
    keywords: dict[str, Any] = dict(out=new(batch, queries, 16, dim_v), deterministic="deterministic" in case.others)
    if "tree" in case.others:
        keywords["tree"] = new(queries, queries, dtype=torch.bool)
    return new(batch, queries, 16, dim), cache, keywords


def _decode_tensors(case: Case, problem: Any, arch: Any) -> Any:
    """The tensors of a decode's call, without data."""
    import torch

    call = importlib.import_module("strobe.kernels.common.call")
    checked, (q, cache, keywords) = importlib.import_module("strobe.serving.arguments").checked, _step(case)
    buffers = importlib.import_module(BACKENDS[case.kernel]).buffers(problem, arch)
    made = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in {**buffers.made, **buffers.shared}.items()}
    return call.Tensors(**{**made, **checked(q, cache, **keywords)[0]._asdict()})


def _sparse(batch, head, i, j):
    return (i + j + head) % 3 != 0


def _steeper(score, batch, head, i, j):
    return score * 1.5 + 0.01 * (i - j)


def _steeper_gradient(score, batch, head, i, j):
    return 1.5 + 0.0 * score


def _first(*names: str) -> Any:
    """The first module of these that this version has."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ModuleNotFoundError(f"this version has none of {', '.join(names)}")


def _compile_main(case: Case, problem: Any, arch: Any) -> list:
    """The compiled kernels of a case whose speed is the kernel's."""
    offline = _first("strobe.lab.binary.offline", "strobe.lab.offline")
    if case.kernel == "decode":
        calls = importlib.import_module(BACKENDS[case.kernel]).calls(problem, _decode_tensors(case, problem, arch), arch)
        with offline.pretend_gpu(arch.capability):
            return [call.compile() for call in calls]
    name = case.kernel.replace(" ", "_") if case.kernel != "portable" else "portable_" + str(case).partition(",")[0]
    return [made.kernel for made in getattr(offline, name)(problem, arch)]


def _make_calls(case: Case, problem: Any, arch: Any) -> None:
    """Makes the `Call` of each launch of a case, or compiles what has none, as far as `_compile_main` has not done so."""
    if case.kernel == "decode":
        return  # its one launch is the main one
    backend = _first(BACKENDS[case.kernel], "strobe.kernels.sm90.fp8")
    if hasattr(backend, "calls"):
        unfilled = importlib.import_module("strobe.kernels.common.call").unfilled
        backend.calls(problem, unfilled(problem, backend.buffers(problem, arch)), arch)
    elif case.kernel in ("sm90 forward", "sm90 fp8") or case.backward:
        _make_calls_by_hand(case, problem)


def _make_calls_by_hand(case: Case, problem: Any) -> None:
    """`_make_calls` in versions whose backends have no `calls`."""
    import torch

    from strobe.kernels.common.arguments import meta, meta_operands
    from strobe.kernels.common.documents import new_spans, spans_call
    from strobe.problem import lse_shape

    operands, lse = meta_operands(problem), meta(*lse_shape(problem), dtype=torch.float32)
    out = meta(*operands.q.shape[:-1], problem.head_dim_v, dtype=problem.dtype)
    documents = problem.mask.documents
    if case.kernel == "sm90 forward":
        portable = importlib.import_module("strobe.kernels.portable.forward")
        notes, count = meta(64, dtype=torch.int32), meta(1, dtype=torch.int32)
        spans = None if documents is None else new_spans(documents.q)
        if spans is not None:
            spans_call(documents.q, documents.kv, spans)
        grid, keywords = portable.redo_arguments(problem, operands, out, lse, notes, 64, count, spans)
        portable._redo.warmup(grid=grid, **keywords)
    elif case.kernel == "sm90 fp8":
        fp8 = importlib.import_module("strobe.kernels.sm90.fp8")
        grid, arguments, constants, _ = fp8.transpose_arguments(problem, operands)
        fp8.transpose_kernel.warmup(*arguments, grid=grid, **constants)
    elif case.kernel == "portable":
        importlib.import_module("strobe.kernels.portable.backward").delta_call(problem, out, out, None, lse)


def _pretend_arch(arch: Any) -> None:
    """Tensors without data are on this GPU, for `strobe.device.arch_of` and whoever imported that."""
    device = importlib.import_module("strobe.device")
    for module in [device, *(module for name, module in sys.modules.items() if name.startswith("strobe."))]:
        if hasattr(module, "arch_of"):
            module.arch_of = lambda _device: arch  # type: ignore[attr-defined]


# ---- what is the same in all of them


class Launches:
    """Within it, whatever Triton compiles ahead (`warmup`), and the `Call`s that were made for other kernels."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, tuple | None, Any]] = []
        """Kernel, grid, what became of it."""
        self._calls: list[Any] = []

    def __enter__(self) -> Launches:
        from triton.runtime.jit import JITFunction

        from strobe.kernels.common.call import Call

        self._undo = [(JITFunction, "run", JITFunction.run), (Call, "__new__", Call.__new__)]
        run, new = JITFunction.run, Call.__new__

        def spied_run(kernel, *args, grid, warmup, **keywords):
            compiled = run(kernel, *args, grid=grid, warmup=warmup, **keywords)
            self.compiled.append((kernel, grid if isinstance(grid, tuple) else None, compiled))
            return compiled

        def spied_new(cls, *args, **keywords):
            self._calls.append(new(cls, *args, **keywords))
            return self._calls[-1]

        JITFunction.run, Call.__new__ = spied_run, spied_new  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *raised) -> None:
        for owner, name, value in self._undo:
            setattr(owner, name, value)

    def compile_calls(self) -> None:
        for kernel, grid, arguments, keywords, *_ in self._calls:
            if not any(kernel is known for known, _, _ in self.compiled):
                kernel.warmup(*arguments, grid=grid, **keywords)


def compiled(case: Case) -> tuple[list[tuple[str, dict, str]], str | None]:
    """Name, facts and PTX of each launch of a case, the main ones first; and why the small ones are not all there, if so."""
    device = importlib.import_module("strobe.device")
    offline = _first("strobe.lab.binary.offline", "strobe.lab.offline")
    arch, problem, missing = device.KNOWN[ARCHS.get(case.kernel, "H200")], _problem(case), None
    _pretend_arch(arch)
    with Launches() as launches:
        main = _compile_main(case, problem, arch)
        try:
            with offline.pretend_gpu(arch.capability):
                _make_calls(case, problem, arch)
                launches.compile_calls()
        except Exception as error:  # another version's way to launch, which is told and not hidden
            missing = f"{type(error).__name__}: {error}"
    number = {id(kernel): i for i, kernel in enumerate(main)}
    found = sorted(launches.compiled, key=lambda launch: number.get(id(launch[2]), len(main)))
    return [
        (f"main {kernel.fn.__name__}", _facts(made) | {"grid": grid}, made.asm["ptx"])
        if id(made) in number
        else (kernel.fn.__name__, _facts(made), made.asm["ptx"])
        for kernel, grid, made in found
    ], missing


def _facts(made: Any) -> dict:
    facts = {name: getattr(made.metadata, name, None) for name in FACTS}
    return {name: value for name, value in facts.items() if value is not None}


def _without_ptxas() -> None:
    from triton.backends.nvidia.compiler import CUDABackend

    CUDABackend.make_cubin = lambda self, src, metadata, options, capability: b""


def of_triton(version: str, kernels: list[str]) -> list[int]:
    """The numbers of the CASES of some kernels that a Triton compiles."""
    known = tuple(int(part) for part in version.split(".")[:2])
    return [i for i, case in enumerate(CASES) if case.kernel in kernels and known >= OLDEST.get(case.kernel, known)]


def main() -> None:
    import triton

    folder, kernels = Path(sys.argv[1]), sys.argv[2:]
    _without_ptxas()
    for number in of_triton(triton.__version__, kernels or [case.kernel for case in CASES]):
        line: dict[str, Any] = {"case": number, "triton": triton.__version__}
        try:
            launches, line["missing"] = compiled(CASES[number])
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"
        else:
            line["launches"] = [(name, facts) for name, facts, _ in launches]
            for i, (_, _, ptx) in enumerate(launches):
                (folder / f"{number}-{i}.ptx").write_text(ptx)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
