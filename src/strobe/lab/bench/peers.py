"""The attentions that Strobe is measured beside, and Strobe itself: one registry, one way to call them.

A peer's `prepare(q, k, v, mask)` takes tensors in the peer's own layout and returns the call to be timed, which returns out in
the same layout. It raises where the peer is missing or does not take the problem; the report holds the reason.
PyTorch's math backend takes part by itself on a CPU only: on a GPU the scores that it stores would crowd out everyone else.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

import strobe
from strobe.lab.bench.plan import Inputs, Point, mask_of
from strobe.masks import Mask

Call = Callable[[], Any]
"""A call to be timed: it computes attention and returns out."""

FP8 = torch.float8_e4m3fn
FP8_OUT_SCALE = 64.0
"""The factor on the output of a kernel that can only write fp8: an average of many values is small, too small for e4m3."""


@dataclass(frozen=True)
class Peer:
    """An attention that can be measured. Its calls run inside `context()`."""

    name: str
    prepare: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mask], Call]
    prepare_more: Callable[[Inputs, Mask], Call] | None = None
    """Prepares a call where q, k, v and a mask do not say all of it: packed sequences, softcaps, sinks. None: takes none."""
    heads_first: bool = False
    """Whether it takes and returns [B, H, S, D]; else [B, S, H, D]."""
    context: Callable[[], AbstractContextManager] = nullcontext
    compiles: bool = False
    """Whether it compiles a kernel for each kind of problem, which it keeps in a cache on disk."""
    module: str | None = None
    """The module of a package that must be installed. None: the peer comes with PyTorch."""

    @property
    def installed(self) -> bool:
        """Whether the module is installed. It is looked for without importing it, which may take seconds."""
        try:
            return self.module is None or importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:
            return False


def bind(peer: Peer, point: Point, inputs: Inputs) -> Call:
    """The call to be timed: the forward without autograd, or the backward alone (through autograd, as users get it)."""

    def native(x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(1, 2) if peer.heads_first else x).clone(memory_format=torch.contiguous_format)

    q, k, v = (native(x) for x in (inputs.q, inputs.k, inputs.v))
    mask = mask_of(point.mask)

    def prepared() -> Call:
        if point.is_plain:
            return peer.prepare(q, k, v, mask)
        if peer.prepare_more is None:
            raise ValueError(f"{peer.name} is measured without packed sequences, softcaps and sinks, got {point.shape}")
        return peer.prepare_more(replace(inputs, q=q, k=k, v=v), mask)

    if inputs.dout is None:
        return prepared()
    dout = native(inputs.dout)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = prepared()()
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def _starts(packed: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 [sequences + 1]: the first row of each packed sequence, and the number of all rows."""
    return torch.tensor([0, *itertools.accumulate(packed)], dtype=torch.int32, device=device)


def standard(x: torch.Tensor, peer: Peer) -> torch.Tensor:
    """A tensor that a peer returned, as [B, S, H, D]."""
    x = x.float() / FP8_OUT_SCALE if x.dtype == FP8 else x
    return x.transpose(1, 2) if peer.heads_first else x


def strobe_peer(backend: str | None = None, deterministic: bool = False) -> Peer:
    """Strobe with the kernel that dispatch picks, or with one backend by name; its gradients the same bits in every run, if
    asked for."""

    def prepare(q, k, v, mask) -> Call:
        if q.dtype == FP8:
            return lambda: strobe.attention_fp8(q, k, v, mask=mask)
        return lambda: strobe.attention(q, k, v, mask=mask, backend=backend, deterministic=deterministic)

    def prepare_more(inputs, mask) -> Call:
        score, q, k, v = strobe.Score(softcap=inputs.softcap, sinks=inputs.sinks), inputs.q, inputs.k, inputs.v
        if inputs.packed is None:
            return lambda: strobe.attention(q, k, v, mask=mask, score=score, backend=backend)
        starts = _starts(inputs.packed, q.device)
        longest = max(inputs.packed)
        q, k, v = (x[0] for x in (q, k, v))
        return lambda: strobe.attention(
            q, k, v, mask=mask, score=score, backend=backend, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )[None]  # fmt: skip

    return Peer(f"strobe {backend}" if backend else "strobe", prepare, prepare_more, compiles=True)


def sdpa(name: str, backend: str, window: Callable | None = None) -> Peer:
    """The peer for one backend of PyTorch's scaled_dot_product_attention. window: another `prepare`, for problems that this
    function cannot express, such as windows."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def prepare(q, k, v, mask) -> Call:
        if q.dtype == FP8 or not (mask == strobe.Full() or mask.is_causal):
            if window is None:
                raise ValueError(f"scaled_dot_product_attention takes no {'fp8' if q.dtype == FP8 else mask} with {name}")
            return window(q, k, v, mask)
        if mask.is_causal and q.shape[2] != k.shape[2]:
            raise ValueError(f"scaled_dot_product_attention aligns a causal mask to the first key, got {q.shape[2]} queries "
                             f"and {k.shape[2]} keys")  # fmt: skip
        options = {"is_causal": mask.is_causal, "enable_gqa": q.shape[1] != k.shape[1]}
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return Peer(name, prepare, heads_first=True, context=lambda: sdpa_kernel(getattr(SDPBackend, backend)))


def _torch_flash_window(q, k, v, mask) -> Call:
    """A call of the kernel of SDPA's flash backend under a window, which only PyTorch's internal operator takes."""
    if q.dtype == FP8:
        raise ValueError("PyTorch's flash attention takes fp16 and bf16, not fp8")
    left, right = _band(mask, -1)
    flash = torch.ops.aten._flash_attention_forward
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sizes = (None, None, q.shape[1], k.shape[1], 0.0, False, False)
    return lambda: flash(q, k, v, *sizes, window_size_left=left, window_size_right=right)[0].transpose(1, 2)


@functools.cache
def _cudnn_handle() -> Any:
    import cudnn

    return cudnn.create_handle()


class CudnnGraph:
    """A graph of cuDNN's own Python package, nvidia-cudnn-frontend. First describe its inputs and outputs, then build and run
    it."""

    def __init__(self, dtype: torch.dtype):
        import cudnn

        single = cudnn.data_type.FLOAT
        self._types = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF, torch.float32: single}
        self._types |= {FP8: cudnn.data_type.FP8_E4M3, torch.int32: cudnn.data_type.INT32}
        self._described: list = []
        options = {"io_data_type": self._types[dtype], "intermediate_data_type": single, "compute_data_type": single}
        self._on_this_stream()
        self.graph = cudnn.pygraph(**options, handle=_cudnn_handle())

    def takes(self, *tensors: torch.Tensor) -> list:
        """Describe inputs of these shapes, strides and dtypes. Returns what stands for each of them in the graph."""
        found = [self.graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=self._types[x.dtype]) for x in tensors]
        self._described += found
        return found

    def gives(self, described: Any, like: torch.Tensor) -> None:
        """Describe an output of the graph: it has the shape, strides and dtype of `like`."""
        described.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))
        described.set_data_type(self._types[like.dtype])
        self._described.append(described)

    def build(self) -> None:
        import cudnn

        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])

    def run(self, *tensors: torch.Tensor) -> None:
        """Run the graph. tensors: inputs, then outputs, in the order of their descriptions. PyTorch lends the workspace."""
        self._on_this_stream()
        workspace = torch.empty(max(1, self.graph.get_workspace_size()), dtype=torch.uint8, device=tensors[0].device)
        bound = {described: x.detach() for described, x in zip(self._described, tensors, strict=True)}
        self.graph.execute(bound, workspace, handle=_cudnn_handle())

    def ready(self, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> Call:
        """Build the graph. Returns a call that runs it on these tensors and returns the first output."""
        self.build()

        def call() -> torch.Tensor:
            self.run(*inputs, *outputs)
            return outputs[0]

        return call

    @staticmethod
    def _on_this_stream() -> None:
        import cudnn

        cudnn.set_stream(handle=_cudnn_handle(), stream=torch.cuda.current_stream().cuda_stream)


def _cudnn_graph(q, k, v, mask, deterministic: bool = False) -> Call:
    """A call of cuDNN by its own Python package, for what PyTorch cannot ask of it: windows, fp8, deterministic gradients."""
    if mask.prefix is not None or mask.right not in (None, 0):
        raise ValueError(f"cuDNN takes full, causal and causal windows, not {mask}")
    if q.dtype == FP8:
        return _cudnn_fp8(q, k, v, mask)
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(*q.shape[:3], 1, device=q.device)
    options = {"attn_scale": q.shape[-1] ** -0.5, "use_causal_mask": mask.right == 0}
    options["sliding_window_length"] = None if mask.left is None else mask.left + 1
    forward = CudnnGraph(q.dtype)
    described, stats = forward.graph.sdpa(*forward.takes(q, k, v), generate_stats=q.requires_grad, **options)
    forward.gives(described, out)
    if not q.requires_grad:
        return forward.ready((q, k, v), (out,))
    forward.gives(stats, lse)
    forward.build()
    backward = CudnnGraph(q.dtype)
    names = ("q", "k", "v", "o", "dO", "stats")
    inputs = dict(zip(names, backward.takes(q, k, v, out, out, lse), strict=True))
    gradients = backward.graph.sdpa_backward(**inputs, **options, use_deterministic_algorithm=deterministic)
    for gradient, like in zip(gradients, (q, k, v), strict=True):
        backward.gives(gradient, like)
    backward.build()
    return lambda: _CudnnAttention.apply(forward, backward, q, k, v, out, lse)


class _CudnnAttention(torch.autograd.Function):
    """cuDNN's graphs of a forward and a backward as one differentiable function. out and lse show how the results look."""

    @staticmethod
    def forward(ctx, forward: CudnnGraph, backward: CudnnGraph, q, k, v, out, lse):
        out, lse = torch.empty_like(out), torch.empty_like(lse)
        forward.run(q, k, v, out, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.graph = backward
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        ctx.graph.run(q, k, v, out, dout.contiguous(), lse, *gradients)
        return None, None, *gradients, None, None


def _cudnn_fp8(q, k, v, mask) -> Call:
    if mask.left is not None:
        raise ValueError(f"cuDNN takes no {mask} in fp8")
    # P lies in [0, 1] and is stored times 256, below e4m3's largest number, 448.
    scales = [torch.full((1, 1, 1, 1), value, device=q.device) for value in (1.0, 1.0, 1.0, 1 / 256, 256.0, FP8_OUT_SCALE)]
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=FP8, device=q.device)
    graph = CudnnGraph(FP8)
    options = {"attn_scale": q.shape[-1] ** -0.5, "generate_stats": False, "use_causal_mask": mask.right == 0}
    described, _, *largest = graph.graph.sdpa_fp8(*graph.takes(q, k, v, *scales), **options)
    graph.gives(described, out)
    amax = [torch.empty(1, 1, 1, 1, device=q.device) for _ in largest]
    for described, like in zip(largest, amax, strict=True):
        graph.gives(described, like)
    return graph.ready((q, k, v, *scales), (out, *amax))


def _flash_attn_2(q, k, v, mask) -> Call:
    from flash_attn import flash_attn_func

    return lambda: flash_attn_func(q, k, v, causal=mask.right == 0, window_size=_band(mask, -1))


def _flash_attn_3(q, k, v, mask) -> Call:
    from flash_attn_interface import flash_attn_func

    if q.requires_grad and _fa3_lacks("BACKWARD"):
        raise NotImplementedError("this build of FlashAttention-3 has no backward")
    return lambda: _first(flash_attn_func(q, k, v, causal=mask.right == 0, window_size=_band(mask, -1)))


def _flash_attn_3_more(inputs, mask) -> Call:
    import flash_attn_interface as fa3

    if inputs.softcap:
        raise NotImplementedError("this build of FlashAttention-3 has no softcap")
    if inputs.q.requires_grad and _fa3_lacks("BACKWARD"):
        raise NotImplementedError("this build of FlashAttention-3 has no backward")
    options = {"causal": mask.right == 0, "window_size": _band(mask, -1)}
    options |= {} if inputs.sinks is None else {"sinks": inputs.sinks.to(inputs.q.dtype)}
    return _flash_call(fa3, inputs, options)


def _flash_call(module, inputs, options: dict) -> Call:
    """A call of a flash-attn's function for dense inputs, or of that for packed ones."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if inputs.packed is None:
        return lambda: _first(module.flash_attn_func(q, k, v, **options))
    starts, longest = _starts(inputs.packed, q.device), max(inputs.packed)
    q, k, v = (x[0] for x in (q, k, v))
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return lambda: _first(module.flash_attn_varlen_func(q, k, v, **lengths, **options))[None]


def _fa3_lacks(what: str) -> bool:
    """Whether the installed FlashAttention-3 was compiled without something, by the module in which it says so."""
    try:
        from flash_attn_config import CONFIG
    except ImportError:
        return False
    return bool(CONFIG.get("build_flags", {}).get(f"FLASHATTENTION_DISABLE_{what}"))


def _flash_attn_4(q, k, v, mask, deterministic: bool = False) -> Call:
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read when flash_attn is imported
    from flash_attn.cute.interface import flash_attn_func

    options = {"causal": mask.is_causal, "window_size": _band(mask, None), "deterministic": deterministic}
    return lambda: _first(flash_attn_func(q, k, v, **options))


def _flash_attn_4_more(inputs, mask) -> Call:
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute import interface as fa4

    options = {"causal": mask.is_causal, "window_size": _band(mask, None), "softcap": inputs.softcap}
    options |= {} if inputs.sinks is None else {"learnable_sink": inputs.sinks.to(inputs.q.dtype)}
    return _flash_call(fa4, inputs, options)


def _flex_attention(q, k, v, mask) -> Call:
    """A call of FlexAttention, PyTorch's compiled attention, which takes a mask as a function."""
    if q.dtype == FP8:
        raise ValueError("FlexAttention takes fp16 and bf16, not fp8")
    compiled, blocks = _compiled_flex(_band(mask, None), (q.shape, k.shape, v.shape), q.dtype, q.device)
    return lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])


@functools.lru_cache(maxsize=1)
def _compiled_flex(band: tuple, shapes: tuple, dtype: torch.dtype, device: torch.device) -> tuple[Callable, Any]:
    """FlexAttention, compiled, and its block mask; made once for all inputs of a point. The compiler is reset at each point,
    because after eight kinds of problems it would run the others uncompiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    left, right = band

    def seen(_batch, _head, row, key):
        found = row >= 0  # all
        found = found if left is None else found & (row - key <= left)
        return found if right is None else found & (key - row <= right)

    length_q, length_kv = (shape[2] for shape in shapes[:2])
    blocks = None
    if band != (None, None):
        blocks = torch.compile(create_block_mask)(seen, None, None, length_q, length_kv, device=device)
    return torch.compile(flex_attention, dynamic=False), blocks


def _xformers(q, k, v, mask) -> Call:
    """A call of xFormers' memory_efficient_attention, which picks a kernel itself. Grouped heads are an axis of their own."""
    from xformers.ops import LowerTriangularMask, memory_efficient_attention
    from xformers.ops.fmha.attn_bias import LocalAttentionFromBottomRightMask

    if q.dtype == FP8:
        raise ValueError("xFormers takes fp16 and bf16, not fp8")
    left, right = _band(mask, None)
    if (left is None and right) or (left is not None and right is None):
        raise ValueError(f"xFormers takes full, causal and windows with two bounds, not {mask}")
    bias = None if right is None else LowerTriangularMask()
    if left is not None:
        bias = LocalAttentionFromBottomRightMask(window_left=left, window_right=right)
    shape = q.shape[:3] + v.shape[-1:]
    if q.shape[2] != k.shape[2]:
        group = q.shape[2] // k.shape[2]
        q = q.unflatten(2, (k.shape[2], group))
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, group, -1) for x in (k, v))
    return lambda: memory_efficient_attention(q, k, v, attn_bias=bias).reshape(shape)


def _band(mask: Mask, unbounded: Any) -> tuple:
    """A mask as flash-attn's window_size. ValueError for a mask that is more than a band. unbounded: stands for an open
    side."""
    left, right, prefix = mask.band
    if prefix is not None or mask.documents is not None:
        raise ValueError(f"a window_size cannot express {mask}")
    return tuple(unbounded if bound is None else bound for bound in (left, right))


def _first(result) -> torch.Tensor:
    """The output in a peer's result: some versions return (out, lse)."""
    return result[0] if isinstance(result, tuple) else result


def peers_for(device: torch.device) -> dict[str, Peer]:
    """Name -> peer, for all peers that there are for a device."""
    if device.type == "cpu":
        peers = [sdpa("SDPA flash", "FLASH_ATTENTION"), sdpa("SDPA math", "MATH")]
    else:
        peers = [
            sdpa("cuDNN", "CUDNN_ATTENTION", _cudnn_graph),
            Peer("FA4", _flash_attn_4, _flash_attn_4_more, compiles=True, module="flash_attn.cute"),
            Peer("FA3", _flash_attn_3, _flash_attn_3_more, module="flash_attn_interface"),
            Peer("FA2", _flash_attn_2, module="flash_attn.flash_attn_interface"),
            sdpa("SDPA flash", "FLASH_ATTENTION", _torch_flash_window),
            sdpa("SDPA efficient", "EFFICIENT_ATTENTION"),
            Peer("FlexAttention", _flex_attention, heads_first=True, compiles=True),
            Peer("xFormers", _xformers, module="xformers"),
        ]
    return {peer.name: peer for peer in peers}


def deterministic_peers() -> dict[str, Peer]:
    """Name -> peer, for those of a GPU that can be asked for gradients with the same bits in every run."""
    peers = [
        Peer("cuDNN", functools.partial(_cudnn_graph, deterministic=True), heads_first=True, module="cudnn"),
        Peer("FA4", functools.partial(_flash_attn_4, deterministic=True), compiles=True, module="flash_attn.cute"),
    ]
    return {peer.name: peer for peer in peers}
