"""What `strobe mutate` runs our kernels on: the problems of the tests, each in one of the orders."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from unittest.mock import patch

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import backward as launches  # noqa: E402
import problems  # noqa: E402
import test_ampere  # noqa: E402
import test_backward  # noqa: E402
import test_fp8_kernel  # noqa: E402
import test_kernels  # noqa: E402
import test_split_backward  # noqa: E402
import test_stored_backward  # noqa: E402
from problems import Case, Results, describe, tensors  # noqa: E402

from strobe.kernels.common import channel, named_barrier, tile_scheduler  # noqa: E402
from strobe.kernels.sm90 import (  # noqa: E402
    backward,
    backward_products,
    backward_scores,
    backward_split,
    backward_stores,
    backward_tiles,
    fp8,
    fp8_transpose,
    tile_queue,
)
from strobe.kernels.sm90 import descriptors as sm90_descriptors  # noqa: E402
from strobe.kernels.sm90 import forward as sm90_forward  # noqa: E402
from strobe.kernels.sm90.backward_config import Config, SplitConfig  # noqa: E402
from strobe.lab.simulated.mutate import Subject, Trial  # noqa: E402
from strobe.sim.attention import forward_launch  # noqa: E402

ORDERS = (
    ("in_order", 0),
    ("late", 0),
    ("random", 1),
    ("early", 0),
    *(("uneven", number) for number in range(4)),
    ("random", 2),
)

LARGEST = 40_000
"""Pairs of rows and keys, of all heads, that a simulation of a mutant should have."""

EQUIVALENT = json.loads((HERE / "equivalent_mutants.json").read_text())
"""Kernel -> mutants that compute the same, by their keys -> why."""


def trials(cases: Sequence[tuple], start: Callable) -> list[Trial]:
    """start: of the inputs and what stands beside a case and a dtype, what runs them in an order and checks the results."""

    def run(case, dtype, more, order: str, seed: int) -> None:
        start(tensors(case, dtype), *more)(order, seed)

    return [
        Trial(f"{case} {' '.join(map(str, more))} {order} {seed}", partial(run, smaller(case), dtype, more, order, seed))
        for (case, dtype, *more), (order, seed) in zip(cases, cycle(ORDERS), strict=False)
    ]


def smaller(case: Case) -> Case:
    """A case of many rows and keys with fewer; still of several tiles."""
    if case.n_q * case.n_kv * case.heads_q * case.batch <= LARGEST:
        return case
    return replace(case, n_q=min(case.n_q, 150), n_kv=min(case.n_kv, 170))


def forward(kernels, arch: int, t, config):
    """All tiles on one CTA."""
    problem, operands = describe(t)

    def run(order: str, seed: int) -> None:
        launch, out, lse, notes = forward_launch(kernels, arch, problem, operands, config)
        report = launch.simulate(order, seed)
        problems.check(Results(*merged(out, lse, t.q.dtype) if getattr(config, "splits", 1) > 1 else (out, lse)), t)
        assert notes is None or not notes.any(), "notes are left"
        assert report.smem_bytes <= config.smem_bytes(), "shared memory"
        if arch == 90:
            counters = next(x for x in launch.args if isinstance(x, torch.Tensor) and x.shape == (16,))
            assert not counters.any(), "counters are left"

    return run


def merged(parts, lses, dtype):
    """What the parts of a split forward are together."""
    lse = torch.logsumexp(lses, 0)
    share = torch.exp(lses - torch.where(lse.isneginf(), 0.0, lse)).transpose(-1, -2)
    return (share[..., None] * parts).sum(0).to(dtype), lse


def sm90() -> Subject:
    modules = [sm90_forward, tile_queue, channel, tile_scheduler, sm90_descriptors]
    helpers = ("pass_over", "publish", "wait_output")
    return Subject(
        modules, trials(test_kernels.HOPPER, partial(forward, sm90_forward, 90)), helpers, EQUIVALENT["sm90-forward"]
    )


def sm80() -> Subject:
    from strobe.kernels.sm80 import forward as kernels
    from strobe.kernels.sm80 import scores, tiles

    tried = trials(test_ampere.FORWARD, partial(forward, kernels, 80))
    return Subject([kernels, scores, tiles], tried, equivalent=EQUIVALENT["sm80-forward"])


def sm80_backward() -> Subject:
    from strobe.kernels.sm80 import backward as kernels
    from strobe.kernels.sm80 import backward_dq as dq
    from strobe.kernels.sm80 import backward_parts as parts
    from strobe.kernels.sm80 import backward_scores as scores

    tried = trials(test_ampere.BACKWARD, lambda t, config: test_ampere.Backward(t, config).run)
    return Subject([kernels, parts, dq, scores], tried, equivalent=EQUIVALENT["sm80-backward"])


def more_of(name: str) -> list[Trial]:
    """What is not used, and heads in several bundles."""
    return [
        Trial(f"{what.__name__}, {name}", partial(what, name, "in_order", 0))
        for what in (test_backward.unused_gets_0, test_backward.in_bundles)
    ]


def stored(kind: type) -> list[tuple]:
    """The cases where dS is stored of a kind of config."""
    return [one for one in test_stored_backward.CASES if isinstance(one[2], kind)]


def sm90_backward() -> Subject:
    helpers = ("finished", "await_ds", "announce_ds", "put_ds", "publish")
    cases = [*test_backward.CASES, *stored(Config)]
    tried = trials(cases, lambda t, config: launches.Backward(t, config).run)
    modules = [backward, backward_tiles, backward_products, backward_scores, backward_stores]
    return Subject(modules, [*tried, *more_of("one pass")], helpers, EQUIVALENT["sm90-backward"])


def sm90_backward_split() -> Subject:
    helpers = ("finished",)
    cases = [*test_split_backward.CASES, *stored(SplitConfig)]
    tried = trials(cases, lambda t, config: launches.SplitBackward(t, config).run)
    return Subject(
        [backward_split, named_barrier], [*tried, *more_of("two passes")], helpers, EQUIVALENT["sm90-backward-split"]
    )


def sm100() -> Subject:
    from strobe.kernels.sm100 import descriptors, memory
    from strobe.kernels.sm100 import forward as kernels

    cases = [*test_kernels.BLACKWELL, *test_kernels.SPLIT, *test_kernels.PAIRS]
    tried = trials(cases, partial(forward, kernels, 100))
    return Subject([kernels, memory, descriptors], tried, ("send",), EQUIVALENT["sm100-forward"])


def sm90_fp8() -> Subject:
    """At head dim 64 in three groups, where so few keys would else take two."""

    def start(t, descales):
        def run(order: str, seed: int) -> None:
            with patch.object(fp8, "MANY_KEYS", 0):
                test_fp8_kernel.Fp8(t, descales=descales).run(order, seed)

        return run

    tried = trials([(case, torch.float16, descales) for case, descales, _ in test_fp8_kernel.CASES], start)
    return Subject([fp8, fp8_transpose], tried, ("pass_over",), EQUIVALENT["sm90-fp8"])


def gemm(name: str) -> Subject:
    """In every order, on sides that tiles divide and others."""
    module, is_right = test_kernels.gemm(name), test_kernels.gemm_is_right
    tried = [
        Trial(f"{sides} {order} {seed}", partial(is_right, module, name, torch.float16, sides, order, seed))
        for order, seed in ORDERS
        for sides in test_kernels.SIDES
    ]
    return Subject([module], tried, equivalent=EQUIVALENT[f"gemm-{name}"])


SUBJECTS = {
    "sm90-forward": sm90,
    "sm90-backward": sm90_backward,
    "sm90-backward-split": sm90_backward_split,
    "sm90-fp8": sm90_fp8,
    "sm100-forward": sm100,
    "sm80-forward": sm80,
    "sm80-backward": sm80_backward,
    **{f"gemm-{name}": partial(gemm, name) for name in ("sm80", "sm90", "sm100")},
}
