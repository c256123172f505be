"""Mistakes that the simulator finds in a kernel: one class for each kind."""


class SimulationError(Exception):
    """A mistake in a kernel: it did what the GPU forbids, or what works there by luck alone."""


class Race(SimulationError):
    """Two accesses of one place, at least one a write, that nothing orders."""


class MissingFence(SimulationError):
    """An access of the async proxy (TMA, tensor core) to what a thread wrote to shared memory, with no fence between them."""


class Uninitialised(SimulationError):
    """A read of memory that nothing has written. (A product of it may be made if nothing depends on it.)"""


class Deadlock(SimulationError):
    """A state in which everybody waits."""


class BarrierMisuse(SimulationError):
    """An mbarrier or named barrier with a wrong count or byte count, not initialised, or left in use at exit."""


class Unfinished(SimulationError):
    """Asynchronous work that nobody waited for: its result is used, or the CTA exits, before it is known to be done."""


class OutOfBounds(SimulationError):
    """An address outside the memory that it belongs to."""


class DoubleWrite(SimulationError):
    """One element of global memory written twice in a launch."""


class IllegalOperation(SimulationError):
    """A use of shapes, types or resources that the machine does not have (tensor memory beyond 512 columns, ...)."""


class Unsupported(SimulationError):
    """A call of something that the simulator has no model of."""
