"""`strobe precompile`: the kernels of a model, compiled into a folder for a GPU that need not be there.

What a model's layers ask of attention is read from its config.json: heads, head dims, windows, softcap, sinks, latents. The
calls are described as the public functions describe them, with tensors on the meta device, so that the kernels are those which
the same calls look for later.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import strobe
from strobe.arguments import options_of
from strobe.call import dispatch
from strobe.call.options import describe, operands_of
from strobe.call.precompiled import MARK, MOVED_CACHE, hash_of_sources
from strobe.call.triton_internals import key_of_files
from strobe.device import Arch
from strobe.kernels.common.call import Call, unfilled
from strobe.masks import Causal, Full, Mask, Window
from strobe.scores import Score
from strobe.serving.arguments import checked, checked_append
from strobe.serving.cache import Cache, Rotary
from strobe.serving.problem import describe as describe_decode

_PAGES = 64
"""Pages that a cache pretends to have: kernels do not depend on it."""

_TOKENS = 1 << 18
"""The most tokens of a batch whose config is looked at, if one longest sequence has no more: beyond, none is another."""

_DECODERS = ("CausalLM", "LMHeadModel", "ConditionalGeneration")


@dataclass(frozen=True)
class Layer:
    """What one kind of a model's layers asks of attention."""

    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    mask: Mask
    softcap: float = 0.0
    sinks: bool = False
    latent: tuple[int, int] | None = None
    """Columns of the cached latent, and how many of these are its values (MLA)."""

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}, {self.head_dim_v} for v"
        parts = [f"heads {self.heads} on {self.heads_kv}", f"head dim {dims}", f"mask {self.mask}"]
        parts += [f"softcap {self.softcap:g}"] if self.softcap else []
        parts += ["sinks"] if self.sinks else []
        parts += [f"a latent of {self.latent[0]} columns"] if self.latent else []
        return "; ".join(parts)


def layers_of(config: dict[str, Any]) -> list[Layer]:
    """The kinds of layers of a model, from its config.json; of one that reads more than text, those of its text_config.

    Raises:
        ValueError: the config does not say how many heads there are, or of what head dim.
    """
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    heads = _first(text, "num_attention_heads", "n_head", "num_heads", "n_heads")
    hidden = _first(text, "hidden_size", "n_embd", "d_model", "dim")
    if heads is None or (hidden is None and text.get("head_dim") is None):
        raise ValueError("the config must say num_attention_heads, and head_dim or hidden_size: this one does not")
    names = config.get("architectures") or text.get("architectures") or []
    causal = not names or any(name.endswith(_DECODERS) for name in names)
    dim = dim_v = text.get("head_dim") or (hidden or 0) // heads
    latent = None
    if text.get("kv_lora_rank"):
        rope, rank = text["qk_rope_head_dim"], text["kv_lora_rank"]
        dim, dim_v, latent = text["qk_nope_head_dim"] + rope, text["v_head_dim"], (rank + rope, rank)
    heads_kv = heads if latent else _first(text, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
    softcap = float(text.get("attn_logit_softcapping") or 0.0)
    sinks = "gpt_oss" in (text.get("model_type"), config.get("model_type"))
    base: Mask = Causal() if causal else Full()
    masks = [base & Window(left=window - 1) if window else base for window in _windows(text)]
    return [Layer(heads, heads_kv, dim, dim_v, mask, softcap, sinks, latent) for mask in masks]


def _first(config: dict[str, Any], *names: str) -> int | None:
    """The first of several names that a config has a number under: models call the same thing differently."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _windows(config: dict[str, Any]) -> list[int | None]:
    """The sliding windows of a model's layers, None for a layer that sees everything."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return [None]
    if kinds:
        return [window if "sliding" in kind else None for kind in dict.fromkeys(kinds)]
    return [window, None]  # which layers have it is in the model's code


# ---- the calls of a layer


def attention_calls(
    layer: Layer, arch: Arch, dtype: torch.dtype, batch: int, length: int, trained: bool
) -> Iterator[tuple[str, Call]]:
    """The launches of a layer's attention over `batch` sequences of `length` tokens, and of its backward if it is trained, each
    with the name of its backend."""
    shapes = ((layer.heads, layer.head_dim), (layer.heads_kv, layer.head_dim), (layer.heads_kv, layer.head_dim_v))
    q, k, v = (_meta(batch, length, heads, dim, dtype=dtype) for heads, dim in shapes)
    options = options_of(q, k, v, mask=layer.mask, score=_score(layer, dtype))
    operands = operands_of(q, k, v, options)
    for phase in ("forward", "backward") if trained else ("forward",):
        learned = ("sinks",) if layer.sinks and phase == "backward" else ()
        problem = describe(operands, options, phase, learned)
        module = dispatch.select(problem, arch)
        name = _name(dispatch.explain_problem(problem, arch).chosen, phase)
        tensors = unfilled(problem, module.buffers(problem, arch))
        yield from ((name, call) for call in module.calls(problem, tensors, arch))


def serving_calls(
    layer: Layer, arch: Arch, dtype: torch.dtype, batch: int, prompts: Sequence[int], capacity: int, page_size: int
) -> Iterator[tuple[str, Call]]:
    """The launches of a server's steps over pages: one token of each of `batch` requests, the same packed, and packed prompts
    up to each length, over at most `capacity` keys; and those which write new keys."""
    cache = _cache(layer, dtype, batch, capacity, page_size)
    heads, dim = layer.heads, cache.k.shape[-1]
    yield from _decode_calls(layer, arch, cache, _meta(batch, 1, heads, dim, dtype=dtype), {})
    cu = _meta(batch + 1, dtype=torch.int32)
    for rows in (1, *prompts):
        packed = {"cu_seqlens_q": cu, "max_seqlen_q": rows}
        yield from _decode_calls(layer, arch, cache, _meta(batch * rows, heads, dim, dtype=dtype), packed)
    yield from _append_calls(layer, arch, cache, dtype, batch, cu)


def _decode_calls(layer: Layer, arch: Arch, cache: Cache, q: torch.Tensor, packed: dict) -> Iterator[tuple[str, Call]]:
    from strobe.lab.binary.offline import with_buffers

    operands, options = checked(q, cache, mask=layer.mask, score=_score(layer, q.dtype), **packed)
    operands = operands._replace(out=_meta(*q.shape[:-1], options.head_dim_v, dtype=q.dtype))
    problem = describe_decode(operands, options)
    module = dispatch.select(problem, arch)
    tensors = with_buffers(operands, module.buffers(problem, arch))
    yield from (("decode", call) for call in module.calls(problem, tensors, arch))


def _append_calls(layer: Layer, arch: Arch, cache: Cache, dtype, batch: int, cu: torch.Tensor) -> Iterator[tuple[str, Call]]:
    """The launches that write one new key of each request, and packed ones, with a rotary embedding of the whole head and
    without."""
    from strobe.kernels.decode.append import append_call

    dim = cache.k.shape[-1]
    turns = Rotary(_meta(4096, dim // 2, dtype=dtype), _meta(4096, dim // 2, dtype=dtype))
    for rows, bounds in (((batch, 1), None), ((batch,), cu)):
        for rotary in (turns, None) if layer.latent is None else (None,):
            k, q = _meta(*rows, cache.k.shape[2], dim, dtype=dtype), _meta(*rows, layer.heads, dim, dtype=dtype)
            v = None if cache.v is None else _meta(*rows, cache.v.shape[2], cache.v.shape[3], dtype=dtype)
            turned = q if rotary else None
            bounds_q = bounds if rotary else None
            operands, options = checked_append(cache, k, v, turned, rotary, bounds, bounds_q, None, False)
            yield "append", append_call(operands, options, _meta(batch, dtype=torch.int32), turned, arch)


def _cache(layer: Layer, dtype: torch.dtype, batch: int, length: int, page_size: int) -> Cache:
    lengths, table = _meta(batch, dtype=torch.int32), _meta(batch, -(-length // page_size), dtype=torch.int32)
    if layer.latent is not None:
        columns, values = layer.latent
        return Cache(_meta(_PAGES, page_size, 1, columns, dtype=dtype), None, lengths, table, head_dim_v=values)
    k, v = (_meta(_PAGES, page_size, layer.heads_kv, dim, dtype=dtype) for dim in (layer.head_dim, layer.head_dim_v))
    return Cache(k, v, lengths, table)


def _score(layer: Layer, dtype: torch.dtype) -> Score:
    return Score(layer.softcap, sinks=_meta(layer.heads, dtype=dtype) if layer.sinks else None)


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _name(backend: str | None, phase: str) -> str:
    return f"{backend} {phase}"


# ---- compiling


def precompile(
    layers: Sequence[Layer], arch: Arch, folder: Path, *, dtype: torch.dtype, max_batch: int, max_length: int,
    trained: bool = False, page_size: int | None = None, command: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Compile the kernels of some layers into a folder, which is made, and say what was done.

    Lengths and batches compile nothing by themselves, but they decide which of a few configs runs: so the calls of many of
    them, up to max_length and max_batch, are described, and each kernel that they need is compiled once.

    trained: their backward too. page_size: keys of a cache's page, for serving; None: no cache is served.

    Raises:
        ValueError: a layer that no kernel of the arch runs.
    """
    from strobe.call.launcher import compiled_call
    from strobe.lab.binary.offline import pretend_gpu
    from strobe.lab.progress import each

    start = time.perf_counter()
    calls: dict[tuple, tuple[str, Call]] = {}
    for name, call in _calls(layers, arch, dtype, _sweep(max_batch), _sweep(max_length), trained, page_size):
        calls.setdefault(kind_of(call), (name, call))
    folder.mkdir(parents=True, exist_ok=True)
    with _compiling_into(folder) as there, pretend_gpu(arch.capability), ThreadPoolExecutor(os.cpu_count()) as pool:
        made = [call for _, call in calls.values()]
        begun = [pool.submit(compiled_call, call.kernel, call.grid, *call.arguments, **call.keywords) for call in made]
        for compiling in each(begun, "compiling"):
            compiling.result()
    found = {
        "what": "precompiled",
        "command": command,
        "folder": str(folder.resolve()),
        "arch": arch.name,
        "capability": arch.capability,
        "versions": versions(),
        "triton": key_of_files(),
        "sources": hash_of_sources(),
        "kernels": sorted({(call.kernel.__module__, call.kernel.__name__, call.kernel.cache_key) for call in made}),
        "layers": [str(layer) for layer in layers],
        "dtype": str(dtype).removeprefix("torch."),
        "max_batch": max_batch,
        "max_length": max_length,
        "launches": sorted({name for name, _ in calls.values()}),
        "compiled": there.count(False),
        "there": there.count(True),
        "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        "seconds": round(time.perf_counter() - start, 1),
    }
    (folder / MARK).write_text(json.dumps(found, indent=1) + "\n")
    return found


def _calls(layers, arch, dtype, batches, lengths, trained: bool, page_size: int | None) -> Iterator[tuple[str, Call]]:
    for layer in layers:
        for batch in batches:
            fitting = [length for length in lengths if batch * length <= max(_TOKENS, lengths[-1])]
            for length in fitting:
                yield from attention_calls(layer, arch, dtype, batch, length, trained)
            if page_size is not None:
                yield from serving_calls(layer, arch, dtype, batch, fitting, lengths[-1], page_size)


def _sweep(most: int) -> list[int]:
    """Numbers up to the most, four to a doubling, and those around them: whether 16 divides a number matters to Triton, and how
    many rows the last tile of a sequence has to the choice of a config."""
    steps = {int(2**doublings * quarter / 4) for doublings in range(most.bit_length()) for quarter in range(4, 8)} | {most}
    return sorted({near for step in steps for near in (step, step - 1, step + 1) if 1 <= near <= most})


def kind_of(call: Call) -> tuple:
    """What tells calls apart that are compiled apart; some calls of one kernel too, which Triton then compiles once."""
    named = (f"{name}={x!r}" if name.isupper() else (name, _kind(x)) for name, x in call.keywords.items())
    return (call.kernel, *map(_kind, call.arguments), *named)


def _kind(x: Any) -> Any:
    """What Triton may compile apart for an argument."""
    if isinstance(x, torch.Tensor):
        return x.dtype
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    if type(x) is int:
        return x == 1, x % 16 == 0, x.bit_length() > 31
    if hasattr(x, "block_shape"):  # a descriptor of TMA
        return x.base.dtype, tuple(x.block_shape), repr(x.layout)
    return repr(x)


def versions() -> dict[str, str]:
    """What must be the same where the kernels are used: Triton finds them by its own files and by Strobe's source."""
    return {"strobe": strobe.__version__, "triton": version("triton"), "python": platform.python_version()}


@contextmanager
def _compiling_into(folder: Path) -> Iterator[list[bool]]:
    """Triton's cache is this folder within it. What is returned has an entry for each kernel that was asked for, whether it was
    there already."""
    from triton import knobs

    there: list[bool] = []
    before = {name: os.environ.get(name) for name in ("TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER")}
    listener = knobs.compilation.listener
    os.environ.update(TRITON_CACHE_DIR=str(folder.resolve()), TRITON_CACHE_MANAGER=MOVED_CACHE)
    knobs.compilation.listener = lambda *, cache_hit, **_: there.append(cache_hit)
    try:
        yield there
    finally:
        knobs.compilation.listener = listener
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def text(made: dict[str, Any]) -> str:
    """What `precompile` did, for people."""
    lines = [f"layer     {layer}" for layer in made["layers"]]
    lines.append(f"launches  {', '.join(made['launches'])}")
    lines.append(
        f"kernels   {made['compiled']} compiled, {made['there']} there already, {made['bytes'] / 2**20:.0f} MiB, "
        f"{made['seconds']:.0f} s"
    )
    lines.append(f"to use    TRITON_CACHE_DIR={made['folder']}, or where it is copied to")
    lines.append(f"          TRITON_CACHE_MANAGER={MOVED_CACHE}")
    return "\n".join(lines)
