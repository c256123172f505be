"""`strobe doctor`: what is here, which backends run and why the others do not, whether results are right, and what to do."""

from __future__ import annotations

import importlib
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import strobe
from strobe.call import dispatch
from strobe.call.precompiled import MOVED_CACHE, read_mark
from strobe.device import Arch, arch_of
from strobe.masks import Causal, Full, Mask, Window
from strobe.problem import AttentionProblem, Dense, Operands
from strobe.reference import dense
from strobe_cli.precompile import versions

PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flash-attn-3", "flash-attn-4")
VARIABLES = (
    "STROBE_DEBUG", "STROBE_TUNING", "TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""Environment variables that change what Strobe does."""

SECONDS = 10.0
"""After this long the self test begins no further case."""

_LARGE_CACHE = 10 << 30


def examine(seconds: float = SECONDS) -> dict[str, Any]:
    """Everything that `strobe doctor` says, as one JSON object. seconds: after this long the self test begins no other case."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arch = arch_of(device)
    found: dict[str, Any] = {
        "what": "doctor",
        "versions": {"strobe": strobe.__version__, "python": platform.python_version(), **{x: _version(x) for x in PACKAGES}},
        "system": platform.platform(),
        "torch_cuda": torch.version.cuda,
        "device": _device(arch, device),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "doors": _doors(),
        "backends": [_backend(name, arch) for name in dispatch.BACKENDS],
        "self_test": list(_self_test(device, seconds)),
        "cache": _cache(),
    }
    return found | {"advice": list(_advice(found))}


def passed(found: dict[str, Any]) -> bool:
    """Whether the self test found nothing wrong."""
    return all(case["failure"] is None for case in found["self_test"])


def text(found: dict[str, Any]) -> str:
    """What `examine` found, for people."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items() if number is not None)
    device = ", ".join(f"{x}" if name == "name" else f"{name} {x}" for name, x in found["device"].items() if x is not None)
    lines = [f"versions  {versions}", f"system    {found['system']}", f"device    {device}"]
    lines += [f"variable  {name}={value}" for name, value in found["environment"].items()]
    for one in found["backends"]:
        lines.append(f"backend   {one['name']}: {'runs' if one['reason'] is None else one['reason']}")
    lines += [f"door      {name}: {state}" for name, state in found["doors"].items()]
    for case in found["self_test"]:
        outcome = case["failure"] or (
            "left out, the time was over"
            if case["error"] is None
            else f"error {case['error']:.1e} of at most {case['limit']:g}"
        )
        lines.append(f"self test {case['name']} on {case['backend']}: {outcome}, {case['seconds']:.1f} s")
    cache = found["cache"]
    lines.append(f"cache     {cache['folder']}, {cache['bytes'] / 2**20:.0f} MiB in {cache['files']} files")
    if cache["precompiled"]:
        lines.append(f"          precompiled for {cache['precompiled']['arch']} by {cache['precompiled']['command']}")
    return "\n".join([*lines, *(f"advice    {sentence}" for sentence in found["advice"] or ["nothing is wrong"])])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device(arch: Arch, device: torch.device) -> dict[str, Any]:
    if not arch.is_gpu:
        return {"name": arch.name, "threads": torch.get_num_threads()}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": arch.name, "capability": arch.capability, "multiprocessors": arch.sms, "gpus": torch.cuda.device_count(),
        "free_memory_gib": round(free / 2**30, 1), "memory_gib": round(total / 2**30, 1),
    }  # fmt: skip


def _doors() -> dict[str, str]:
    """Which ways into Strobe are open here."""
    impls = getattr(torch.nn.attention, "list_flash_attention_impls", None)
    active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    flash = "this PyTorch takes no implementations (2.11 and later do)" if impls is None else "offered, not active"
    transformers = _version("transformers")
    return {
        "PyTorch's flash backend": "active" if active == "strobe" else flash,
        "transformers": "not installed" if transformers is None else "attn_implementation='strobe' after register()",
    }


def _problem(arch: Arch) -> AttentionProblem:
    """An ordinary forward, of what the device is best at."""
    dtype = torch.bfloat16 if arch.is_gpu else torch.float32
    return AttentionProblem(Dense(1, 1024, 1024), 8, 8, 128, 128, dtype, 128**-0.5, mask=Causal())


def _backend(name: str, arch: Arch) -> dict[str, Any]:
    problem = _problem(arch)
    if name in dispatch.OF_E4M3:
        problem = replace(problem, dtype=torch.float8_e4m3fn)
    try:
        module = dispatch.backend_module(name)
        reason = module.refuses(problem, arch)
        if reason is None and (words := dispatch.unproven(name, problem, arch)):
            reason = f"runs by name only: {words}"
    except ImportError as error:
        reason = f"cannot be imported: {error}"
    return {"name": name, "reason": reason}


# ---- the self test

_CASES: dict[str, tuple[int, int, int, Mask]] = {
    "plain": (4, 4, 64, Full()),
    "causal, GQA": (8, 2, 128, Causal()),
    "window": (4, 4, 128, Window(60, 0)),
}
"""Name -> heads of queries and of keys, head dim, mask."""


def _self_test(device: torch.device, seconds: float) -> Iterator[dict[str, Any]]:
    """Forward and backward of small problems beside the specification in float64."""
    begin = time.monotonic()
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, (heads, heads_kv, dim, mask) in _CASES.items():
        shapes = (1, 200, heads, dim), (1, 200, heads_kv, dim), (1, 200, heads_kv, dim)
        problem = AttentionProblem(Dense(1, 200, 200), heads, heads_kv, dim, dim, dtype, dim**-0.5, mask=mask)
        case: dict[str, Any] = {
            "name": name, "backend": dispatch.explain_problem(problem, arch_of(device)).chosen, "error": None,
            "limit": 1e-4 if dtype == torch.float32 else 2e-2, "seconds": 0.0, "failure": None,
        }  # fmt: skip
        start = time.monotonic()
        if start - begin < seconds:
            tensors = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes]
            try:
                case["error"] = _error(problem, tensors)
                if not case["error"] <= case["limit"]:
                    case["failure"] = f"WRONG: error {case['error']:.1e} where at most {case['limit']:g} is right"
            except Exception as error:  # whatever it is, the doctor reports it
                case["failure"] = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            case["seconds"] = round(time.monotonic() - start, 2)
        yield case


def _error(problem: AttentionProblem, tensors: list[torch.Tensor]) -> float:
    """The largest error of out and the gradients, in units of the largest number of each."""
    ours = [x.clone().requires_grad_() for x in tensors]
    exact = [x.double().requires_grad_() for x in tensors]
    out = strobe.attention(*ours, mask=problem.mask, scale=problem.scale)
    expected, _ = dense.attention(problem, Operands(*exact))
    upstream = torch.ones_like(out) + out.detach()
    grads = torch.autograd.grad(out, ours, upstream)
    expected_grads = torch.autograd.grad(expected, exact, upstream.double())
    pairs = zip((out, *grads), (expected, *expected_grads), strict=True)
    errors = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs]
    return float("nan") if any(x != x for x in errors) else max(errors)


# ---- the cache, and advice


def _cache() -> dict[str, Any]:
    """The folder in which Triton keeps compiled kernels, and what is in it."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    above = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(above, os.W_OK)
    return {
        "folder": str(folder), "files": len(sizes), "bytes": sum(sizes), "writable": writable, "precompiled": read_mark(folder),
    }  # fmt: skip


def _advice(found: dict[str, Any]) -> Iterator[str]:
    """What to do about what is wrong, one sentence for each."""
    gpu = "capability" in found["device"]
    if not gpu and found["torch_cuda"] is None:
        yield "this PyTorch is built without CUDA, so Strobe runs on the CPU: for an NVIDIA GPU install one with CUDA"
    elif not gpu:
        yield "PyTorch sees no GPU, so Strobe runs on the CPU: check nvidia-smi, the driver and CUDA_VISIBLE_DEVICES"
    if not _imports("triton"):
        yield "Triton cannot be imported, and GPUs need it: pip install 'triton>=3.6'"
    if gpu and found["device"]["free_memory_gib"] < 1.0:
        yield "less than 1 GiB of the GPU's memory is free: end what else runs there"
    if found["environment"].get("TRITON_INTERPRET", "0") not in ("", "0"):
        yield "TRITON_INTERPRET is set, so portable kernels run in Triton's interpreter, very slowly: unset it"
    if found["environment"].get("STROBE_DEBUG") == "1":
        yield "STROBE_DEBUG=1 checks lengths on the GPU at every call: unset it where speed counts"
    yield from _advice_on_precompiled(found)
    if not found["cache"]["writable"] and found["cache"]["precompiled"] is None:
        folder = found["cache"]["folder"]
        yield f"{folder} cannot be written, so every process compiles: set TRITON_CACHE_DIR to a folder that can"
    if found["cache"]["bytes"] > _LARGE_CACHE:
        yield f"{found['cache']['folder']} is large: it may be deleted, kernels are compiled again when they are needed"
    if any(case["failure"] is None and case["error"] is None for case in found["self_test"]):
        yield "part of the self test was left out, as kernels were compiled: run strobe doctor again, they are kept"
    if not passed(found):
        yield "the self test failed: please report it, with all of this output"


def _advice_on_precompiled(found: dict[str, Any]) -> Iterator[str]:
    """What keeps the kernels that `strobe precompile` made from being found."""
    cache, made = found["cache"], found["cache"]["precompiled"]
    if made is None:
        return
    here = versions()
    for name, number in made["versions"].items():
        if here.get(name) != number:
            yield f"{cache['folder']} was precompiled with {name} {number}, and this is {here.get(name)}: make it anew"
    if Path(made["folder"]) != Path(cache["folder"]).resolve() and os.environ.get("TRITON_CACHE_MANAGER") != MOVED_CACHE:
        yield f"{cache['folder']} was moved, so Triton does not find what is in it: set TRITON_CACHE_MANAGER={MOVED_CACHE}"
    capability = found["device"].get("capability")
    if capability not in (None, made["capability"]):
        yield f"{cache['folder']} was precompiled for {made['arch']}, and this GPU is another: make it anew"


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
