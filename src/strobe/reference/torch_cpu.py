"""PyTorch's own CPU flash kernel (C++, vectorised), where it computes exactly what is asked.

It beats `tiled` by the margins in docs/cpu.md. It knows one mask, the top-left causal one; every other goes to it as a
dense bias of 0 and -inf. It has no score, and it lets a NaN in a masked-out key or value reach rows that do not see it,
so a result that is not finite is done again by `tiled`.
"""

from __future__ import annotations

import torch

from strobe.device import Arch
from strobe.masks import Full, Mask
from strobe.problem import AttentionProblem, Dense, Gradients, Operands
from strobe.reference import tiled

_MAX_BIAS = 1 << 24
"""Pairs of a row and a key that a dense mask may have (64 MiB in float32); beyond, `tiled` needs no such memory."""


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    lengths = problem.lengths
    if arch.name != "CPU":
        return "runs on a CPU only"
    if not isinstance(lengths, Dense):
        return "takes no packed sequences"
    if problem.dropout:
        return "takes no dropout"
    if problem.seqused:
        return "takes no seqused"
    if problem.mask.function is not None:
        return f"takes no mask function, such as {problem.mask.function}"
    if not _knows(problem) and _pairs(problem) > _MAX_BIAS:
        return f"takes the mask {problem.mask} as a dense one, of at most 2^24 pairs, not {_pairs(problem)}"
    if str(problem.score) != "plain":
        return f"takes no score but the plain one, not {problem.score}"
    if problem.head_dim != problem.head_dim_v:
        return "needs the same head dim for k and v"
    if 0 in (lengths.batch, lengths.seqlen_q, lengths.seqlen_kv, problem.heads_q):
        return "needs at least one query and one key"
    return None


def _knows(problem: AttentionProblem) -> bool:
    """Whether the kernel has the mask itself. Its causal one is aligned top-left, so lengths must be equal."""
    lengths = problem.lengths
    return problem.mask == Full() or (problem.mask.is_causal and lengths.seqlen_q == lengths.seqlen_kv)


def _pairs(problem: AttentionProblem) -> int:
    lengths = problem.lengths
    return lengths.seqlen_q * lengths.seqlen_kv * (1 if problem.mask.documents is None else lengths.batch)


def config(problem: AttentionProblem, arch: Arch) -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


def _transposed(operands: Operands) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in operands[:3]]


def _seen(problem: AttentionProblem) -> torch.Tensor | None:
    """The mask as bool [batch or 1, 1, n_q or 1, n_kv], True where visible; None where the kernel has it itself."""
    if _knows(problem):
        return None
    mask, lengths = problem.mask, problem.lengths
    rows = torch.arange(1 if _rows_are_alike(mask) else lengths.seqlen_q)[:, None]
    seen = mask.tile(rows, torch.arange(lengths.seqlen_kv)[None, :], lengths.seqlen_q, lengths.seqlen_kv)
    return seen[:, None] if seen.dim() == 3 else seen[None, None]


def _rows_are_alike(mask: Mask) -> bool:
    """Whether all rows of a sequence see the same keys, as in a padded batch of an encoder."""
    if mask.documents is None or mask.band != Full().band:
        return False
    return bool((mask.documents.q == mask.documents.q[:, :1]).all())


def _mask_arguments(problem: AttentionProblem, seen: torch.Tensor | None) -> tuple[bool, torch.Tensor | None]:
    """The kernel's is_causal and attn_mask."""
    if seen is None:
        return problem.mask.is_causal, None
    return False, torch.zeros(seen.shape, dtype=problem.dtype).masked_fill_(~seen, -torch.inf)


def _finite(x: torch.Tensor) -> bool:
    """False if x holds a NaN or an infinity; a sum that overflows says so too, which costs time and no more."""
    return bool(torch.isfinite(x.sum(dtype=torch.promote_types(x.dtype, torch.float32))))


def forward(problem: AttentionProblem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    seen = _seen(problem)
    causal, bias = _mask_arguments(problem, seen)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_transposed(operands), 0.0, causal, attn_mask=bias, scale=problem.scale
    )
    if not _finite(out):
        return tiled.forward(problem, operands)
    if seen is not None:
        lse = torch.where(seen.any(-1), lse, -torch.inf)  # the kernel says 0 of a row that sees nothing
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def backward(problem: AttentionProblem, operands: Operands, out, lse, dout, dlse) -> Gradients:
    finite = all(_finite(x) for x in (*operands[:3], out, dout))
    if not finite or (dlse is not None and bool(dlse.any())):
        return tiled.backward(problem, operands, out, lse, dout, dlse)
    causal, bias = _mask_arguments(problem, _seen(problem))
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
