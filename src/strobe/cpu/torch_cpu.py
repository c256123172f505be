"""The backend that runs PyTorch's own CPU flash kernel (C++, vectorised), where that computes exactly what is asked.

The kernel is faster than `tiled`, by the factors in docs/cpu.md. It knows one mask, the top-left causal one; any other mask is
passed as a dense bias of 0 and -inf. It takes no changes of scores. A NaN in a masked-out key or value reaches rows that do not
see it, so `tiled` computes a result again that is not finite. The kernel also loses a NaN: where a row has fewer scores than a
vector and all of them are NaN, its maximum is -inf, and the kernel treats the row as one that sees nothing, with an LSE of 0.
A row with an infinite score it may give as 0, with an LSE of infinity.
"""

from __future__ import annotations

import torch

from strobe.cpu import tiled
from strobe.device import Arch
from strobe.masks import Full, Mask
from strobe.problem import AttentionProblem, Dense, Gradients, Operands, Upstream, with_tensors

_MAX_BIAS = 1 << 24
"""How many pairs of a row and a key a dense mask may have (64 MiB in float32). Larger problems go to `tiled`, which needs no
such memory."""


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    lengths = problem.lengths
    if arch.name != "CPU":
        return "runs on a CPU only"
    if problem.dtype.itemsize == 1:
        return f"takes no inputs of 8 bits, such as {str(problem.dtype).removeprefix('torch.')}"
    if not isinstance(lengths, Dense):
        return "takes no packed sequences"
    if problem.dropout:
        return "takes no dropout"
    if problem.seqused:
        return "takes no seqused"
    if problem.placed:
        return "takes no rows and keys that stand elsewhere in a longer sequence"
    if problem.partial and problem.dtype.itemsize < 4:
        return f"gives results in the inputs' dtype, not partial ones of {str(problem.dtype).removeprefix('torch.')} in float32"
    if problem.mask.function is not None:
        return f"takes no mask function, such as {problem.mask.function}"
    if problem.mask.blocks is not None:
        return f"takes no {problem.mask}"
    if not _knows(problem) and _pairs(problem) > _MAX_BIAS:
        return f"takes the mask {problem.mask} as a dense one, of at most 2^24 pairs, not {_pairs(problem)}"
    if str(problem.score) != "plain":
        return f"takes no score but the plain one, not {problem.score}"
    if not problem.scale > 0:
        return f"takes a positive scale (it takes maxima before it scales), not {problem.scale:g}"
    if problem.head_dim != problem.head_dim_v:
        return "needs the same head dim for k and v"
    if 0 in (lengths.batch, lengths.seqlen_q, lengths.seqlen_kv, problem.heads_q):
        return "needs at least one query and one key"
    return None


def _knows(problem: AttentionProblem) -> bool:
    """Whether the kernel has the problem's mask built in. Its causal mask is aligned top-left, so lengths must be equal."""
    lengths = problem.lengths
    return problem.mask == Full() or (problem.mask.is_causal and lengths.seqlen_q == lengths.seqlen_kv)


def _pairs(problem: AttentionProblem) -> int:
    lengths = problem.lengths
    return lengths.seqlen_q * lengths.seqlen_kv * (1 if problem.mask.documents is None else lengths.batch)


def config(problem: AttentionProblem, arch: Arch) -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


def _transposed(operands: Operands) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in operands[:3]]


def _seen(problem: AttentionProblem, operands: Operands) -> torch.Tensor | None:
    """The mask as bool [batch or 1, 1, n_q or 1, n_kv], True where visible; None where the kernel has the mask built in."""
    if _knows(problem):
        return None
    (mask, _), lengths = with_tensors(problem, operands), problem.lengths
    rows = torch.arange(1 if _rows_are_alike(mask) else lengths.seqlen_q)[:, None]
    seen = mask.tile(rows, torch.arange(lengths.seqlen_kv)[None, :], lengths.seqlen_q, lengths.seqlen_kv)
    return seen[:, None] if seen.dim() == 3 else seen[None, None]


def _rows_are_alike(mask: Mask) -> bool:
    """Whether all rows of a sequence see the same keys, as in a padded batch of an encoder."""
    if mask.documents is None or mask.band != Full().band:
        return False
    return bool((mask.documents.q == mask.documents.q[:, :1]).all())


def _mask_arguments(problem: AttentionProblem, seen: torch.Tensor | None) -> tuple[bool, torch.Tensor | None]:
    """The kernel's arguments is_causal and attn_mask for a mask that `_seen` returned."""
    if seen is None:
        return problem.mask.is_causal, None
    return False, torch.zeros(seen.shape, dtype=problem.dtype).masked_fill_(~seen, -torch.inf)


def _finite(x: torch.Tensor) -> bool:
    """Whether x holds neither NaN nor infinity, by its sum. A sum that overflows is taken for such a number, which only costs
    time."""
    return bool(torch.isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32))))


def is_lost(out: torch.Tensor, lse: torch.Tensor, blind: torch.Tensor | None) -> bool:
    """Whether some result of the kernel may be wrong. blind: the rows that see nothing; None: there are none."""
    lost = (lse == 0.0) | ~(lse < torch.inf)  # an LSE of exactly 0 is rare in a row that sees something
    return not _finite(out) or bool((lost if blind is None else lost & ~blind).any())


def forward(problem: AttentionProblem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    seen = _seen(problem, operands)
    causal, bias = _mask_arguments(problem, seen)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_transposed(operands), 0.0, causal, attn_mask=bias, scale=problem.scale
    )
    blind = None if seen is None else ~seen.any(-1)
    if is_lost(out, lse, blind):
        return tiled.forward(problem, operands)
    if blind is not None:
        lse = torch.where(blind, -torch.inf, lse)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def backward(problem: AttentionProblem, operands: Operands, upstream: Upstream) -> Gradients:
    out, lse, dout, dlse = upstream
    finite = all(_finite(x) for x in (*operands[:3], out, dout))
    if not finite or (dlse is not None and bool(dlse.any())):
        return tiled.backward(problem, operands, upstream)
    causal, bias = _mask_arguments(problem, _seen(problem, operands))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout.transpose(1, 2),
        *_transposed(operands),
        out.transpose(1, 2),
        torch.where(lse == -torch.inf, 0.0, lse),
        0.0,
        causal,
        attn_mask=bias,
        scale=problem.scale,
    )
    return Gradients(*(g.transpose(1, 2).contiguous() for g in grads))
