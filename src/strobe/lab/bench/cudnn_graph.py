"""Graphs of cuDNN's own Python package, nvidia-cudnn-frontend, for what PyTorch cannot ask of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def handle() -> Any:
    """cuDNN's handle of this process."""
    import cudnn

    return cudnn.create_handle()


class CudnnGraph:
    """A graph of operations. First describe its inputs and outputs, then build and run it."""

    def __init__(self, dtype: torch.dtype):
        import cudnn

        single = cudnn.data_type.FLOAT
        self._types = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF, torch.float32: single}
        self._types |= {torch.float8_e4m3fn: cudnn.data_type.FP8_E4M3, torch.int32: cudnn.data_type.INT32}
        self._described: list = []
        options = {"io_data_type": self._types[dtype], "intermediate_data_type": single, "compute_data_type": single}
        self._on_this_stream()
        self.graph = cudnn.pygraph(**options, handle=handle())

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
        """Have cuDNN choose a kernel. Raises what it raises if it has none."""
        import cudnn

        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])

    def run(self, *tensors: torch.Tensor) -> None:
        """Run the graph. tensors: inputs, then outputs, in the order of their descriptions. PyTorch lends the workspace."""
        self._on_this_stream()
        workspace = torch.empty(max(1, self.graph.get_workspace_size()), dtype=torch.uint8, device=tensors[0].device)
        bound = {described: x.detach() for described, x in zip(self._described, tensors, strict=True)}
        self.graph.execute(bound, workspace, handle=handle())

    def ready(self, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> Callable[[], torch.Tensor]:
        """Build the graph. Returns a call that runs it on these tensors and returns the first output."""
        self.build()

        def call() -> torch.Tensor:
            self.run(*inputs, *outputs)
            return outputs[0]

        return call

    @staticmethod
    def _on_this_stream() -> None:
        import cudnn

        cudnn.set_stream(handle=handle(), stream=torch.cuda.current_stream().cuda_stream)
