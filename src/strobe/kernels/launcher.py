"""Launch a compiled kernel, Triton or Gluon, again and again with little host time.

`kernel[grid](...)` binds, specialises and converts every argument in every call. A caller whose next call differs from the
last in nothing but addresses needs none of that: `prepare` does it once, and a `PreparedLaunch` writes the addresses, and
the TMA descriptors of these addresses, into memory that is laid out for the driver already.

Which parameters the compiled kernel has is Triton's affair. `parameters` derives them from the signature, as the launchers
of Triton 3.6 to 3.9 do, and compares their sizes with those in the kernel's own PTX. Whatever it does not know, or finds to
differ, is launched by Triton.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

log = logging.getLogger("strobe")

Launch = Callable[..., None]
"""launch(stream, *addresses): the handle of the current stream; addresses of tensors in place of those that it was prepared
with, None for None."""

Tensors = Sequence["torch.Tensor | None"]

_CODES = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
"""Triton's type of a number -> its code in `struct`."""

_ADDRESS = "Q"
_DESCRIPTOR = "128s"


class Unknown(Exception):
    """Why only Triton knows how to launch a kernel."""


def prepare(kernel, grid: Sequence[int], tensors: Tensors, *arguments, **keywords) -> Launch:
    """`kernel[grid](*arguments, **keywords)`, compiled but not launched, to be called with the addresses of other tensors.

    tensors: all those in the arguments, also in tuples and TMA descriptors, each an object of its own; and None where a
        caller has an optional one. The others must have the same shapes, strides and dtypes, addresses that are multiples of
        16 where these have such, and the same device, which must be the current one.

    ValueError if an argument holds a tensor that is not in `tensors`.
    """
    grid = (*grid, 1, 1)[:3]
    compiled = kernel.warmup(*arguments, grid=grid, **keywords)
    try:
        compiled._init_handles()
        values = {**dict(zip(compiled.src.signature, arguments, strict=False)), **keywords}
        return PreparedLaunch(compiled, grid, [values.get(name) for name in compiled.src.signature], tensors)
    except (Unknown, AttributeError, KeyError) as reason:
        _warn(f"{compiled.name} is launched by Triton, which takes more host time: {reason}")
        return _through_triton(kernel, grid, tensors, arguments, keywords)


@functools.cache
def _warn(message: str) -> None:
    log.warning(message)


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


def encoder(descriptor: Descriptor) -> Callable[[int], bytes]:
    """Address -> the TMA descriptor of a tensor that begins there; those of the last addresses are kept."""
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

    @functools.lru_cache(maxsize=64)
    def encode(address: int) -> bytes:
        _memory, start = _aligned(128)
        driver.call(
            "cuTensorMapEncodeTiled", start, element_type, rank, address, *innermost_first, interleave, swizzle,
            promote_to_128_bytes, fill,
        )  # fmt: skip
        return ctypes.string_at(start, 128)

    return encode


def _aligned(size: int) -> tuple[ctypes.Array, int]:
    """Memory and an address in it that is a multiple of 64, as the driver wants descriptors."""
    memory = ctypes.create_string_buffer(size + 63)
    return memory, -(-ctypes.addressof(memory) // 64) * 64


# ---- launches


class PreparedLaunch:
    """A kernel with all its arguments but the addresses: a Launch, for any thread.

    The driver takes a config and an array of pointers to the parameters. Both lie in a frame:

        config, 64 bytes | TMA descriptors | addresses | numbers

    of which a call writes the stream and what depends on addresses, by one `struct.pack_into`.
    """

    _CONFIG = struct.Struct("<7I4xQQI")
    """CUlaunchConfig: grid, block, shared memory; stream, attributes and their number."""
    _STREAM = 32
    """Where in it the part begins that a call writes."""

    def __init__(self, compiled, grid: Sequence[int], arguments: Sequence[Any], tensors: Tensors):
        found = parameters(compiled, arguments)
        metadata = compiled.metadata
        self._compiled = compiled  # it owns the module
        self._function = ctypes.c_void_p(compiled.function)
        self._driver = _driver()
        self._empty = 0 in grid
        self._fixed = (*grid, metadata.num_warps * metadata.warp_size, 1, 1, metadata.shared)
        self._kept = _attributes(metadata)
        self._attributes, self._number = ctypes.addressof(self._kept), ctypes.sizeof(self._kept) // 72
        # Places in `found`: descriptors first, which have to lie at multiples of 64.
        descriptors = [place for place, (_, value) in enumerate(found) if isinstance(value, Descriptor)]
        addresses = [place for place, (_, value) in enumerate(found) if isinstance(value, torch.Tensor)]
        numbers = [place for place in range(len(found)) if place not in {*descriptors, *addresses}]
        self._described = [(_slot(found[i].value.given.base, tensors), encoder(found[i].value)) for i in descriptors]
        self._addressed = [_slot(found[i].value, tensors) for i in addresses]
        self._written = struct.Struct(f"<QQI12x{_DESCRIPTOR * len(descriptors)}{len(addresses)}{_ADDRESS}")
        self._numbers = [(found[i].code, found[i].value or 0) for i in numbers]
        sizes = [128] * len(descriptors) + [8] * (len(addresses) + len(numbers))
        offsets = dict(zip((*descriptors, *addresses, *numbers), itertools.accumulate(sizes, initial=64), strict=False))
        self._offsets = [offsets[place] for place in range(len(found))]
        self._size = 64 + sum(sizes)
        self._frames = [self._frame()]

    def __call__(self, stream: int, *addresses: Any) -> None:
        if self._empty:
            return
        try:
            frame = self._frames.pop()
        except IndexError:  # as many threads are in here as there are frames
            frame = self._frame()
        memory, begin, config, pointers = frame
        described = [encode(addresses[slot]) for slot, encode in self._described]
        self._written.pack_into(
            memory, begin, stream, self._attributes, self._number, *described, *[addresses[slot] for slot in self._addressed]
        )
        status = self._driver.launch(config, self._function, pointers, None)
        if status:
            self._driver.call("cuLaunchKernelEx", config, self._function, pointers, None, status=status)
        self._frames.append(frame)

    def _frame(self) -> tuple[ctypes.Array, int, ctypes.c_void_p, ctypes.Array]:
        """Memory, the place in it where a call writes, and the driver's arguments."""
        memory, start = _aligned(self._size)
        offset = start - ctypes.addressof(memory)
        self._CONFIG.pack_into(memory, offset, *self._fixed, 0, 0, 0)
        first = self._size - 8 * len(self._numbers)
        for place, (code, value) in enumerate(self._numbers):
            struct.pack_into(f"<{code}", memory, offset + first + 8 * place, value)
        pointers = (ctypes.c_void_p * len(self._offsets))(*(start + at for at in self._offsets))
        return memory, offset + self._STREAM, ctypes.c_void_p(start), pointers


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


def _through_triton(kernel, grid: Sequence[int], tensors: Tensors, arguments, keywords) -> Launch:
    """A Launch by Triton's own way."""

    def launch(stream: int, *addresses: int | None) -> None:
        now = {id(x): _At(x, at) for x, at in zip(tensors, addresses, strict=True) if x is not None and at is not None}
        swapped = {name: _swap(value, now) for name, value in keywords.items()}
        kernel[grid](*_swap(tuple(arguments), now), **swapped)

    return launch


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
