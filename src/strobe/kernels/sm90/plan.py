"""The Hopper forward for calls that look the same: its two launches, prepared."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from strobe.kernels import workspace
from strobe.kernels.launcher import Tensors, prepare
from strobe.kernels.portable import forward as portable
from strobe.kernels.sm90.config import ROWS_PER_GROUP, Config
from strobe.kernels.sm90.forward import fill_blind, forward_kernel, has_blind_tiles, kernel_arguments, outputs_of
from strobe.problem import AttentionProblem, Operands
from strobe.recent import Recent

Space = tuple[torch.Tensor, tuple[int, int, int]]
"""A workspace, and the addresses of its counters, of its notes and of the count of blocks redone."""


class ForwardPlan:
    """plan(stream, *tensors) -> out, lse (see `strobe.eager`)."""

    def __init__(self, problem: AttentionProblem, operands: Operands, tensors: Tensors, config: Config):
        self._device = operands.q.device
        self._blind = has_blind_tiles(problem)
        self._notes = problem.lengths.batch * problem.heads_q * -(-problem.lengths.seqlen_q // ROWS_PER_GROUP)
        self._spaces: Recent[Space] = Recent(64)
        out, lse = outputs_of(problem, operands)
        # `empty_like` takes half the time of `empty`.
        self._out_like, self._lse_like = (x.new_empty(1).expand(x.shape) for x in (out, lse))
        space = workspace.workspace(self._device, self._notes)
        redone = space.counters[2:3]
        given = (*tensors, out, lse, space.counters, space.notes, redone)
        grid, arguments, constants = kernel_arguments(problem, operands, out, lse, space, config)
        _, keywords = portable._keywords("redo", problem, operands, out, lse)
        keywords |= dict(notes=space.notes, number=self._notes, counter=redone)
        keywords |= dict(NOTED_ROWS=portable.NOTED_ROWS, SHARE=portable._SHARE)
        redo_grid = (min(self._notes, 2 * portable._multiprocessors(self._device)),)

        def prepare_redo():
            with torch.cuda.device(self._device):
                return prepare(portable._redo, redo_grid, given, **keywords)

        with ThreadPoolExecutor(1) as beside:  # a first call waits for the longer compilation, not for both
            redo = beside.submit(prepare_redo)
            self._forward = prepare(forward_kernel, grid, given, *arguments, **constants)
            self._redo = redo.result()

    def __call__(self, stream: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(self._out_like, memory_format=torch.contiguous_format)
        lse = torch.empty_like(self._lse_like, memory_format=torch.contiguous_format)
        if self._blind:
            _q, _k, _v, cu_q, _cu_kv, used_q, *_others, sinks = tensors
            fill_blind(out, lse, sinks, cu_q, used_q)
        _space, of_space = self._space(stream)
        addresses = [*[None if x is None else x.data_ptr() for x in tensors], out.data_ptr(), lse.data_ptr(), *of_space]
        self._forward(stream, *addresses)
        self._redo(stream, *addresses)
        return out, lse

    def _space(self, stream: int) -> Space:
        """Cut once for a stream, as that takes longer than a launch. But a graph has its own, and a space may have grown."""
        if torch._C._cuda_isCurrentStreamCapturing():
            return self._cut()
        space = self._spaces.get(stream)
        if space is None or space[0] is not workspace._spaces.get((self._device.index, stream)):
            space = self._cut()
            self._spaces.put(stream, space)
        return space

    def _cut(self) -> Space:
        counters, notes = workspace.workspace(self._device, self._notes)
        whole = counters._base
        assert whole is not None
        return whole, (counters.data_ptr(), notes.data_ptr(), counters[2:3].data_ptr())
