"""A machine with registers and one array of global memory alone: what the simulator's frontend needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from strobe.sim import context


class Memory:
    """A global array: its elements lie one after the other."""

    def __init__(self, flat: torch.Tensor):
        self.flat = flat


class RegistersMachine:
    """Remembers in `issued` which pipe took how many elements."""

    num_ctas = 1

    def __init__(self):
        self.partition = SimpleNamespace(warps=4)
        self.issued: list[tuple[str, int]] = []

    def issue(self, pipe, elements, operands):
        self.issued.append((pipe, elements))

    def needs(self, *operands):
        pass

    def program_id(self, axis):
        return 5 + axis

    def num_programs(self, axis):
        return 100 + axis

    def read_global(self, array, offsets, mask):
        return array.flat[offsets if mask is None else torch.where(mask, offsets, 0)]

    def write_global(self, array, offsets, values, mask):
        lanes = torch.ones_like(offsets, dtype=torch.bool) if mask is None else mask
        array.flat[offsets[lanes]] = values.expand(offsets.shape)[lanes]

    def atomic_global(self, array, offsets, values, mask, operation, sem="acq_rel"):
        old = array.flat[offsets].clone()
        for lane, place_ in enumerate(offsets.reshape(-1).tolist()):
            array.flat[place_] = operation(array.flat[place_], values.reshape(-1)[lane])
        return old


@pytest.fixture(autouse=True)
def machine():
    """The machine that runs during a test."""
    running = RegistersMachine()
    context.running.append(running)
    yield running
    context.running.remove(running)
