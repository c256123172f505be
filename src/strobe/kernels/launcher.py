"""Launch compiled kernels, Triton or Gluon, again and again with little host time.

`kernel[grid](...)` binds, specialises and converts every argument in every call. A caller whose next call differs from the
last in nothing but addresses needs none of that: `prepare` does it once, for kernels that are launched one after the other,
and a launch writes the addresses, and the TMA descriptors of these addresses, into memory that is laid out for the driver
already. Kernels that take the same tensors read them from the same place, so nothing is written twice.

Which parameters the compiled kernel has is Triton's affair. `parameters` derives them from the signature, as the launchers
of Triton 3.6 to 3.9 do, and compares their sizes with those in the kernel's own PTX. Whatever it does not know, or finds to
differ, is launched by Triton.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from strobe.recent import Made

log = logging.getLogger("strobe")

Launch = Callable[..., None]
"""launch(addresses): of tensors in place of those that it was prepared with, in their order. For one thread at a time."""

Tensors = Sequence["torch.Tensor"]

_CODES = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
"""Triton's type of a number -> its code in `struct`."""

_ADDRESS = "Q"
_DESCRIPTOR = "128s"


class Unknown(Exception):
    """Why only Triton knows how to launch a kernel."""


class Call(NamedTuple):
    """`kernel[grid](*arguments, **keywords)`, compiled (see `compiled_call`) but not launched."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    keywords: dict
    compiled: Any


def compiled_call(kernel, grid: Sequence[int], *arguments, **keywords) -> Call:
    """The Call of a kernel, compiled on the current device where it was not yet. Threads may compile at once."""
    _parse_in_turn()
    compiled = kernel.warmup(*arguments, grid=grid, **keywords)
    return Call(kernel, (*grid, 1, 1)[:3], arguments, keywords, compiled)


@functools.cache
def _parse_in_turn() -> None:
    """From now on threads parse kernels, and what these call, one at a time.

    CPython 3.11 counts how deep it is in what it parses in one place for all threads. If a garbage collection lets another one
    parse in the middle, both fail with a SystemError, and Triton, which was about to hash a function's source, takes a hash
    without any source for it from then on."""
    from triton.runtime.jit import JITCallable

    theirs = JITCallable.parse

    def parse(self):
        with _parsing:
            return theirs(self)

    JITCallable.parse = parse


_parsing = threading.RLock()
"""One for all: two threads that come to `_parse_in_turn` at once wrap what the other one wrapped, or what both found."""


def prepare(calls: Sequence[Call], tensors: Tensors) -> Prepared:
    """Calls in a row, to be made with the addresses of other tensors: prepare(...).on(stream) is a Launch.

    tensors: all those in the arguments, also in tuples and TMA descriptors, each an object of its own. The others must have the
        same shapes, strides and dtypes, addresses that are multiples of 16 where these have such, and the same device, which
        must be the current one.

    ValueError if an argument holds a tensor that is not in `tensors`.
    """
    try:
        device = torch.cuda.current_device()
        kernels = [(call.compiled, function(call.compiled, device), call.grid, all_arguments(call)) for call in calls]
        return PreparedLaunches(kernels, tensors)
    except (Unknown, AttributeError, KeyError, TypeError) as reason:
        names = ", ".join(call.compiled.name for call in calls)
        _warn(f"{names} is launched by Triton, which takes more host time: {reason}")
        return ThroughTriton(calls, tensors)


def all_arguments(call: Call) -> list:
    """A value for each parameter of the source, None for one that is not given."""
    names = call.compiled.src.signature
    values = {**dict(zip(names, call.arguments, strict=False)), **call.keywords}
    return [values.get(name) for name in names]


@functools.cache
def function(compiled, device: int) -> int:
    """The driver's handle of a compiled kernel, loaded on a device, which must be the current one.

    Triton's own way, `_init_handles`, makes a launcher too, for which Triton 3.6 runs a C compiler; here nobody needs it."""
    if compiled.module is not None:
        return compiled.function
    from triton.runtime import driver

    _module, found, *_ = driver.active.utils.load_binary(compiled.name, compiled.kernel, compiled.metadata.shared, device)
    return found


@functools.cache
def _warn(message: str) -> None:
    log.warning(message)


def maker(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that makes tensors like this one, with nothing in them, on its device, which must be the current one.

    It is what PyTorch's compiled code calls: past the dispatcher, it takes 0.5 us where `empty_like` takes 0.7 (on a CPU)."""
    guards: Any = torch._C._dynamo.guards
    make = guards._empty_strided_cuda if like.is_cuda else guards._empty_strided_cpu
    return functools.partial(make, tuple(like.shape), like.stride(), like.dtype)


# ---- what a kernel takes


class Parameter(NamedTuple):
    """code: of `struct`. value: a number, a tensor whose address it is, or a Descriptor."""

    code: str
    value: Any


class Descriptor(NamedTuple):
    """A TMA descriptor as the host gives it, and what the compiler says of it."""

    given: Any
    meta: dict


def parameters(compiled, arguments: Sequence[Any]) -> list[Parameter]:
    """The parameters of a compiled kernel, in its order, given all arguments of the source. Unknown if the PTX has others."""
    metadata = compiled.metadata
    if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
        raise Unknown("it has clusters or scratch memory")
    descriptors = iter(metadata.tensordesc_meta or ())
    scratch = (Parameter(_ADDRESS, None), Parameter(_ADDRESS, None))  # global and of the profiler
    found = [*_flat(compiled.src.signature.values(), arguments, descriptors), *scratch]
    if any(isinstance(value, Descriptor) for _, value in found) and metadata.target.arch != 90:
        raise Unknown("descriptors of Blackwell need corrections that depend on the driver's version")
    sizes = [struct.calcsize(code) for code, _ in found]
    if sizes != ptx_sizes(compiled.asm["ptx"], compiled.name):
        raise Unknown("its parameters are not laid out as those of Triton 3.6 to 3.9")
    return found


def _flat(kinds: Iterable, arguments: Iterable, descriptors: Iterator[dict]) -> Iterator[Parameter]:
    """A parameter for each leaf of a signature; a TMA descriptor is followed by its shape and its strides."""
    for kind, argument in zip(kinds, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, argument, descriptors)
        elif kind.startswith("tensordesc"):
            yield Parameter(_DESCRIPTOR, Descriptor(argument, next(descriptors, {})))
            yield from (Parameter("i", size) for size in argument.shape)
            yield from (Parameter("q", stride) for stride in argument.strides)
        elif kind.startswith("*"):
            yield Parameter(_ADDRESS, argument)
        elif kind != "constexpr":
            if kind not in _CODES:
                raise Unknown(f"it takes a number of type {kind}")
            yield Parameter(_CODES[kind], argument)


def ptx_sizes(ptx: str, name: str) -> list[int]:
    """The sizes in bytes of a kernel's parameters, from lines such as `.param .u32 f_param_1` and
    `.param .align 64 .b8 f_param_0[128]`."""
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\((.*?)\)", ptx, re.DOTALL)
    if entry is None:
        raise Unknown(f"its PTX has no entry of the name {name}")
    found = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)\s[^,\[]*(?:\[(\d+)\])?", entry.group(1))
    return [int(bits) // 8 * int(count or 1) for bits, count in found]


# ---- TMA descriptors

_ELEMENT_TYPES = {8: 10, 9: 8, 10: 9}
"""Compiler's numbers of float16, float32, ... -> the driver's, where they differ."""


def encoder(descriptor: Descriptor) -> Made[int, bytes]:
    """[address] -> the TMA descriptor of a tensor that begins there; those of some addresses are kept."""
    given, meta = descriptor
    if meta.get("fp4_padded") or meta.get("is_im2col") or getattr(given, "round_f32_to_tf32", False):
        raise Unknown("it has a TMA descriptor of a rare kind")
    rank, driver = len(given.shape), _driver()
    innermost_first = (
        (ctypes.c_uint64 * rank)(*reversed(given.shape)),
        (ctypes.c_uint64 * max(1, rank - 1))(*(meta["elem_size"] * stride for stride in reversed(given.strides[:-1]))),
        (ctypes.c_uint32 * rank)(*reversed(meta["block_size"])),
        (ctypes.c_uint32 * rank)(*(1 for _ in range(rank))),
    )
    element_type = _ELEMENT_TYPES.get(meta["elem_type"], meta["elem_type"])
    interleave, swizzle, promote_to_128_bytes, fill = 0, meta["swizzle"], 2, int(given.padding == "nan")

    def encode(address: int) -> bytes:
        _memory, start = _aligned(128)
        driver.call(
            "cuTensorMapEncodeTiled", start, element_type, rank, address, *innermost_first, interleave, swizzle,
            promote_to_128_bytes, fill,
        )  # fmt: skip
        return ctypes.string_at(start, 128)

    return Made(256, encode)


def _aligned(size: int) -> tuple[ctypes.Array, int]:
    """Memory and an address in it that is a multiple of 64, as the driver wants descriptors."""
    memory = ctypes.create_string_buffer(size + 63)
    return memory, -(-ctypes.addressof(memory) // 64) * 64


# ---- launches


class PreparedLaunches:
    """Kernels with all their arguments but the addresses, launched one after the other.

    The driver takes a config and an array of pointers to the parameters. All of them lie in a frame:

        configs, 64 bytes each | TMA descriptors | addresses of the tensors | numbers

    of which a launch writes the descriptors and the addresses, by one `struct.pack_into`, unless they are the last launch's. A
    frame belongs to one stream.
    """

    _CONFIG = struct.Struct("<7I4xQQI12x")
    """CUlaunchConfig: grid, block, shared memory; stream, attributes and their number."""

    def __init__(self, kernels: Iterable[tuple[Any, int, Sequence[int], Sequence[Any]]], tensors: Tensors):
        """kernels: each compiled, with the driver's function, its grid and all arguments of its source."""
        found = [(compiled, handle, grid, parameters(compiled, values)) for compiled, handle, grid, values in kernels]
        found = [kernel for kernel in found if 0 not in kernel[2]]  # an empty grid launches nothing
        descriptors = [value for *_, leaves in found for _, value in leaves if isinstance(value, Descriptor)]
        # What is kept of tensors is their places, not they: they are a user's, and large.
        self.described = [(_slot(descriptor.given.base, tensors), encoder(descriptor)) for descriptor in descriptors]
        """The place of each descriptor's tensor, and its encoder."""
        self.written = struct.Struct(f"<{_DESCRIPTOR * len(descriptors)}{len(tensors)}{_ADDRESS}")
        self._begin = 64 * len(found)
        self._numbers: list[Parameter] = []
        self._kernels = []
        at_descriptor, at_addresses = self._begin, self._begin + 128 * len(descriptors)
        at_numbers = self._begin + self.written.size
        for compiled, handle, grid, leaves in found:
            offsets = []
            for leaf in leaves:
                if isinstance(leaf.value, Descriptor):
                    offsets.append(at_descriptor)
                    at_descriptor += 128
                elif isinstance(leaf.value, torch.Tensor):
                    offsets.append(at_addresses + 8 * _slot(leaf.value, tensors))
                else:
                    offsets.append(at_numbers + 8 * len(self._numbers))
                    self._numbers.append(leaf)
            self._kernels.append(_Kernel.of(compiled, handle, grid, offsets))
        self._size = at_numbers + 8 * len(self._numbers)

    def on(self, stream: int) -> Launch:
        return _Frame(self, stream).launch

    def lay_out(self, stream: int) -> tuple[ctypes.Array, int, list[tuple]]:
        """A frame's memory, the place in it where launches write, and the driver's arguments of each."""
        memory, start = _aligned(self._size)
        offset = start - ctypes.addressof(memory)
        for place, (code, value) in enumerate(self._numbers):
            struct.pack_into(f"<{code}", memory, offset + self._begin + self.written.size + 8 * place, value or 0)
        launches = []
        for place, kernel in enumerate(self._kernels):
            attributes = ctypes.addressof(kernel.attributes), ctypes.sizeof(kernel.attributes) // 72
            self._CONFIG.pack_into(memory, offset + 64 * place, *kernel.shape, stream, *attributes)
            pointers = (ctypes.c_void_p * len(kernel.offsets))(*(start + at for at in kernel.offsets))
            launches.append((ctypes.c_void_p(start + 64 * place), kernel.function, pointers, None))
        return memory, offset + self._begin, launches


class _Kernel(NamedTuple):
    """What a launch needs of a compiled kernel, which may own the module. offsets: of its parameters in a frame."""

    compiled: Any
    function: ctypes.c_void_p
    shape: tuple[int, ...]
    attributes: ctypes.Array
    offsets: list[int]

    @classmethod
    def of(cls, compiled, handle: int, grid: Sequence[int], offsets: list[int]) -> _Kernel:
        metadata = compiled.metadata
        shape = (*grid, metadata.num_warps * metadata.warp_size, 1, 1, metadata.shared)
        return cls(compiled, ctypes.c_void_p(handle), shape, _attributes(metadata), offsets)


class _Frame:
    """Memory for a Launch. The driver reads what it wrote before it returns: two threads need two frames, or a lock."""

    def __init__(self, prepared: PreparedLaunches, stream: int):
        self._prepared = prepared  # it owns what the frame points to
        self._described, self._write, self._driver = prepared.described, prepared.written.pack_into, _driver()
        self._memory, self._begin, self._launches = prepared.lay_out(stream)
        self._written: tuple[int, ...] | None = None

    def launch(self, addresses: tuple[int, ...]) -> None:
        if addresses != self._written:  # a model's next step often finds its tensors where they were
            described = [encoded[addresses[slot]] for slot, encoded in self._described]
            self._write(self._memory, self._begin, *described, *addresses)
            self._written = addresses
        launch = self._driver.launch
        for config, function, pointers, extra in self._launches:
            status = launch(config, function, pointers, extra)
            if status:
                self._driver.call("cuLaunchKernelEx", config, function, pointers, extra, status=status)


def _slot(tensor: torch.Tensor, tensors: Tensors) -> int:
    for slot, other in enumerate(tensors):
        if other is tensor:
            return slot
    raise ValueError(f"every tensor of a prepared launch must be given, got none for one of shape {list(tensor.shape)}")


def _attributes(metadata) -> ctypes.Array:
    """Of a launch. Each CUlaunchAttribute is a number and 64 bytes for a value."""
    cooperative, programmatic_serialization = 2, 6
    chosen = [(cooperative, metadata.launch_cooperative_grid), (programmatic_serialization, metadata.launch_pdl)]
    packed = b"".join(struct.pack("<I4xI60x", number, 1) for number, wanted in chosen if wanted)
    return (ctypes.c_char * len(packed)).from_buffer_copy(packed)


class _At:
    """A tensor as Triton sees one."""

    def __init__(self, like: torch.Tensor, address: int):
        self.dtype, self._address = like.dtype, address

    def data_ptr(self) -> int:
        return self._address


class ThroughTriton:
    """Calls by Triton's own way, on the current stream."""

    def __init__(self, calls: Sequence[Call], tensors: Tensors):
        self._calls, self._tensors = calls, tensors

    def on(self, stream: int) -> Launch:
        return self._launch

    def _launch(self, addresses: tuple[int, ...]) -> None:
        now = {id(x): _At(x, at) for x, at in zip(self._tensors, addresses, strict=True)}
        for kernel, grid, arguments, keywords, _ in self._calls:
            kernel[grid](*_swap(arguments, now), **{name: _swap(value, now) for name, value in keywords.items()})


Prepared = PreparedLaunches | ThroughTriton


def _swap(value, now: dict[int, _At]):
    """An argument with other tensors."""
    if isinstance(value, torch.Tensor):
        return now[id(value)]
    if isinstance(value, tuple):
        parts = [_swap(part, now) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return replace(value, base=now[id(value.base)]) if hasattr(value, "block_shape") else value


# ---- the driver


_INVALID_CONTEXT = 201
_TYPES = {
    "cuTensorMapEncodeTiled": (
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, *4 * (ctypes.c_void_p,), *4 * (ctypes.c_int,),
    ),
    "cuDevicePrimaryCtxRetain": (ctypes.c_void_p, ctypes.c_int),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuGetErrorString": (ctypes.c_int, ctypes.c_void_p),
}  # fmt: skip
"""Of the arguments of the driver's functions."""


class Driver:
    """CUDA's driver, by ctypes."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        for name, types in _TYPES.items():
            getattr(library, name).argtypes = types
        self.launch = library.cuLaunchKernelEx
        """(config, function, pointers, None) as ctypes' objects -> status: without argtypes, which take time."""

    def call(self, name: str, *arguments, status: int | None = None) -> None:
        """Call a function, again if a first call already gave `status`; RuntimeError if it fails.

        A thread that has not used the GPU yet has no context: then it gets one, and the call is made again."""
        function = getattr(self._library, name)
        status = function(*arguments) if status is None else status
        if status == _INVALID_CONTEXT:
            self._enter_context()
            status = function(*arguments)
        if status:
            raise RuntimeError(f"{name} failed: {self._text(status)}")

    def _enter_context(self) -> None:
        context = ctypes.c_void_p()
        self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device())
        self._library.cuCtxSetCurrent(context)

    def _text(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(text))
        return (text.value or b"unknown error").decode()


@functools.cache
def _driver() -> Driver:
    return Driver(ctypes.CDLL("libcuda.so.1"))
