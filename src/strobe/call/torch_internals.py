"""The one file that knows PyTorch's private names: each is looked up once, when this module is imported.

Where a later PyTorch lacks a name, calls are slower or a transform is not supported, but results stay right: a documented
function of PyTorch, or the operator, runs instead, and one line in the log says so. Other files import the names from here.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

log = logging.getLogger("strobe")

_HAS_CUDA = torch.backends.cuda.is_built()


def _private(path: str, instead: str, public: Any = None, expected: bool = True) -> Any:
    """The object at a path in PyTorch; where there is none, `public`, with a line in the log if it was expected to be there."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        if expected:
            _missing(path, instead)
        return public


def _missing(path: str, instead: str) -> None:
    log.warning("PyTorch %s has no %s: %s", torch.__version__, path, instead)


# ---- the current device and stream


def _stream_of(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


current_device: Callable[[], int] = _private(
    "torch._C._cuda_getDevice", "torch.cuda.current_device runs instead", torch.cuda.current_device, _HAS_CUDA
)
raw_stream: Callable[[int], int] = _private(
    "torch._C._cuda_getCurrentRawStream", "torch.cuda.current_stream runs instead", _stream_of, _HAS_CUDA
)
"""raw_stream(device) -> the handle of the device's current stream."""

is_capturing: Callable[[], bool] = _private(
    "torch._C._cuda_isCurrentStreamCapturing",
    "torch.cuda.is_current_stream_capturing runs instead",
    torch.cuda.is_current_stream_capturing,
    _HAS_CUDA,
)


# ---- process groups

group_of_name: Callable[[str], Any] | None = _private(
    "torch.distributed.distributed_c10d._resolve_process_group",
    "strobe.parallel is not compiled",
    expected=torch.distributed.is_available(),
)
"""The process group of a name, as operators take groups."""


# ---- tensors past the dispatcher


def _empty_on(kind: str) -> Callable[..., torch.Tensor]:
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=kind)


empty_strided_cuda: Callable[..., torch.Tensor] = _private(
    "torch._C._dynamo.guards._empty_strided_cuda", "torch.empty_strided runs instead", _empty_on("cuda")
)
empty_strided_cpu: Callable[..., torch.Tensor] = _private(
    "torch._C._dynamo.guards._empty_strided_cpu", "torch.empty_strided runs instead", _empty_on("cpu")
)
"""empty_strided_cpu(shape, strides, dtype) -> an uninitialised tensor. empty_strided_cuda makes one on the current device."""


# ---- what tells calls apart

_OPERATOR = "every call runs the operator, which takes more host time"
_REVERSE = "gradients are torch.library's, in reverse mode, and no transform of torch.func is taken"

_dispatch_modes = _private("torch._C._len_torch_dispatch_stack", _OPERATOR)
_function_modes = _private("torch._C._len_torch_function_stack", _OPERATOR)
_keys = _private("torch._C._dispatch_keys", _OPERATOR)
_included = _private("torch._C._dispatch_tls_local_include_set", _OPERATOR)
_excluded = _private("torch._C._dispatch_tls_local_exclude_set", _OPERATOR)
_guards = _private("torch._C._dynamo.guards.TensorGuards", _OPERATOR)
_level = _private("torch.autograd.forward_ad._current_level", _OPERATOR)
in_functorch: Any = _private("torch._C._are_functorch_transforms_active", f"{_OPERATOR}; {_REVERSE}")
"""Whether a transform of torch.func is active."""


def keys_of(x: torch.Tensor) -> int:
    """The dispatch keys of a tensor, as a number."""
    return _keys(x).raw_repr()


def dispatch_state() -> tuple[int, int]:
    """The state that guards compare beside tensors: inference mode and autocasts, as dispatch keys."""
    return _included().raw_repr(), _excluded().raw_repr()


def guard_of(*tensors: torch.Tensor) -> Callable[..., bool]:
    """A function that takes as many tensors and tells whether they look like these, in all that PyTorch's guards compare."""
    return _guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _tells_calls_apart() -> bool:
    """Whether all names above are there, and do what they did in the versions that we know."""
    if None in (_dispatch_modes, _function_modes, _keys, _included, _excluded, _guards, _level, in_functorch):
        return False
    try:
        x, y = torch.empty(0, device="cpu"), torch.empty(1, device="cpu")
        guard = guard_of(x)
        works = guard(x) and not guard(y) and all(isinstance(number, int) for number in (keys_of(x), *dispatch_state()))
    except (AttributeError, RuntimeError, TypeError):
        works = False
    if not works:
        _missing("guards and dispatch keys as those of 2.9 to 2.13", _OPERATOR)
    return works


def _is_transformed() -> bool:
    return _dispatch_modes() > 0 or _function_modes() > 0 or in_functorch() or forward_ad._current_level >= 0  # type: ignore


is_transformed: Callable[[], bool] = _is_transformed if _tells_calls_apart() else lambda: True
"""Whether something may stand between a call and its kernels: a mode, a transform of functorch, forward gradients."""


# ---- derivatives at dispatch keys

in_dual_level: Callable[[], bool] = (lambda: True) if _level is None else lambda: forward_ad._current_level >= 0  # type: ignore
"""Whether forward-mode AD is active (or may be, where nobody can tell)."""


def _any_leaf(*arguments) -> bool:
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments)


any_requires_grad: Callable[..., bool] = _private("torch._C._any_requires_grad", "Python asks each argument", _any_leaf)
below_autograd: Any = _private("torch._C._AutoDispatchBelowAutograd", _REVERSE)
"""A context in which operators are called without their derivatives."""
set_forward_gradients: Any = _private("torch.autograd.forward_ad._set_fwd_grad_enabled", _REVERSE)
"""set_forward_gradients(True): a context in which forward-mode AD is on."""
single_level: Any = _private("torch._functorch.utils.enable_single_level_autograd_function", _REVERSE)
"""A context in which a SingleLevelFunction may be applied within a transform of torch.func."""
SingleLevelFunction: Any = _private("torch.autograd.function._SingleLevelFunction", _REVERSE, torch.autograd.Function)
"""The class of a derivative that serves one transform of torch.func and calls the operator again for the next one, as PyTorch's
rules for its own operators do."""

_after_autograd = _private("torch._C._after_autograd_keyset", "an operator's call goes through PyTorch's dispatcher twice")


def _next_is_a_kernel(keyset) -> bool:
    kernels = torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA
    return _after_autograd is not None and (keyset & _after_autograd).highestPriorityTypeId() in kernels


_known_keysets: dict[int, bool] = {}


def next_is_a_kernel(keyset) -> bool:
    """Whether the kernel of a CPU or of CUDA comes after autograd's in an operator's call that has these dispatch keys: all its
    tensors are plain, and no mode, no transform and no compiler looks on."""
    number = keyset.raw_repr()
    found = _known_keysets.get(number)
    if found is None:
        found = _known_keysets[number] = _next_is_a_kernel(keyset)
    return found


def bare_apply(function: type[torch.autograd.Function]) -> Callable:
    """`function.apply` without what PyTorch does ahead of it for transforms of torch.func: for calls where none is active, and
    no tensor is left over from one. To ask each argument takes microseconds."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


HAS_RULES = None not in (in_functorch, below_autograd, set_forward_gradients, single_level) and (
    SingleLevelFunction is not torch.autograd.Function
)
"""Whether derivatives can be rules at the operators' dispatch keys."""

is_batched: Callable[[torch.Tensor], bool] = _private(
    "torch._C._functorch.is_batchedtensor", "PyTorch itself refuses what vmap has batched, where it does", lambda x: False
)


# ---- the rest


def _any_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


any_autocast: Callable[[], bool] = _private(
    "torch._C._is_any_autocast_enabled", "torch.is_autocast_enabled runs instead", _any_autocast
)


def _longest(x: torch.Tensor) -> int:
    lengths = x.offsets().diff() if x.lengths() is None else x.lengths()  # type: ignore[attr-defined]
    return int(lengths.max()) if lengths.numel() else 0


def jagged_dim(x: Any) -> int:
    """The dim of a jagged tensor whose size differs from sequence to sequence."""
    if hasattr(x, "_ragged_idx"):
        return x._ragged_idx
    return next(dim for dim, size in enumerate(x.shape) if not isinstance(size, int))


def longest_sequence(x: Any) -> int | None:
    """The length of a jagged tensor's longest sequence. PyTorch keeps it in the tensor, once the device was waited for.
    Compiled code does not wait, and gives None where it is not kept."""
    if torch.compiler.is_compiling():
        return getattr(x, "_maybe_max_seqlen", None)
    return x._get_max_seqlen() if hasattr(x, "_get_max_seqlen") else _longest(x)


def _assert_now(good: torch.Tensor, message: str) -> None:
    if not bool(good):
        raise RuntimeError(message)


assert_async: Callable[[torch.Tensor, str], None] = _private(
    "torch._assert_async", "asserts of STROBE_DEBUG=1 wait for the device", _assert_now
)


def _constant(function: Callable) -> Callable:
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _marks_constants() -> bool:
    """Whether PyTorch's compiler knows the mark of `_constant`. Its source is read, because importing it would take seconds."""
    name = "_dynamo_marked_constant"
    source = Path(torch.__file__).parent / "_dynamo" / "decorators.py"
    if source.exists() and name in source.read_text():
        return True
    _missing(name, "torch.compiler.assume_constant_result runs instead, which imports the compiler")
    return False


constant_when_compiled: Callable[[Callable], Callable] = (
    _constant if _marks_constants() else torch.compiler.assume_constant_result
)
"""Marks a function whose result the compiler may take for a constant, as `torch.compiler.assume_constant_result` does, but that
one imports the whole compiler, and with it Triton."""


@constant_when_compiled
def has_autocast(kind: str) -> bool:
    """Whether torch.autocast knows a kind of device. (PyTorch 2.11's compiler does not know PyTorch's own function, which would
    end its graph.)"""
    return torch.amp.is_autocast_available(kind)
