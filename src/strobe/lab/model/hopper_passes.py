"""What our Hopper kernels do tile by tile: the products of a turn of their loops, and what these read from shared memory.

A kernel walks over the scores once or more often, in tiles of rows x keys: each time is a `Pass`. Its products are wgmmas of 64
rows. A wgmma reads each of its operands once: 64 x 64 x 64 runs at the tensor cores' full rate and at 128 bytes a cycle
(`benchmarks/unit_costs.py`), so nothing is read less often, and groups share no reads.

Only these reads are counted. What the TMA writes does not come out of the same 128 bytes: with it, an H200 would have moved
104% of them (forward, head dims 192 and 128, 128k keys, in the benchmark of `docs/bench.md`). What the backward's threads store
and load themselves (dS, dQ on its way to the TMA, statistics that are not folded) is left out, too: the result is a lower
bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from strobe.call.dispatch import backend_module
from strobe.device import KNOWN
from strobe.kernels.sm90 import backward_config
from strobe.kernels.sm90.backward_short_config import ShortBackwardConfig
from strobe.kernels.sm90.config import ROWS_PER_GROUP, Config
from strobe.kernels.sm90.short_config import ShortConfig
from strobe.lab.model.cost import Tiling
from strobe.problem import AttentionProblem


class Product(NamedTuple):
    """A product of 2-byte numbers with 64 x columns results, each a sum over `depth`. in_registers: whether the first operand,
    64 x depth, is in registers; the second one, depth x columns, is always in shared memory."""

    columns: int
    depth: int
    in_registers: bool = False

    @property
    def flops(self) -> int:
        return 2 * ROWS_PER_GROUP * self.columns * self.depth

    @property
    def operand_bytes(self) -> int:
        """Bytes of operands that the product reads from shared memory."""
        return 2 * self.depth * (self.columns + (0 if self.in_registers else ROWS_PER_GROUP))


@dataclass(frozen=True)
class Pass:
    """A walk over the scores in tiles of tile_q rows x tile_kv keys. products: those of one tile, of all groups of a CTA
    together. weights: whether the weights are computed, an exponential each."""

    tile_q: int
    tile_kv: int
    products: tuple[Product, ...]
    weights: bool = True

    @property
    def flops(self) -> int:
        return sum(product.flops for product in self.products)

    @property
    def operand_bytes(self) -> int:
        """Bytes that the products of a tile read from shared memory."""
        return sum(product.operand_bytes for product in self.products)

    def blocks(self, problem: AttentionProblem) -> int:
        """How many tiles the pass visits, over heads and batch. A walk along rows and one along keys visit the same tiles."""
        return Tiling(replace(problem, phase="forward"), self.tile_q, self.tile_kv).blocks


def passes(problem: AttentionProblem) -> tuple[Pass, ...]:
    """The passes that our Hopper kernel makes over the scores of a problem on an H200; none if it does not take the problem."""
    backend, arch = backend_module("sm90"), KNOWN["H200"]
    if problem.dtype.itemsize != 2 or backend.refuses(problem, arch) is not None:
        return ()
    return of_config(backend.config(problem, arch))


def held(product: Product, depth: int) -> tuple[Product, ...]:
    """A product in two parts: the first operand's first `depth` columns are in registers, the others in shared memory."""
    parts = product._replace(depth=depth, in_registers=True), product._replace(depth=product.depth - depth)
    return tuple(part for part in parts if part.depth > 0)


def of_config(
    config: Config | ShortConfig | ShortBackwardConfig | backward_config.Config | backward_config.SplitConfig,
) -> tuple[Pass, ...]:
    """The passes of a kernel with this config: one for the forward and for the backward; two, over keys and over rows, for the
    split backward and where dS is stored."""
    dim, dim_v = config.head_dim, config.head_dim_v
    if isinstance(config, Config | ShortConfig):
        products = Product(config.tile_kv, dim), Product(dim_v, config.tile_kv, in_registers=True)  # S, O
        return (Pass(config.tile_q, config.tile_kv, config.tile_q // ROWS_PER_GROUP * products),)
    if isinstance(config, ShortBackwardConfig):
        of_sums = (dim + dim_v) // ROWS_PER_GROUP * (Product(config.keys, config.tile_q),)  # dK and dV, transposed
        others = Product(config.keys, dim), Product(config.keys, dim_v), Product(dim, config.keys)  # S, dP, dQ
        return (Pass(config.tile_q, config.tile_kv, (*others, *of_sums)),)
    rows = backward_config.SPLIT_TILE if isinstance(config, backward_config.SplitConfig) else config.tile_q
    of_s, of_dp = Product(rows, dim), Product(rows, dim_v)  # transposed: the rows of their results are 64 keys
    of_keys = Product(dim_v, rows, in_registers=True), Product(dim, rows, in_registers=True)  # dV, dK
    if isinstance(config, backward_config.Config):
        keys = backward_config.KEYS
        scores = *held(of_s, config.held_k), *held(of_dp, config.held_v)
        if config.folded:
            scores += (Product(rows, backward_config.PRODUCT),) * 2
        if config.stored:
            return Pass(rows, keys, 2 * (*scores, *of_keys)), _dq_pass(dim)
        of_rows = tuple(Product(columns, keys) for columns in config.share_columns)  # dQ, of both groups
        return (Pass(rows, keys, 2 * (*scores, *of_keys) + of_rows),)
    over_keys = Pass(rows, config.tile_kv, (*held(of_s, config.held), *held(of_dp, config.held), *of_keys))
    if config.stored:
        return over_keys, _dq_pass(dim)
    dq = Product(dim, config.tile_kv, in_registers=True)
    return over_keys, Pass(config.tile_q, config.tile_kv, 2 * (of_s, of_dp, dq))


def _dq_pass(dim: int) -> Pass:
    """The product dQ = dS K, of two groups."""
    config = backward_config.DqConfig(dim, dim)
    return Pass(config.tile_q, config.tile_kv, 2 * (Product(dim, config.tile_kv),), weights=False)
