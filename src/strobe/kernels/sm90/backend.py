"""The Hopper backend, for problems that its TMA descriptors and tiles can take."""

from __future__ import annotations

from dataclasses import replace

from strobe.device import Arch
from strobe.kernels import has_triton
from strobe.kernels.common.call import Buffers, Call, Tensors
from strobe.kernels.common.refusals import gluon_refuses
from strobe.kernels.sm90.backward_config import SplitConfig
from strobe.kernels.sm90.backward_config import choose as choose_backward
from strobe.kernels.sm90.backward_config import origin as origin_of_backward
from strobe.kernels.sm90.backward_short_config import choose as choose_short_backward
from strobe.kernels.sm90.backward_short_config import takes as takes_short_backward
from strobe.kernels.sm90.config import Config, choose
from strobe.kernels.sm90.config import origin as origin_of_choice
from strobe.kernels.sm90.short_config import choose as choose_short
from strobe.kernels.sm90.short_config import takes as takes_short
from strobe.problem import AttentionProblem, Varlen, without_gradient

MOST_ROWS = 2**29

ONE_BLOCK = "all keys are one block"

_optimistic = True


def use_optimistic_softmax(use: bool) -> None:
    """Say whether `config` may take the optimistic softmax."""
    global _optimistic
    _optimistic = use


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    if arch.capability != 90:
        return f"needs a Hopper GPU (sm_90), not {arch}"
    if not has_triton():
        return "needs Triton, which is not installed"
    if not problem.scale > 0 and not problem.score.softcap:
        return f"takes a positive scale (it takes maxima before it scales), not {problem.scale:g}"
    if problem.phase == "backward":
        return gluon_refuses(problem) or backward_refuses(problem) or without_gradient(problem)
    return gluon_refuses(problem)


def backward_refuses(problem: AttentionProblem) -> str | None:
    """Why the backward alone does not take a problem; or None."""
    if problem.partial and isinstance(choose_backward(problem), SplitConfig):
        return "gives partial gradients, in float32, in one pass alone, which head dims over 192 and `deterministic` exclude"
    lengths = problem.lengths
    rows = problem.heads_q * (lengths.total_q if isinstance(lengths, Varlen) else lengths.batch * lengths.seqlen_q)
    if rows >= MOST_ROWS:
        return f"counts the query rows of all heads in int32 and takes fewer than 2^29 of them in its backward, not {rows}"
    return None


def config(problem: AttentionProblem, arch: Arch):
    if problem.phase == "backward":
        return choose_short_backward(problem) if takes_short_backward(problem) else choose_backward(problem)
    if takes_short(problem):
        return choose_short(problem)
    return long_config(problem)


def long_config(problem: AttentionProblem) -> Config:
    """What the forward for any number of keys would run with."""
    return replace(choose(problem), optimistic=_optimistic and may_be_optimistic(problem), partial=problem.partial)


def origin(problem: AttentionProblem, arch: Arch) -> str:
    """Where the config comes from, in words."""
    if problem.phase == "backward":
        return ONE_BLOCK if takes_short_backward(problem) else origin_of_backward(problem)
    return ONE_BLOCK if takes_short(problem) else origin_of_choice(problem)


def may_be_optimistic(problem: AttentionProblem) -> bool:
    """Whether a tile's first block is likely to say how large its scores are. Functions and biases may put what counts
    anywhere; slopes favour near keys, which lead under a causal mask alone."""
    score, mask = problem.score, problem.mask
    near = score.alibi is None or mask.right == 0
    return near and score.bias is None and score.function is None and mask.function is None


def buffers(problem: AttentionProblem, arch: Arch) -> Buffers:
    """See `strobe.kernels.common.call`."""
    if problem.phase == "backward":
        if takes_short_backward(problem):
            from strobe.kernels.sm90 import backward_short_launch

            return backward_short_launch.buffers(problem, arch, choose_short_backward(problem))
        from strobe.kernels.sm90 import backward_launch

        return backward_launch.buffers(problem, choose_backward(problem))
    if takes_short(problem):
        from strobe.kernels.sm90 import short_launch

        return short_launch.buffers(problem)
    from strobe.kernels.sm90 import launch

    return launch.buffers(problem)


def calls(problem: AttentionProblem, tensors: Tensors, arch: Arch) -> list[Call]:
    """See `strobe.kernels.common.call`."""
    if problem.phase == "backward":
        if takes_short_backward(problem):
            from strobe.kernels.sm90 import backward_short_launch

            return [backward_short_launch.backward_call(problem, tensors, arch, choose_short_backward(problem))]
        from strobe.kernels.sm90 import backward_launch

        return backward_launch.calls(problem, tensors, arch, choose_backward(problem))
    if takes_short(problem):
        from strobe.kernels.sm90 import short_launch

        return [short_launch.forward_call(problem, tensors, arch, choose_short(problem))]
    from strobe.kernels.sm90 import launch

    return launch.calls(problem, tensors, arch, config(problem, arch))
