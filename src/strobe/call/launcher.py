"""Launches compiled kernels, Triton or Gluon, again and again with little host time.

`kernel[grid](...)` binds, specialises and converts every argument in every call. A caller whose next call differs from the
last in nothing but addresses needs none of that: `prepare` does it once, for kernels that are launched one after the other,
and a launch writes the addresses, and the TMA descriptors of these addresses, into memory that is laid out for the driver
already. Kernels that take the same tensors read them from the same place, so nothing is written twice.

Triton decides which parameters a compiled kernel has. `parameters` derives them from the signature, as the launchers of Triton
3.6 to 3.9 do, and compares their sizes with those in the kernel's own PTX. On any other version, kernels that write down the
arguments they got must find them all in their places first (`strobe.call.echo`). A kernel that has something unknown, or whose
sizes differ, is launched by Triton.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from strobe.call import triton_internals
from strobe.call.tables import Memo
from strobe.call.torch_internals import empty_strided_cpu, empty_strided_cuda
from strobe.call.triton_internals import Unknown

log = logging.getLogger("strobe")

Launch = Callable[..., None]
"""launch(addresses) launches the kernels with other tensors. addresses: theirs, in the order of the tensors that it was
prepared with. Only one thread may call it at a time."""

Tensors = Sequence["torch.Tensor"]

_CODES = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
"""Triton's type of a number -> its code in `struct`."""

_OTHERWISE = (Unknown, AttributeError, ImportError, KeyError, TypeError, ValueError, struct.error)
"""What is raised where a Triton is other than known."""

_ADDRESS = "Q"
_DESCRIPTOR = "128s"
_SIZES = {code: struct.calcsize(code) for code in (*_CODES.values(), _ADDRESS, _DESCRIPTOR)}


class Call(NamedTuple):
    """A call `kernel[grid](*arguments, **keywords)` that is compiled (see `compiled_call`) but not launched."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    keywords: dict
    compiled: Any


def compiled_call(kernel, grid: Sequence[int], *arguments, **keywords) -> Call:
    """The Call of a kernel, which is compiled for the current device if it was not yet. Several threads may compile at once."""
    compiled = triton_internals.compiled_kernel(kernel, grid, arguments, keywords)
    return Call(kernel, (*grid, 1, 1)[:3], arguments, keywords, compiled)


def prepare(calls: Sequence[Call], tensors: Tensors, all_shared: bool = False) -> Prepared:
    """Prepares calls that are made one after the other, each time with other tensors: prepare(...).on(stream) is a Launch.

    tensors: all those in the arguments, also in tuples and TMA descriptors, each an object of its own. The tensors of a launch
        must have the same shapes, strides, dtypes and device, which must be the current one, and addresses that are multiples
        of 16 where these have such.
    all_shared: whether launches that overlap ask for all shared memory, as `Driver.carve_out_all` says.

    NotGiven if an argument holds a tensor that is not in `tensors`.
    """
    try:
        device = torch.cuda.current_device()
        if not triton_internals.is_known() and not _comes_back(device):
            raise Unknown("Triton is none of 3.6 to 3.9, and a kernel that says what it was given was given something else")
        load = _carved_out if all_shared else function
        kernels = [(call.compiled, load(call.compiled, device), call.grid, all_arguments(call)) for call in calls]
        return PreparedLaunches(kernels, tensors)
    except NotGiven:
        raise
    except _OTHERWISE as reason:
        names = ", ".join(call.compiled.name for call in calls)
        _warn(f"{names} is launched by Triton, which takes more host time: {reason}")
        return ThroughTriton(calls, tensors)


class NotGiven(ValueError):
    """Raised where the arguments of a prepared launch hold a tensor that is not among the given ones."""


_echoes: dict[int, bool] = {}
"""Device -> whether all arguments of the echo kernels came through on it."""


def _comes_back(device: int) -> bool:
    """Whether the echo kernels, which write down the arguments they got, find all of them in their places; tried once a
    device."""
    if device not in _echoes:
        _echoes[device] = _echo(torch.device("cuda", device))
    return _echoes[device]


def _echo(device: torch.device) -> bool:
    from strobe.call import echo

    found, tensors, wanted = echo.calls(device, with_tma=torch.cuda.get_device_capability(device)[0] == 9)
    try:
        compiled = [compiled_call(call.kernel, call.grid, *call.arguments, **call.keywords) for call in found]
        handles = [(call.compiled, function(call.compiled, device.index), call.grid, all_arguments(call)) for call in compiled]
        launch = PreparedLaunches(handles, tensors).on(torch.cuda.current_stream(device).cuda_stream)
        launch(tuple(x.data_ptr() for x in tensors))
    except _OTHERWISE:
        return False
    return all(x.tolist() == numbers for x, numbers in wanted)


def all_arguments(call: Call) -> list:
    """The value of each parameter of the kernel's source, None for one that is not given."""
    names = triton_internals.signature_of(call.compiled)
    values = {**dict(zip(names, call.arguments, strict=False)), **call.keywords}
    return [values.get(name) for name in names]


@functools.cache
def function(compiled, device: int) -> int:
    """The driver's handle of a compiled kernel, loaded on a device, which must be the current one.

    Triton's own way, `_init_handles`, compiles a module and a launcher in C first, which are not needed here."""
    return compiled.function or _driver().load(
        compiled.kernel, compiled.name, compiled.metadata.shared, triton_internals.cluster_of(compiled)
    )


@functools.cache
def _carved_out(compiled, device: int) -> int:
    """The same of a kernel that asks for all shared memory, if its launches overlap (programmatic dependent launch)."""
    handle = function(compiled, device)
    if compiled.metadata.launch_pdl:
        _driver().carve_out_all(handle)
    return handle


@functools.cache
def _warn(message: str) -> None:
    log.warning(message)


def maker(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that makes uninitialised tensors like this one, on its device, which must be the current one.

    PyTorch's compiled code calls the same function. It goes past the dispatcher: 0.5 us where `empty_like` takes 0.7 (on a
    CPU)."""
    make = empty_strided_cuda if like.is_cuda else empty_strided_cpu
    return functools.partial(make, tuple(like.shape), like.stride(), like.dtype)


# ---- what a kernel takes


class Parameter(NamedTuple):
    """A parameter of a kernel. code: its type in `struct`. value: a number, a tensor, which is passed as its address, or a
    Descriptor."""

    code: str
    value: Any


class Descriptor(NamedTuple):
    """A TMA descriptor: what the host gives, and the compiler's metadata of it."""

    given: Any
    meta: dict


def parameters(compiled, arguments: Sequence[Any]) -> list[Parameter]:
    """The parameters of a compiled kernel, in order, given the arguments of its source. Raises Unknown if its PTX has
    others."""
    metadata = compiled.metadata
    if metadata.num_ctas != 1 or metadata.global_scratch_size or metadata.profile_scratch_size:
        raise Unknown("it has clusters or scratch memory")
    descriptors = iter(metadata.tensordesc_meta or ())
    scratch = (Parameter(_ADDRESS, None), Parameter(_ADDRESS, None))  # global scratch memory and the profiler's
    found = [*_flat(triton_internals.signature_of(compiled).values(), arguments, descriptors), *scratch]
    if any(isinstance(value, Descriptor) for _, value in found) and metadata.target.arch != 90:
        raise Unknown("descriptors of Blackwell need corrections that depend on the driver's version")
    if [_SIZES[code] for code, _ in found] != ptx_sizes(compiled.asm["ptx"], compiled.name):
        raise Unknown("its parameters are not laid out as those of Triton 3.6 to 3.9")
    return found


def _flat(kinds: Iterable, arguments: Iterable, descriptors: Iterator[dict]) -> Iterator[Parameter]:
    """The parameters of a signature, with its tuples taken apart. A TMA descriptor is followed by its shape and its strides."""
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


@functools.cache
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
"""The compiler's number of an element type (float16, float32, bfloat16) -> the driver's, where they differ."""


def encoder(descriptor: Descriptor) -> Memo[int, bytes]:
    """A table: encoder(...)[address] is the TMA descriptor of a tensor that begins there, as bytes. Recent ones are kept."""
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

    return Memo(256, encode)


def _aligned(size: int) -> tuple[ctypes.Array, int]:
    """A buffer, and an address in it from which `size` bytes fit and that is a multiple of 64, as the driver needs it."""
    memory = ctypes.create_string_buffer(size + 63)
    return memory, -(-ctypes.addressof(memory) // 64) * 64


# ---- launches


_FRAMES = 128
"""For how many places of its tensors a call keeps what it writes: some two kilobytes each. More layers than that pack anew."""


class PreparedLaunches:
    """Kernels with all their arguments but the addresses, launched one after the other.

    The driver takes a config and an array of pointers to the parameters. All of them lie in a frame:

        configs, 64 bytes each | TMA descriptors | addresses of the tensors | numbers

    A launch writes the descriptors and the addresses, by one `struct.pack_into`, unless they are the same as in the last
    launch. A frame belongs to one stream."""

    _CONFIG = struct.Struct("<7I4xQQI12x")
    """The layout of a CUlaunchConfig: grid, block, bytes of shared memory; stream, attributes and their number."""

    def __init__(self, kernels: Iterable[tuple[Any, int, Sequence[int], Sequence[Any]]], tensors: Tensors):
        """kernels: for each the compiled kernel, the driver's handle of it, its grid and all arguments of its source."""
        found = [(compiled, handle, grid, parameters(compiled, values)) for compiled, handle, grid, values in kernels]
        found = [kernel for kernel in found if 0 not in kernel[2]]  # an empty grid launches nothing
        descriptors = [value for *_, leaves in found for _, value in leaves if isinstance(value, Descriptor)]
        # Only the tensors' places are kept, not the tensors: these are a user's, and large.
        slots = {id(x): slot for slot, x in enumerate(tensors)}
        self.described = [(_slot(descriptor.given.base, slots), encoder(descriptor)) for descriptor in descriptors]
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
                    offsets.append(at_addresses + 8 * _slot(leaf.value, slots))
                else:
                    offsets.append(at_numbers + 8 * len(self._numbers))
                    self._numbers.append(leaf)
            self._kernels.append(_Kernel.of(compiled, handle, grid, offsets))
        self._size = at_numbers + 8 * len(self._numbers)

    def on(self, stream: int) -> Launch:
        return _Frame(self, stream).launch

    def lay_out(self, stream: int) -> tuple[ctypes.Array, int, list[tuple]]:
        """Makes a frame: its memory, the offset in it where launches write, and the arguments of `cuLaunchKernelEx` for each
        kernel."""
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
    """What a launch needs of a kernel. compiled: kept alive, as it may own the loaded module. offsets: where in a frame each of
    its parameters is."""

    compiled: Any
    function: ctypes.c_void_p
    shape: tuple[int, ...]
    attributes: ctypes.Array
    offsets: list[int]

    @classmethod
    def of(cls, compiled, handle: int, grid: Sequence[int], offsets: list[int]) -> _Kernel:
        metadata, cluster = compiled.metadata, triton_internals.cluster_of(compiled)
        shape = (grid[0] * cluster, *grid[1:], metadata.num_warps * metadata.warp_size, 1, 1, metadata.shared)
        return cls(compiled, ctypes.c_void_p(handle), shape, _attributes(metadata, cluster), offsets)


class _Frame:
    """The memory of a Launch, on one stream. A launch writes it and the driver reads it before it returns, so two threads need
    two frames, or a lock."""

    def __init__(self, prepared: PreparedLaunches, stream: int):
        self._prepared = prepared  # it owns what the frame points to
        self._driver = _driver()
        memory, begin, self._launches = prepared.lay_out(stream)
        self._begin = memoryview(memory).cast("B")[begin : begin + prepared.written.size]
        """Where a launch writes."""
        self._packed: Memo[tuple[int, ...], bytes] = Memo(_FRAMES, self._pack)
        """Addresses -> what is written for them. A model's next step often finds its tensors where they were."""
        self._written: tuple[int, ...] | None = None

    def _pack(self, addresses: tuple[int, ...]) -> bytes:
        described = [encoded[addresses[slot]] for slot, encoded in self._prepared.described]
        return self._prepared.written.pack(*described, *addresses)

    def launch(self, addresses: tuple[int, ...]) -> None:
        if addresses != self._written:
            self._begin[:] = self._packed[addresses]
            self._written = addresses
        launch = self._driver.launch
        for config, function, pointers, extra in self._launches:
            status = launch(config, function, pointers, extra)
            if status:
                self._driver.call("cuLaunchKernelEx", config, function, pointers, extra, status=status)


def _slot(tensor: torch.Tensor, slots: dict[int, int]) -> int:
    """The place of a tensor among those that are given. slots: the id of each -> its place."""
    if (slot := slots.get(id(tensor))) is None:
        raise NotGiven(f"every tensor of a prepared launch must be given, got none for one of shape {list(tensor.shape)}")
    return slot


def _attributes(metadata, cluster: int) -> ctypes.Array:
    """The attributes of a launch, as the driver reads them: each CUlaunchAttribute is a number and 64 bytes for its value."""
    cooperative, cluster_dimension, cluster_policy, programmatic_serialization, spread = 2, 4, 5, 6, 1
    chosen = [(cooperative, metadata.launch_cooperative_grid), (programmatic_serialization, metadata.launch_pdl)]
    packed = b"".join(struct.pack("<I4xI60x", number, 1) for number, wanted in chosen if wanted)
    if cluster > 1:
        packed += struct.pack("<I4x3I52x", cluster_dimension, cluster, 1, 1) + struct.pack("<I4xI60x", cluster_policy, spread)
    return (ctypes.c_char * len(packed)).from_buffer_copy(packed)


class _At:
    """Stands for a tensor where Triton launches: it has all that Triton asks of one, a dtype and an address."""

    def __init__(self, like: torch.Tensor, address: int):
        self.dtype, self._address = like.dtype, address

    def data_ptr(self) -> int:
        return self._address


class ThroughTriton:
    """Calls that Triton launches, in its own way, on the current stream. Takes the place of PreparedLaunches."""

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
    """An argument, also a tuple or a TMA descriptor, with its tensors exchanged. now: id of a tensor -> what takes its
    place."""
    if isinstance(value, torch.Tensor):
        return now[id(value)]
    if isinstance(value, tuple):
        parts = [_swap(part, now) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return replace(value, base=now[id(value.base)]) if hasattr(value, "block_shape") else value


# ---- the driver


_INVALID_CONTEXT = 201
_SHARED_UNASKED = 48 * 1024  # bytes that a launch gets without asking for more
_PREFER_SHARED, _MAX_DYNAMIC_SHARED, _CARVEOUT, _LARGE_CLUSTERS = 1, 8, 9, 14
_LARGE_CLUSTER = 9  # CTAs, from which on a cluster does not fit every GPU
_CAPTURING = 1
_TYPES = {
    "cuTensorMapEncodeTiled": (
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, *4 * (ctypes.c_void_p,), *4 * (ctypes.c_int,),
    ),
    "cuDevicePrimaryCtxRetain": (ctypes.c_void_p, ctypes.c_int),
    "cuCtxSetCurrent": (ctypes.c_void_p,),
    "cuGetErrorString": (ctypes.c_int, ctypes.c_void_p),
    "cuModuleLoadData": (ctypes.c_void_p, ctypes.c_char_p),
    "cuModuleGetFunction": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p),
    "cuFuncSetCacheConfig": (ctypes.c_void_p, ctypes.c_int),
    "cuFuncSetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_int),
}  # fmt: skip
"""Name of a driver's function -> the types of its arguments."""


class Driver:
    """Functions of CUDA's driver, called by ctypes."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        for name, types in _TYPES.items():
            getattr(library, name).argtypes = types
        self.launch = library.cuLaunchKernelEx
        """launch(config, function, pointers, None) -> status. It takes objects of ctypes: argtypes would convert, which takes
        time."""

    def call(self, name: str, *arguments, status: int | None = None) -> None:
        """Call a function of the driver; RuntimeError if it fails. status: what an earlier call gave, if there was one.

        A thread that has not used the GPU yet has no context: then it gets one, and the call is made again."""
        function = getattr(self._library, name)
        status = function(*arguments) if status is None else status
        if status == _INVALID_CONTEXT:
            self._enter_context()
            status = function(*arguments)
        if status:
            raise RuntimeError(f"{name} failed: {self._text(status)}")

    def load(self, image: bytes, name: str, shared: int, cluster: int = 1) -> int:
        """The handle of a kernel in an image of machine code, loaded on the current device. shared: bytes of shared memory that
        its launches ask for; cluster: CTAs of a cluster."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        if shared > _SHARED_UNASKED:
            self.call("cuFuncSetCacheConfig", function, _PREFER_SHARED)
            self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
        if cluster >= _LARGE_CLUSTER:
            self.call("cuFuncSetAttribute", function, _LARGE_CLUSTERS, 1)
        assert function.value is not None
        return function.value

    def carve_out_all(self, function: int) -> None:
        """Ask for all shared memory that a multiprocessor can have, whatever a kernel needs of it.

        A multiprocessor has to be idle to part its memory otherwise. So a short launch that asks for none, a step's append,
        keeps CTAs of the next one, which need it, away until its own have ended, though there is room for both (see
        `kernels.common.dependent_launch`)."""
        self.call("cuFuncSetAttribute", function, _CARVEOUT, 100)

    def capture_of(self, stream: int) -> int | None:
        """The number of the capture that a stream is in, which no other has; None if there is none, or nobody can tell."""
        ask = getattr(self._library, "cuStreamGetCaptureInfo_v2", None)
        status, capture, nothing = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        if ask is None or ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(capture), *3 * (nothing,)):
            return None
        return capture.value if status.value == _CAPTURING else None

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


def capture_of(stream: int) -> int | None:
    """See `Driver.capture_of`."""
    return _driver().capture_of(stream)
