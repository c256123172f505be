"""What an attention costs: products, exponentials and memory traffic, and the time they need on a GPU.

`Cost` is the least: counts are exact for the mask (`Mask.count`), and each input and result crosses HBM once. `Standard` is
attention in the steps of its formula, which write S and P to HBM and read them again. `Tiling` is flash attention tile by
tile: the tiles that a kernel visits, and what its CTAs load. `Tile` is one turn of its loop.

For e4m3 inputs (a forward, whose out is bfloat16) descales are not counted, and neither are copies that a kernel makes for
itself, such as V transposed.

The times are lower bounds from the peak rates in `strobe.device`; no kernel reaches them all at once, and the largest one
binds. A multiply-add is two FLOPs.
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
        """The unit that needs the longest time: "matmul", "exp2" or "HBM"."""
        return max((self.tensor, "matmul"), (self.exp2, "exp2"), (self.hbm, "HBM"))[1]

    def __str__(self) -> str:
        parts = f"matmul {_time(self.tensor)}, exp2 {_time(self.exp2)}, HBM {_time(self.hbm)}"
        return f"{_time(self.seconds)}, bound by {self.binds} ({parts})"


@dataclass(frozen=True)
class Cost:
    """The least work of a dense problem, in its phase. ValueError for packed sequences, whose lengths only the GPU knows."""

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
        """How many (query, key) pairs of one head are visible, over the batch."""
        return self.lengths.batch * self.problem.mask.count(self.lengths.seqlen_q, self.lengths.seqlen_kv)

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of the matrix products for a pair; a multiply-add counts as two. Forward: QK^T, PV. Backward: QK^T, dP, dV, dQ
        and dK, which is 2.5 times as much if D = Dv."""
        d, dv = self.problem.head_dim, self.problem.head_dim_v
        return 2 * (d + dv) if self.problem.phase == "forward" else 2 * (3 * d + 2 * dv)

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products, on visible pairs only."""
        return self.problem.heads_q * self.pairs * self.flops_per_pair

    @property
    def softmax_flops(self) -> int:
        """FLOPs beside the matrix products: five for a visible pair. Forward: scale, maximum, subtract, exponential, sum.
        Backward: scale, subtract the LSE, exponential, subtract delta, multiply by P."""
        return 5 * self.problem.heads_q * self.pairs

    @property
    def quoted_flops(self) -> int:
        """FLOPs as papers count them for TFLOP/s: causal is half of full, whatever its diagonal; any other mask is exact."""
        if not self.problem.mask.is_causal:
            return self.flops
        rectangle = self.lengths.batch * Mask().count(self.lengths.seqlen_q, self.lengths.seqlen_kv)
        return self.problem.heads_q * rectangle * self.flops_per_pair // 2

    @property
    def exponentials(self) -> int:
        """How many times exp2 is computed: once for a visible pair. The backward computes them again from the LSE."""
        return self.problem.heads_q * self.pairs

    @property
    def bytes_read(self) -> int:
        """Bytes read from HBM, each input once: q, k, v; in the backward also out, dout and the LSE."""
        inputs = self._elements_q + self._elements_kv
        if self.problem.phase == "forward":
            return inputs * self.problem.dtype.itemsize
        return (inputs + 2 * self._elements_out) * self.problem.dtype.itemsize + self._bytes_lse

    @property
    def bytes_written(self) -> int:
        """Bytes written to HBM, each result once: out and the LSE; in the backward dq, dk, dv."""
        if self.problem.phase == "forward":
            return self._bytes_out + self._bytes_lse
        return (self._elements_q + self._elements_kv) * self.problem.dtype.itemsize

    @property
    def intensity(self) -> float:
        """FLOPs of the matrix products for each byte to or from HBM."""
        moved = self.bytes_read + self.bytes_written
        return self.flops / moved if moved else 0.0

    @property
    def _elements_q(self) -> int:
        return self.lengths.batch * self.lengths.seqlen_q * self.problem.heads_q * self.problem.head_dim

    @property
    def _elements_out(self) -> int:
        return self.lengths.batch * self.lengths.seqlen_q * self.problem.heads_q * self.problem.head_dim_v

    @property
    def _bytes_out(self) -> int:
        """Bytes of out, which has the inputs' dtype or, where that has one byte, bfloat16 (`strobe.attention_fp8`)."""
        return self._elements_out * max(2, self.problem.dtype.itemsize)

    @property
    def _elements_kv(self) -> int:
        per_key = self.problem.heads_kv * (self.problem.head_dim + self.problem.head_dim_v)
        return self.lengths.batch * self.lengths.seqlen_kv * per_key

    @property
    def _bytes_lse(self) -> int:
        rows = self.lengths.batch * self.lengths.seqlen_q * self.problem.heads_q
        return rows * (8 if self.problem.dtype == torch.float64 else 4)

    def lower_bound(self, arch: Arch) -> LowerBound:
        """The least times of the units of an arch. ValueError where its rates, or its rate for this dtype, are not known."""
        return LowerBound(
            tensor=self.flops / matmul_rate(arch, self.problem.dtype),
            exp2=self.exponentials / arch.exp2_rate,
            hbm=(self.bytes_read + self.bytes_written) / arch.dram_bandwidth,
        )


class Standard(Cost):
    """The same problem by standard attention: S = Q K^T, P = softmax(S) and O = P V one after the other, with S and P, in
    the problem's dtype, in HBM between them; the mask is added to all pairs of the rectangle. Its backward reads P instead of
    computing it again. (Algorithms 0 and 3 of Dao et al. 2022, FlashAttention, arXiv 2205.14135.) For e4m3 inputs S is counted
    with one byte a pair, too, although nobody would round it so far: the count is a lower bound."""

    @cached_property
    def pairs(self) -> int:
        """How many (query, key) pairs one head has, over the batch, visible or not."""
        return self.lengths.batch * self.lengths.seqlen_q * self.lengths.seqlen_kv

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of the matrix products for a pair. Forward: QK^T, PV. Backward: dV, dP, dQ, dK."""
        return (2 if self.problem.phase == "forward" else 4) * (self.problem.head_dim + self.problem.head_dim_v)

    @property
    def softmax_flops(self) -> int:
        """FLOPs beside the matrix products, for each pair. Forward: scale, maximum, subtract, exponential, sum, divide.
        Backward: multiply by P, sum, subtract, multiply."""
        return (6 if self.problem.phase == "forward" else 4) * self.problem.heads_q * self.pairs

    @property
    def exponentials(self) -> int:
        return super().exponentials if self.problem.phase == "forward" else 0

    @property
    def matrix_bytes(self) -> int:
        """Bytes of each of the matrices S, P, dP and dS."""
        return self.problem.heads_q * self.pairs * self.problem.dtype.itemsize

    @property
    def passes(self) -> int:
        """How often one of the matrices S, P, dP and dS is read or written, in all."""
        return 4 if self.problem.phase == "forward" else 7

    @property
    def bytes_read(self) -> int:
        """Bytes read from HBM. Forward: q, k, v; S and P once each. Backward: q, k, v, and dout twice; P twice, dP once, dS
        twice."""
        if self.problem.phase == "forward":
            return super().bytes_read + 2 * self.matrix_bytes
        inputs = self._elements_q + self._elements_kv + 2 * self._elements_out
        return inputs * self.problem.dtype.itemsize + 5 * self.matrix_bytes

    @property
    def bytes_written(self) -> int:
        """Bytes written to HBM. Forward: S, P, out. Backward: dP, dS, dq, dk, dv."""
        if self.problem.phase == "forward":
            return self._bytes_out + 2 * self.matrix_bytes
        return (self._elements_q + self._elements_kv) * self.problem.dtype.itemsize + 2 * self.matrix_bytes


@dataclass(frozen=True)
class Tile:
    """One turn of flash attention's forward loop: `rows` query rows against `keys` keys. itemsize: bytes of an element of Q, K,
    V and O."""

    rows: int
    keys: int
    head_dim: int
    head_dim_v: int
    itemsize: int = 2

    @property
    def flops(self) -> int:
        """FLOPs of the two matrix products, S = Q K^T and O += P V."""
        return 2 * self.rows * self.keys * (self.head_dim + self.head_dim_v)

    @property
    def softmax_flops(self) -> int:
        """FLOPs beside the matrix products: five for a pair, as in `Cost`, and for a row those of scaling its O and its sum to
        the new maximum."""
        return self.rows * (5 * self.keys + self.head_dim_v + 4)

    @property
    def exponentials(self) -> int:
        """How many times exp2 is computed: once for a pair, and once for a row's scale factor."""
        return self.rows * (self.keys + 1)

    def bytes_moved(self, seqlen_kv: int) -> int:
        """Bytes that a CTA moves for its rows and `seqlen_kv` keys: it loads Q once and all of K and V, and stores O once."""
        return (self.rows + seqlen_kv) * (self.head_dim + self.head_dim_v) * self.itemsize

    def intensity(self, seqlen_kv: int) -> float:
        """FLOPs of the matrix products for each byte that the CTA moves. seqlen_kv: a multiple of the tile's keys."""
        return self.flops * (seqlen_kv // self.keys) / self.bytes_moved(seqlen_kv)


@dataclass(frozen=True)
class Tiling:
    """A forward, tile by tile: the tiles of tile_q rows x tile_kv keys that the mask's band does not hide as a whole.

    packed: whether the rows of a tile are those of all query heads that share a key head (GQA packing), so that K and V are
    loaded once for all of them. ValueError for packed sequences, for a backward, or for tiles of no rows or keys.
    """

    problem: AttentionProblem
    tile_q: int = 128
    tile_kv: int = 128
    packed: bool = False

    def __post_init__(self):
        if not isinstance(self.problem.lengths, Dense) or self.problem.phase != "forward":
            raise ValueError(f"tiling: the problem must be a forward of dense lengths, got {self.problem}")
        if min(self.tile_q, self.tile_kv) < 1:
            raise ValueError(f"tiling: a tile must have rows and keys, got {self.tile_q} x {self.tile_kv}")

    @property
    def tile(self) -> Tile:
        problem = self.problem
        return Tile(self.tile_q, self.tile_kv, problem.head_dim, problem.head_dim_v, problem.dtype.itemsize)

    @property
    def _heads_in_a_tile(self) -> int:
        return self.problem.group if self.packed else 1

    @property
    def _copies(self) -> int:
        """How many heads (packed: groups of heads) there are over all sequences; each has the same tiles."""
        return self.problem.lengths.batch * self.problem.heads_q // self._heads_in_a_tile

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        """The key blocks [begin, end) that each tile of queries visits, for the tiles of one head (packed: of one group)."""
        n_q, n_kv, heads = self.problem.lengths.seqlen_q, self.problem.lengths.seqlen_kv, self._heads_in_a_tile
        ranges = []
        for first in range(0, n_q * heads, self.tile_q):
            last = min(first + self.tile_q, n_q * heads) - 1
            begin, end = self.problem.mask.kv_range(first // heads, last // heads, n_q, n_kv)
            ranges.append((begin // self.tile_kv, -(-end // self.tile_kv)) if end > begin else (0, 0))
        return ranges

    @property
    def tiles(self) -> int:
        """Tiles of queries, over heads and batch: what a GPU shares out to its CTAs."""
        return self._copies * len(self._ranges)

    @property
    def blocks(self) -> int:
        """How many turns of the loop all tiles of queries take together."""
        return self._copies * sum(end - begin for begin, end in self._ranges)

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products on whole tiles, which include the pairs that the mask then hides."""
        return self.blocks * self.tile.flops

    @property
    def bytes_loaded(self) -> int:
        """Bytes that all CTAs load, from HBM or from L2: Q once, and K and V again for each tile of queries."""
        return self._bytes_q + self._keys_loaded * self._bytes_per_key

    @property
    def _keys_loaded(self) -> int:
        n_kv = self.problem.lengths.seqlen_kv
        return self._copies * sum(min(end * self.tile_kv, n_kv) - begin * self.tile_kv for begin, end in self._ranges)

    @property
    def _bytes_per_key(self) -> int:
        return (self.problem.head_dim + self.problem.head_dim_v) * self.problem.dtype.itemsize

    @property
    def _bytes_q(self) -> int:
        problem, lengths = self.problem, self.problem.lengths
        return lengths.batch * lengths.seqlen_q * problem.heads_q * problem.head_dim * problem.dtype.itemsize

    @property
    def useful(self) -> float:
        """The share of `flops` that is spent on visible pairs."""
        return Cost(self.problem).flops / self.flops if self.flops else 0.0


def matmul_rate(arch: Arch, dtype: torch.dtype) -> float:
    """FLOP/s of exact products in a dtype: of float32 by multiply-adds or by three products of TF32, which has half the rate of
    16 bits (`kernels.sm80.products`). ValueError where the rates of an arch, or its rate for this dtype, are not known."""
    of_float32 = max(arch.fp32_flops, arch.tensor_flops / 6 if arch.capability >= 80 else 0.0)
    rates = {torch.float32: of_float32, torch.float16: arch.tensor_flops, torch.float8_e4m3fn: arch.fp8_flops}
    if arch.capability >= 80:
        rates[torch.bfloat16] = arch.tensor_flops
    if dtype == torch.float8_e4m3fn and arch.is_gpu and arch.capability < 89:
        raise ValueError(f"cost: fp8 needs tensor cores that take it, from sm_89 on (L4, H200, ...), not {arch}")
    rate = rates.get(dtype, 0.0)
    if not (rate and arch.dram_bandwidth and arch.exp2_rate):
        raise ValueError(f"cost: no peak rates of {arch} for {str(dtype).removeprefix('torch.')} are known")
    return rate


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
