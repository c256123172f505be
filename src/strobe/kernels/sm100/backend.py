"""The Blackwell backend: the forward alone, for problems that its TMA descriptors and tiles can take."""

from __future__ import annotations

from dataclasses import replace

from strobe.device import Arch
from strobe.kernels import has_triton, triton_version
from strobe.kernels.common.call import Buffers, Call, Tensors
from strobe.kernels.common.refusals import changed_scores_refused, gluon_refuses
from strobe.kernels.sm100.config import HEAD_DIMS, Config, choose
from strobe.kernels.splits import choose_splits
from strobe.problem import AttentionProblem, Varlen

OLDEST_TRITON = (3, 8)


def unproven(problem: AttentionProblem, arch: Arch) -> str | None:
    """See `strobe.call.dispatch`."""
    return "compiled and simulated, never yet run on a Blackwell GPU"


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    if arch.capability not in (100, 103):
        return f"needs a data-center Blackwell GPU (sm_100, sm_103), not {arch}"
    if not has_triton():
        return "needs Triton, which is not installed"
    if triton_version() < OLDEST_TRITON:
        return f"needs Triton {_dotted(OLDEST_TRITON)} or newer, not {_dotted(triton_version())}"
    dims = problem.head_dim, problem.head_dim_v
    if dims not in HEAD_DIMS:
        return f"takes head dims 64, 96 and 128, the same for k and v, or 192 and 128, not {dims[0]} and {dims[1]}"
    if problem.phase == "backward":
        return "has no backward yet"
    return gluon_refuses(problem) or changed_scores_refused(problem)


def config(problem: AttentionProblem, arch: Arch) -> Config:
    """The config that `choose` picks, with the keys split into parts if the tiles of queries alone leave the GPU idle."""
    chosen = choose(problem)
    lengths = problem.lengths
    if isinstance(lengths, Varlen) or not lengths.seqlen_q:
        return chosen  # only the device knows how long the sequences are
    tiles = -(-lengths.seqlen_q // chosen.tile_q) * lengths.batch * problem.heads_q
    last = lengths.seqlen_q - 1
    begin, end = problem.mask.kv_range(max(0, last - chosen.tile_q + 1), last, lengths.seqlen_q, lengths.seqlen_kv)
    blocks = -(-max(0, end - begin) // chosen.tile_kv)
    return replace(chosen, splits=choose_splits(tiles, blocks, arch.sms // chosen.ctas))


def buffers(problem: AttentionProblem, arch: Arch) -> Buffers:
    """See `strobe.kernels.common.call`."""
    from strobe.kernels.sm100 import launch

    return launch.buffers(problem, config(problem, arch))


def calls(problem: AttentionProblem, tensors: Tensors, arch: Arch) -> list[Call]:
    """See `strobe.kernels.common.call`."""
    from strobe.kernels.sm100 import launch

    return launch.calls(problem, tensors, arch, config(problem, arch))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
