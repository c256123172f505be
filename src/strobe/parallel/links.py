"""How ranks exchange tensors: as processes of torch.distributed, or one after the other in one process.

What a rank does is a generator (`strobe.parallel.schedules`) of requests: `Start` begins an exchange and is answered by a
ticket, `Wait` with that ticket ends it, `Compute` launches kernels. What is between a start and its wait runs beside it.

    run(program, links)          one rank of a process group: isend and irecv in one batch, which on a GPU run on the group's
                                 own stream (NCCL), or in its threads (Gloo)
    run_together(programs)       all ranks in one process, each until it has to wait for another: the same programs, so the same
                                 bits
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist


class Message(NamedTuple):
    """A buffer, contiguous uint8 [bytes], to or from a rank of the group. One without bytes is not sent at all."""

    rank: int
    buffer: torch.Tensor


class Start(NamedTuple):
    """Asks for an exchange to begin. Until it ends, what is sent may be read, and what is received may not be touched."""

    what: str
    """The exchange in words, for errors and timelines."""
    sends: Sequence[Message]
    receives: Sequence[Message]


class Wait(NamedTuple):
    """Asks for an exchange to end."""

    ticket: Any


class Computation(Protocol):
    """Asks for something to be computed, and is answered by what `run` returns (see `schedules.Compute`)."""

    @property
    def run(self) -> Callable[[], Any]: ...


Request = Start | Wait | Computation

Program = Generator[Request, Any, Any]


class ParallelError(RuntimeError):
    """A rank of the group did not do its part: it died, it is late, or it called something else."""


# ---- processes


class Links:
    """The links of this process to the others of a group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._global = [dist.get_global_rank(group, rank) for rank in range(self.ranks)]

    def start(self, exchange: Start) -> Any:
        """Begin an exchange; returns what `wait` takes."""
        ops = [
            dist.P2POp(dist.irecv, m.buffer, self._global[m.rank], self.group) for m in exchange.receives if m.buffer.numel()
        ]
        ops += [dist.P2POp(dist.isend, m.buffer, self._global[m.rank], self.group) for m in exchange.sends if m.buffer.numel()]
        if not ops:
            return exchange, []
        try:
            return exchange, dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._failed(exchange, error) from error

    def wait(self, ticket: Any) -> None:
        """End an exchange: on a GPU its stream waits, not the host."""
        exchange, works = ticket
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._failed(exchange, error) from error

    def _failed(self, exchange: Start, error: RuntimeError) -> ParallelError:
        peers = sorted({m.rank for m in (*exchange.sends, *exchange.receives) if m.buffer.numel()})
        named = f"rank {peers[0]}" if len(peers) == 1 else f"ranks {', '.join(map(str, peers))}"
        return ParallelError(
            f"strobe.parallel: {exchange.what} failed on rank {self.rank} of {self.ranks}, which exchanges with {named}: one "
            f"of the group died, is later than the group's timeout, or called something else ({_first_line(error)})"
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def run(program: Program, links: Links) -> Any:
    """What the program of this rank returns."""
    answer = None
    while True:
        try:
            request = program.send(answer)
        except StopIteration as end:
            return end.value
        answer = None
        if isinstance(request, Start):
            answer = links.start(request)
        elif isinstance(request, Wait):
            links.wait(request.ticket)
        else:
            answer = request.run()


# ---- one process


class _Post:
    """What has been sent and not yet been received. Between two ranks the first message sent is for the first one awaited."""

    def __init__(self):
        self._boxes: dict[tuple[int, int, int], torch.Tensor] = {}
        self._numbers: Counter[tuple[str, int, int]] = Counter()

    def start(self, rank: int, exchange: Start) -> list[_Awaited]:
        """Send what an exchange of a rank sends; returns what it awaits."""
        for to, buffer in exchange.sends:
            if buffer.numel():
                self._boxes[rank, to, self._number("sent", rank, to)] = buffer.clone()
        return [
            _Awaited((sender, rank, self._number("awaited", sender, rank)), buffer)
            for sender, buffer in exchange.receives
            if buffer.numel()
        ]

    def _number(self, what: str, sender: int, to: int) -> int:
        self._numbers[what, sender, to] += 1
        return self._numbers[what, sender, to]

    def receive(self, awaited: list[_Awaited]) -> list[_Awaited]:
        """Fill the buffers of messages that are there; those that are not are returned."""
        missing = []
        for one in awaited:
            if one.key in self._boxes:
                one.buffer.copy_(self._boxes.pop(one.key))
            else:
                missing.append(one)
        return missing


class _Awaited(NamedTuple):
    """A message that has a number, and where it goes."""

    key: tuple[int, int, int]
    buffer: torch.Tensor


def run_together(programs: Sequence[Program]) -> list[Any]:
    """What the programs of all ranks return, run one after the other, each until it waits for a message that is not yet sent.

    RuntimeError if all of them wait: then processes would hang."""
    post, results = _Post(), [None] * len(programs)
    waiting: dict[int, list[_Awaited]] = {rank: [] for rank in range(len(programs))}
    while waiting:
        before = sum(map(len, waiting.values())), len(waiting)
        ready = []
        for rank in sorted(waiting):
            waiting[rank] = post.receive(waiting[rank])
            if waiting[rank]:
                continue
            ready.append(rank)
            answer = None
            while not waiting[rank]:
                try:
                    request = programs[rank].send(answer)
                except StopIteration as end:
                    results[rank] = end.value
                    del waiting[rank]
                    break
                answer = None
                if isinstance(request, Start):
                    answer = post.start(rank, request)
                elif isinstance(request, Wait):
                    waiting[rank] = post.receive(request.ticket)
                else:
                    answer = request.run()
        if not ready and before == (sum(map(len, waiting.values())), len(waiting)):
            raise RuntimeError(f"ranks {sorted(waiting)} wait for each other")
    return results


# ---- buffers


_ALIGNMENT = 16
"""Bytes: where a tensor in a buffer begins, as the kernels' copies (TMA) need it."""


class Parcel(NamedTuple):
    """Tensors of these shapes and dtypes in one buffer of bytes, so that they are one message."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def _sizes(self) -> list[int]:
        return [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]

    @property
    def bytes(self) -> int:
        """Bytes of the buffer; 0 if no tensor has an element."""
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in self._sizes)

    def buffer(self, device: torch.device) -> torch.Tensor:
        """A new buffer, of anything."""
        return torch.empty(self.bytes, dtype=torch.uint8, device=device)

    def open(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in a buffer, as views of it."""
        views, at = [], 0
        for shape, dtype, size in zip(self.shapes, self.dtypes, self._sizes, strict=True):
            views.append(buffer[at : at + size].view(dtype).view(shape))
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        return views


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The buffer of a Parcel that holds these tensors."""
    buffer = parcel_of(tensors).buffer(tensors[0].device)
    for view, x in zip(parcel_of(tensors).open(buffer), tensors, strict=True):
        view.copy_(x)
    return buffer


def parcel_of(tensors: Sequence[torch.Tensor]) -> Parcel:
    """The Parcel of tensors like these."""
    return Parcel(tuple(tuple(x.shape) for x in tensors), tuple(x.dtype for x in tensors))
