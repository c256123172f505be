"""The Hopper forward over a cache: prompts, and chunks of prompts."""

from __future__ import annotations

from strobe.device import Arch
from strobe.kernels.common.call import Buffers, Call, Tensors
from strobe.kernels.common.refusals import gluon_refuses
from strobe.kernels.decode import backend as decode
from strobe.kernels.sm90.cache_config import LEAST_BOX, MANY_QUERIES, as_attention, choose, least_longest, least_queries, tiles
from strobe.kernels.sm90.config import Config
from strobe.masks import MAX_BOUND
from strobe.serving.problem import DecodeProblem


def refuses(problem: DecodeProblem, arch: Arch) -> str | None:
    if arch.capability != 90:
        return f"needs a Hopper GPU (sm_90), not {arch}"
    if reason := decode.refuses(problem, arch) or _not_taken(problem):  # of which the decode kernel serves what is left
        return reason
    if reason := gluon_refuses(as_attention(problem)):
        return reason
    least = least_longest(choose(problem, arch))
    if problem.lengths.seqlen_q < least:
        return f"is for requests of {least} queries or more, not {problem.lengths.seqlen_q}"
    return None


def unproven(problem: DecodeProblem, arch: Arch) -> str | None:
    """Why the decode kernel, which shares the keys of a tile among multiprocessors, is the better choice; or None."""
    if not arch.sms:
        return None
    config, sms = choose(problem, arch), arch.sms
    number = tiles(problem, config)
    if 2 * number < sms:
        return f"would leave most of {sms} multiprocessors idle, with {number} tiles of {config.tile_q} queries"
    few = problem.lengths.seqlen_q < MANY_QUERIES
    if few and problem.ragged and number < sms:
        return f"may leave many of {sms} multiprocessors idle, with {number} tiles of {config.tile_q} queries or more"
    if few and not problem.ragged and 3 * -(-number // sms) * sms > 4 * number:
        return f"would leave many of {sms} multiprocessors idle at the end, with {number} tiles of {config.tile_q} queries"
    return None


def _not_taken(problem: DecodeProblem) -> str | None:
    """What the decode kernel takes and this does not, in words; or None."""
    if problem.deterministic:
        return "gives bits that depend on the number of queries"
    if problem.kv_dtype != problem.dtype:
        return "takes no cache of 8 bits"
    if problem.tree or problem.leftpad:
        return f"takes no {'tree' if problem.tree else 'leftpad'}"
    if problem.shared or problem.head_dim > decode.MOST_COLUMNS:
        return "takes no values that are columns of keys"
    if problem.page_size is not None and problem.page_size % LEAST_BOX:
        return f"takes pages of a multiple of {LEAST_BOX} keys, not {problem.page_size}"
    rows = [x for x in problem.page_rows if x is not None]
    if len(rows) < 2 or problem.pages * max(rows) >= MAX_BOUND:
        return "needs pages that lie a whole number of rows apart, and fewer than 2^30 rows in all"
    if not problem.scale > 0 and not problem.score.softcap:
        return f"takes a positive scale (it takes maxima before it scales), not {problem.scale:g}"
    return None


def config(problem: DecodeProblem, arch: Arch) -> Config:
    return choose(problem, arch)


def origin(problem: DecodeProblem, arch: Arch) -> str | None:
    """Who serves requests of few queries, where there may be some."""
    if not problem.ragged:
        return None
    least = least_queries(problem, choose(problem, arch))
    return (
        f"for requests of {MANY_QUERIES} queries or more, and of {least} or more where their tiles keep multiprocessors busy; "
        "others are the decode kernel's, whose launch goes ahead"
    )


def buffers(problem: DecodeProblem, arch: Arch) -> Buffers:
    """See `strobe.kernels.common.call`."""
    from strobe.kernels.sm90 import cache_launch

    return cache_launch.buffers(problem, arch)


def calls(problem: DecodeProblem, tensors: Tensors, arch: Arch) -> list[Call]:
    """See `strobe.kernels.common.call`."""
    from strobe.kernels.sm90 import cache_launch

    return cache_launch.calls(problem, tensors, arch, choose(problem, arch))
