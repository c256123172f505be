"""Measures the mean clock of the SMs between two moments of a stream. The GPU itself counts it: cycles over nanoseconds.

The driver only gives the clock at some moment of the last 200 ms; a timing of 30 ms under a power limit may have had another
one. With the right clock, TFLOP/s can be split into what a kernel does in a cycle and how many cycles the power limit leaves.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _read(times, cycles):
    """Stores, in each program, the time in ns and the cycle counter of the SM on which the program runs."""
    sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    time = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    cycle = tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(times + sm, time)
    tl.store(cycles + sm, cycle)


class SmClock:
    """A clock of the SMs. Call begin() and end() around launches on the current stream and, once these are done, mhz()."""

    def __init__(self, device: torch.device):
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._begin, self._end = (torch.zeros(2, self._sms, dtype=torch.int64, device=device) for _ in range(2))

    def begin(self) -> None:
        self._note(self._begin)

    def end(self) -> None:
        self._note(self._end)

    def _note(self, where: torch.Tensor) -> None:
        where.zero_()
        _read[(4 * self._sms,)](where[0], where[1], num_warps=1)

    def mhz(self) -> float:
        """The mean clock in MHz: the median over the SMs that were read at the begin and at the end; NaN if there is none."""
        met = (self._begin[0] > 0) & (self._end[0] > 0)
        nanoseconds, cycles = (self._end - self._begin)[:, met].double()
        return (1e3 * cycles / nanoseconds).median().item() if met.any() else float("nan")
