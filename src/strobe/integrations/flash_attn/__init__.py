"""flash-attn's modules on Strobe: after `strobe.install_as_flash_attn()`, `import flash_attn` finds Strobe.

Code that was written for flash-attn then runs unchanged, transformers' attn_implementation="flash_attention_2" too. The
modules are those of attention: flash_attn, flash_attn.flash_attn_interface, flash_attn.bert_padding,
flash_attn.layers.rotary, flash_attn.cute (FlashAttention-4) and flash_attn_interface (FlashAttention-3). What else flash-attn
has (layers, losses, models) is an ImportError that says so.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from strobe import api
from strobe.integrations.flash_attn import bert_padding, fa3, rotary
from strobe.serving.flash import flash_attn_with_kvcache

VERSIONS = {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0"}
"""The distributions that are stood for, and whose interfaces they are."""

_TOP_LEVEL = {"flash-attn": "flash_attn", "flash-attn-3": "flash_attn_interface", "flash-attn-4": "flash_attn"}


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash-attn's function of this name. qkv [total, 3, heads, D], packed sequences; nothing is copied."""
    _check_packed("qkv", qkv, 3)
    return api.flash_attn_varlen_func(
        qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """flash-attn's function of this name. q [total_q, heads_q, D], kv [total_k, 2, heads_kv, D], packed sequences."""
    _check_packed("kv", kv, 2)
    return api.flash_attn_varlen_func(
        q, kv[:, 0], kv[:, 1], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _check_packed(name: str, x, parts: int) -> None:
    if x.dim() != 4 or x.shape[1] != parts:
        raise ValueError(f"{name} must have shape [total, {parts}, heads, head_dim], got {list(x.shape)}")


FUNCTIONS: dict[str, Callable] = {
    "flash_attn_func": api.flash_attn_func,
    "flash_attn_kvpacked_func": api.flash_attn_kvpacked_func,
    "flash_attn_qkvpacked_func": api.flash_attn_qkvpacked_func,
    "flash_attn_varlen_func": api.flash_attn_varlen_func,
    "flash_attn_varlen_kvpacked_func": flash_attn_varlen_kvpacked_func,
    "flash_attn_varlen_qkvpacked_func": flash_attn_varlen_qkvpacked_func,
    "flash_attn_with_kvcache": flash_attn_with_kvcache,
}
_FA3 = {name: getattr(fa3, name) for name in vars(fa3) if name.startswith(("flash_attn_", "get_"))}
_FA4 = dict(vars(fa3.fa4))


def _public(module: ModuleType) -> dict[str, object]:
    """What a module defines itself under a public name."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }


_MODULES: dict[str, tuple[str, dict[str, object]]] = {
    "flash_attn": (VERSIONS["flash-attn"], FUNCTIONS),  # type: ignore[dict-item]
    "flash_attn.flash_attn_interface": (VERSIONS["flash-attn"], FUNCTIONS),  # type: ignore[dict-item]
    "flash_attn.bert_padding": (VERSIONS["flash-attn"], _public(bert_padding)),
    "flash_attn.layers": (VERSIONS["flash-attn"], {}),
    "flash_attn.layers.rotary": (VERSIONS["flash-attn"], _public(rotary)),
    "flash_attn.cute": (VERSIONS["flash-attn-4"], _FA4),
    "flash_attn.cute.interface": (VERSIONS["flash-attn-4"], _FA4),
    "flash_attn_interface": (VERSIONS["flash-attn-3"], _FA3),  # type: ignore[dict-item]
}
"""The modules, each with its version and its names."""

_INSIDES = frozenset(
    {
        *("FlashAttnFunc", "FlashAttnKVPackedFunc", "FlashAttnQKVPackedFunc", "FlashAttnVarlenFunc"),
        *("FlashAttnVarlenKVPackedFunc", "FlashAttnVarlenQKVPackedFunc", "flash_attn_gpu", "flash_attn_2_cuda"),
        *("_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
        *("IndexFirstAxis", "IndexPutFirstAxis", "IndexFirstAxisResidual"),
        *("ApplyRotaryEmb", "ApplyRotaryEmbKV_", "ApplyRotaryEmbQKV_"),
    }
)
"""Names of flash-attn's modules that its public functions are made of."""

_NOT_ATTENTION = "Strobe stands for flash-attn, and of that for attention alone: it has {}, not {}"


class _Installation(importlib.metadata.DistributionFinder):
    """What stands on sys.meta_path while flash-attn is Strobe: finder of modules and of metadata."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        """Refuse the modules of flash-attn that are not there."""
        if name.partition(".")[0] not in ("flash_attn", "flash_attn_interface"):
            return None
        raise ModuleNotFoundError(_NOT_ATTENTION.format(", ".join(_MODULES), name), name=name)

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()) -> Iterator[_Metadata]:  # noqa: B008
        """The distributions that are stood for, all or the one that is asked for by name."""
        wanted = None if context.name is None else context.name.lower().replace("_", "-")
        return (_Metadata(name) for name in VERSIONS if wanted in (None, name))


class _Metadata(importlib.metadata.Distribution):
    """The metadata of a distribution that Strobe stands for."""

    def __init__(self, name: str):
        self._name = name

    def read_text(self, filename: str) -> str | None:
        """A file of the metadata folder, or None."""
        if filename == "METADATA":
            about = "Strobe, standing for it (strobe.install_as_flash_attn)"
            return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {VERSIONS[self._name]}\nSummary: {about}\n"
        return f"{_TOP_LEVEL[self._name]}\n" if filename == "top_level.txt" else None

    def locate_file(self, path) -> Path:  # type: ignore[override]
        """Where a file of the distribution would be."""
        return Path(__file__).parent / path


class Installed:
    """Flash-attn is Strobe until `uninstall_as_flash_attn`, or until the end of a `with` block."""

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *exception) -> None:
        uninstall_as_flash_attn()


_installation: _Installation | None = None


def install_as_flash_attn() -> Installed:
    """Make `import flash_attn` (and flash_attn_interface, flash_attn.cute, ...) find Strobe, in this process.

    Call it before what imports flash-attn is imported. `importlib.metadata` then knows flash-attn 2.8.3, flash-attn-3 and
    flash-attn-4, so that transformers takes attn_implementation="flash_attention_2" (or _3, _4). It may be used as a context
    manager; what was imported in it goes on working.

    Raises:
        RuntimeError: a flash_attn or flash_attn_interface that is not Strobe is imported already.
    """
    global _installation
    if _installation is not None:
        return Installed()
    real = sorted(name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "flash_attn_interface"))
    if real:
        raise RuntimeError(
            f"{real[0]} is imported already, and it is not Strobe: call install_as_flash_attn() before anything imports it"
        )
    _installation = _Installation()
    sys.meta_path.insert(0, _installation)  # type: ignore[arg-type]
    for name in _MODULES:
        sys.modules[name] = _module(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    _forget_what_transformers_found()
    return Installed()


def uninstall_as_flash_attn() -> None:
    """End `install_as_flash_attn`: `import flash_attn` finds what is installed, or nothing. Without one it does nothing."""
    global _installation
    if _installation is None:
        return
    sys.meta_path.remove(_installation)  # type: ignore[arg-type]
    _installation = None
    for name in _MODULES:
        sys.modules.pop(name, None)
    _forget_what_transformers_found()


def _module(name: str) -> ModuleType:
    version, names = _MODULES[name]
    module = ModuleType(name, f"Strobe's functions under the names of {name}.")
    module.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=True)
    module.__path__ = []
    module.__file__ = __file__
    vars(module).update(names, __version__=version, __all__=sorted(names), __getattr__=partial(_missing, name))
    return module


def _missing(module: str, name: str):
    """Say of what flash-attn's functions are made of that Strobe's are not: an ImportError, which `from ... import` shows."""
    if name in _INSIDES:
        raise ImportError(f"strobe has no {module}.{name}, which is inside of flash-attn's functions: call these", name=module)
    raise AttributeError(f"module {module!r}, which is Strobe's, has no attribute {name!r}")


def _forget_what_transformers_found() -> None:
    """transformers asks once whether flash-attn is there, and remembers it."""
    found = sys.modules.get("transformers.utils.import_utils")
    for name in ("_package_distribution_mapping", *(f"is_flash_attn_{n}_available" for n in (2, 3, 4)), *_ASKED):
        forget = getattr(getattr(found, name, None), "cache_clear", None)
        if forget is not None:
            forget()
    loaded = sys.modules.get("transformers.modeling_flash_attention_utils")
    if getattr(loaded, "_loaded_implementation", None) is not None:
        loaded._loaded_implementation = None  # type: ignore[union-attr]


_ASKED = ("is_flash_attn_greater_or_equal", "is_flash_attn_greater_or_equal_2_10")
