"""The launches of a Hopper backward in the simulator, one after the other as in a stream."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from problems import Results, Tensors, check, describe, formula, upstream

from strobe.kernels.common.call import Tensors as CallTensors
from strobe.kernels.sm90 import backward, backward_dq, backward_short, backward_split
from strobe.kernels.sm90.backward_config import Config, SplitConfig
from strobe.kernels.sm90.backward_short_config import ShortBackwardConfig
from strobe.problem import Upstream, summed_bias
from strobe.sim.attention import Backward as Left
from strobe.sim.attention import backward_tensors, simulate_backward
from strobe.sim.machine import Report


class Backward:
    """The launches of a backward, for the inputs t. ctas: how many share the blocks of one pass. kernels: the module of the
    main kernels; dq_kernels: of the one that computes dQ where dS is stored. resident: how many of the CTAs run at a time."""

    def __init__(
        self,
        t: Tensors,
        config: Config | SplitConfig | ShortBackwardConfig,
        ctas: int = 1,
        kernels: ModuleType = backward,
        dq_kernels: ModuleType = backward_dq,
        resident: int = 1,
    ):
        self.t, self.config, self.ctas, self.kernels, self.dq_kernels = t, config, ctas, kernels, dq_kernels
        self.resident = resident
        problem, self.operands = describe(t, "backward")
        self.problem = replace(problem, learned=("bias",) if problem.score.bias is not None else ())
        exact = formula(t)
        dout, dlse = upstream(exact.out, exact.lse)
        half = t.q.dtype
        self.given = Upstream(exact.out.to(half), exact.lse.float(), dout.to(half), dlse.float())

    def run(self, order: str, seed: int) -> Report:
        """AssertionError if the gradients are wrong, or notes or counters are left."""
        grads, tensors, report = self.simulate(order, seed)
        dbias = {} if grads.bias is None else {"dbias": summed_bias(grads.bias, self.operands.bias)}
        check(Results(None, None, grads.q, grads.k, grads.v, **dbias), self.t, ("dq", "dk", "dv", *dbias))
        left = tensors.key_notes, tensors.row_notes, tensors.arrivals, tensors.counters
        assert not any(numbers is not None and numbers.any() for numbers in left)
        return report

    def simulate(self, order: str, seed: int) -> Left:
        return simulate_backward(
            self.problem,
            self.operands,
            self.given,
            self.config,
            order,
            seed,
            self.ctas,
            self.kernels,
            self.dq_kernels,
            self.resident,
        )

    def tensors(self) -> CallTensors:
        """Those of the launches, to be filled."""
        return backward_tensors(self.problem, self.operands, self.given, self.config)


class SplitBackward(Backward):
    """The launches of a backward in two passes."""

    def __init__(self, t: Tensors, config: SplitConfig, kernels: ModuleType = backward_split, **more):
        super().__init__(t, config, kernels=kernels, **more)


class ShortBackward(Backward):
    """The launch of a backward to few keys. ctas: multiprocessors, each of which has as many CTAs as the config says."""

    def __init__(self, t: Tensors, config: ShortBackwardConfig, ctas: int = 1, kernels: ModuleType = backward_short, **more):
        super().__init__(t, config, ctas, kernels, **more)
