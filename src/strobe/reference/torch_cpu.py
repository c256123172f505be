"""PyTorch's own CPU flash kernel (C++, vectorised), where it computes exactly what is asked.

It beats `tiled` by the margins in docs/cpu.md. It knows no mask but its top-left causal one, no score, and it lets a
NaN in a masked-out value reach rows that do not see it, so a result that is not finite is done again by `tiled`.
"""

from __future__ import annotations

import torch

from strobe.device import Arch
from strobe.problem import AttentionProblem, Dense, Operands
from strobe.reference import tiled

NAME = "torch_cpu"


def refuses(problem: AttentionProblem, arch: Arch) -> str | None:
    lengths = problem.lengths
    if arch.name != "CPU":
        return "runs on a CPU only"
    if not isinstance(lengths, Dense):
        return "takes no packed sequences"
    if problem.mask.documents is not None or str(problem.mask) not in ("full", "causal"):
        return f"takes no mask but full and causal, not {problem.mask}"
    if problem.mask.is_causal and lengths.seqlen_q != lengths.seqlen_kv:
        return "its causal mask is aligned top-left, so queries and keys must be equally many"
    if str(problem.score) != "plain":
        return f"takes no score but the plain one, not {problem.score}"
    if problem.head_dim != problem.head_dim_v:
        return "needs the same head dim for k and v"
    if 0 in (lengths.batch, lengths.seqlen_q, lengths.seqlen_kv, problem.heads_q):
        return "needs at least one query and one key"
    return None


def config(problem: AttentionProblem, arch: Arch) -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads"


def _transposed(operands: Operands) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in operands[:3]]


def forward(problem: AttentionProblem, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_transposed(operands), 0.0, problem.mask.is_causal, scale=problem.scale
    )
    if not bool(torch.isfinite(out).all()):
        return tiled.forward(problem, operands)
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def backward(problem: AttentionProblem, operands: Operands, out, lse, dout, dlse):
    finite = all(bool(torch.isfinite(x).all()) for x in (*operands[:3], out, dout))
    if not finite or (dlse is not None and bool(dlse.any())):
        return tiled.backward(problem, operands, out, lse, dout, dlse)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout.transpose(1, 2),
        *_transposed(operands),
        out.transpose(1, 2),
        lse,
        0.0,
        problem.mask.is_causal,
        scale=problem.scale,
    )
    return tuple(g.transpose(1, 2).contiguous() for g in grads)
