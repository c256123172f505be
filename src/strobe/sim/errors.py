"""What the simulator finds wrong with a kernel: one class a kind of mistake."""


class SimulationError(Exception):
    """A kernel did what the GPU forbids, or what works there by luck alone."""


class Race(SimulationError):
    """Two accesses of one place, at least one a write, that nothing orders."""


class MissingFence(SimulationError):
    """The async proxy (TMA, tensor core) meets what a thread wrote to shared memory, with no fence between them."""


class Uninitialised(SimulationError):
    """A read of memory that nothing has written. (A product of it may be made if nothing depends on it.)"""


class Deadlock(SimulationError):
    """Everybody waits."""


class BarrierMisuse(SimulationError):
    """An mbarrier or named barrier with a wrong count or byte count, not initialised, or left in use at exit."""


class Unfinished(SimulationError):
    """Asynchronous work that nobody waited for: its result is used, or the CTA exits, before it is known to be done."""


class OutOfBounds(SimulationError):
    """An address outside the memory that it belongs to."""


class DoubleWrite(SimulationError):
    """One element of global memory written twice in a launch."""


class IllegalOperation(SimulationError):
    """Shapes, types or resources that the machine does not have (tensor memory beyond 512 columns, ...)."""


class Unsupported(SimulationError):
    """The simulator has no model of what the kernel calls."""
