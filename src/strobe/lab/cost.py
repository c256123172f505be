"""What an attention costs at least: products, exponentials and memory traffic, and the time they need on a GPU.

Counts are exact for the mask (`Mask.count`), not estimates: a kernel that visits whole tiles does more. The times are
lower bounds from the peak rates in `strobe.device`; no kernel reaches them all at once, and the largest one binds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from strobe.device import Arch
from strobe.masks import Mask
from strobe.problem import AttentionProblem, Dense


@dataclass(frozen=True)
class LowerBound:
    """Seconds that each unit of a GPU needs at its peak rate; attention takes at least the largest of them."""

    tensor: float
    exp2: float
    hbm: float

    @property
    def seconds(self) -> float:
        return max(self.tensor, self.exp2, self.hbm)

    @property
    def binds(self) -> str:
        """The unit that needs the longest: "matmul", "exp2" or "HBM"."""
        return max((self.tensor, "matmul"), (self.exp2, "exp2"), (self.hbm, "HBM"))[1]

    def __str__(self) -> str:
        parts = f"matmul {_time(self.tensor)}, exp2 {_time(self.exp2)}, HBM {_time(self.hbm)}"
        return f"{_time(self.seconds)}, bound by {self.binds} ({parts})"


@dataclass(frozen=True)
class Cost:
    """The least work of a dense problem, in its phase. ValueError for packed sequences, whose lengths the GPU holds."""

    problem: AttentionProblem

    def __post_init__(self):
        if not isinstance(self.problem.lengths, Dense):
            raise ValueError("cost: the problem must be dense; the lengths of packed sequences are known on the device only")

    @property
    def lengths(self) -> Dense:
        assert isinstance(self.problem.lengths, Dense)
        return self.problem.lengths

    @cached_property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one head, over the batch."""
        return self.lengths.batch * self.problem.mask.count(self.lengths.seqlen_q, self.lengths.seqlen_kv)

    @property
    def flops_per_pair(self) -> int:
        """Multiply-adds, counted as two. Forward: QK^T, PV. Backward: QK^T and dP, dV, dQ, dK: 2.5x if D = Dv."""
        d, dv = self.problem.head_dim, self.problem.head_dim_v
        return 2 * (d + dv) if self.problem.phase == "forward" else 2 * (3 * d + 2 * dv)

    @property
    def flops(self) -> int:
        """Of the matrix products, on visible pairs only."""
        return self.problem.heads_q * self.pairs * self.flops_per_pair

    @property
    def quoted_flops(self) -> int:
        """As the field quotes TFLOP/s: causal is half of full, whatever its diagonal; any other mask is exact."""
        if not self.problem.mask.is_causal:
            return self.flops
        rectangle = self.lengths.batch * Mask().count(self.lengths.seqlen_q, self.lengths.seqlen_kv)
        return self.problem.heads_q * rectangle * self.flops_per_pair // 2

    @property
    def exponentials(self) -> int:
        """exp2, one a visible pair; the backward computes them again from the LSE."""
        return self.problem.heads_q * self.pairs

    @property
    def bytes_read(self) -> int:
        """From HBM, each input once: q, k, v; in the backward also out, dout and the LSE."""
        inputs = self._elements_q + self._elements_kv
        if self.problem.phase == "forward":
            return inputs * self.problem.dtype.itemsize
        return (inputs + 2 * self._elements_out) * self.problem.dtype.itemsize + self._bytes_lse

    @property
    def bytes_written(self) -> int:
        """To HBM, each result once: out and the LSE; in the backward dq, dk, dv."""
        if self.problem.phase == "forward":
            return self._elements_out * self.problem.dtype.itemsize + self._bytes_lse
        return (self._elements_q + self._elements_kv) * self.problem.dtype.itemsize

    @property
    def intensity(self) -> float:
        """FLOPs for each byte to or from HBM."""
        moved = self.bytes_read + self.bytes_written
        return self.flops / moved if moved else 0.0

    @property
    def _elements_q(self) -> int:
        return self.lengths.batch * self.lengths.seqlen_q * self.problem.heads_q * self.problem.head_dim

    @property
    def _elements_out(self) -> int:
        return self.lengths.batch * self.lengths.seqlen_q * self.problem.heads_q * self.problem.head_dim_v

    @property
    def _elements_kv(self) -> int:
        per_key = self.problem.heads_kv * (self.problem.head_dim + self.problem.head_dim_v)
        return self.lengths.batch * self.lengths.seqlen_kv * per_key

    @property
    def _bytes_lse(self) -> int:
        rows = self.lengths.batch * self.lengths.seqlen_q * self.problem.heads_q
        return rows * (8 if self.problem.dtype == torch.float64 else 4)

    def lower_bound(self, arch: Arch) -> LowerBound:
        """The times on an arch. ValueError where its rates, or its rate for this dtype, are not known."""
        rate = _matmul_rate(arch, self.problem.dtype)
        if not (rate and arch.dram_bandwidth and arch.exp2_rate):
            dtype = str(self.problem.dtype).removeprefix("torch.")
            raise ValueError(f"cost: no peak rates of {arch} for {dtype} are known")
        return LowerBound(
            tensor=self.flops / rate,
            exp2=self.exponentials / arch.exp2_rate,
            hbm=(self.bytes_read + self.bytes_written) / arch.dram_bandwidth,
        )


def _matmul_rate(arch: Arch, dtype: torch.dtype) -> float:
    """FLOP/s of exact products in a dtype, 0.0 if unknown: float32 runs outside the tensor cores, which round to TF32."""
    if dtype == torch.float16 or (dtype == torch.bfloat16 and arch.capability >= 80):
        return arch.tensor_flops
    return arch.fp32_flops if dtype == torch.float32 else 0.0


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
