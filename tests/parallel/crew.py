"""Processes that stay: a test hands them a function and its arguments, and gets what each returns, or raises.

They are forked from a server that has imported torch once, and meet in groups of their first 2, 4 and 8."""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZES = (2, 4, 8)
TIMEOUT = 60.0
"""Seconds until an exchange between them is given up."""


class Crew:
    """`size` processes in a Gloo group each; `with` it they live."""

    def __init__(self, size: int, timeout: float = TIMEOUT):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "strobe.parallel", "strobe.lab.bench.plot"])
        self._folder = tempfile.TemporaryDirectory()
        where = Path(self._folder.name, "store").as_uri()
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, rank, size, where, timeout), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.join(5.0)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()

    def run(self, ranks: int, function: Callable, *arguments: Any, wait: float = 2 * TIMEOUT) -> list[Any]:
        """What the first `ranks` processes return of function(rank, *arguments), which is called in the group of them."""
        found = self.try_(ranks, function, *arguments, wait=wait)
        for rank, one in enumerate(found):
            assert not isinstance(one, Failed), f"rank {rank} failed:\n{one.trace}"
        return found

    def alone(self, function: Callable, *arguments: Any) -> list[Any]:
        """What the first process returns of function(rank, *arguments) in the group of 4, which nobody else calls."""
        self.pipes[0].send_bytes(_bytes((4, function, arguments)))
        return [_answer(self.pipes[0], TIMEOUT)]

    def try_(self, ranks: int, function: Callable, *arguments: Any, wait: float = 2 * TIMEOUT) -> list[Any]:
        """`run`, but a process that raises, or dies, gives a `Failed`."""
        job = _bytes((ranks, function, arguments))
        for pipe in self.pipes[:ranks]:
            pipe.send_bytes(job)
        return [_answer(pipe, wait) for pipe in self.pipes[:ranks]]


class Failed:
    """What a process raised; kind: "died" if it ended instead."""

    def __init__(self, kind: str, message: str, trace: str):
        self.kind, self.message, self.trace = kind, message, trace

    def __repr__(self):
        return f"{self.kind}: {self.message}"


def _answer(pipe, wait: float) -> Any:
    try:
        if not pipe.poll(wait):
            return Failed("late", f"no answer within {wait:g} s", "")
        return _object(pipe.recv_bytes())
    except EOFError:
        return Failed("died", "", "")


def _bytes(x: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return buffer.getvalue()


def _object(x: bytes) -> Any:
    return torch.load(io.BytesIO(x), weights_only=False)


def _work(pipe, rank: int, size: int, where: str, timeout: float) -> None:
    torch.set_num_threads(1)
    late = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=late)
    groups = {ranks: dist.new_group(list(range(ranks)), timeout=late) for ranks in SIZES if ranks <= size}
    while True:
        try:
            ranks, function, arguments = _object(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = function(groups.get(ranks), *arguments)
        except Exception as error:
            answer = Failed(type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(_bytes(answer))
