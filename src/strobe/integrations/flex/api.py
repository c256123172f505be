"""FlexAttention's function with PyTorch's arguments, on Strobe's kernels.

Its score_mod and the mask_mod of its BlockMask are Python functions that PyTorch compiles into a kernel of their own. Strobe
reads what they compute (`tracing`, `formulas`) and looks for it among what its own kernels know:

    mask_mod    a band, keys up to one, a prefix, documents: a mask in normal form, whose hidden blocks are not visited;
                else the BlockMask's own blocks (`strobe.masks.Blocks`), with the pairs of those of which it shows some;
                or, where it hides no block, a mask function, which takes no memory
    score_mod   a softcap; a function of the score and the pair with its derivative; what tensors say, added: a bias

The BlockMask's lists have the last word: pairs in a block that they leave out are not seen, whatever mask_mod says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import torch

from strobe import api
from strobe.call.dispatch import Explanation
from strobe.integrations.flex.formulas import NoFormula
from strobe.integrations.flex.masks import Read, Shape, blocks_of, hides_more, is_block_mask, lists_of, once, read, traced_mask
from strobe.integrations.flex.scores import ReadScore, read_score
from strobe.integrations.flex.tracing import PAIR, Traced, trace
from strobe.integrations.sdpa import empty_result, rows_ahead_of_heads
from strobe.masks import Full, Mask
from strobe.scores import Score

log = logging.getLogger("strobe")

ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@overload
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: ScoreMod | None = None,
    block_mask: Any = None, scale: float | None = None, enable_gqa: bool = False, return_lse: Literal[False] = False,
    kernel_options: Mapping[str, Any] | None = None, *, return_aux: None = None,
) -> torch.Tensor: ...  # fmt: skip
@overload
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: ScoreMod | None = None,
    block_mask: Any = None, scale: float | None = None, enable_gqa: bool = False, *, return_lse: Literal[True],
    kernel_options: Mapping[str, Any] | None = None, return_aux: None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: ScoreMod | None = None,
    block_mask: Any = None, scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None, *, return_aux: Any = None,
) -> Any: ...  # fmt: skip
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """PyTorch's function of this name (torch.nn.attention.flex_attention), differentiable in query, key, value and in the
    tensors that score_mod adds.

    Args:
        query: [batch, heads_q, L, E], float16, bfloat16 or float32 (float64 on a CPU), E up to 256.
        key: [batch or 1, heads_kv, S, E].
        value: [batch or 1, heads_kv, S, Ev].
        score_mod: f(score, batch, head, q_idx, kv_idx) -> score, in PyTorch's operators of single numbers. What tensors from
            outside say it may add to the score (times a number); without such tensors it may be any function that
            `strobe.math` can write. Strobe finds its derivative.
        block_mask: a BlockMask for L and S (`create_block_mask`); None shows every key.
        scale: default 1 / sqrt(E).
        enable_gqa: whether heads_kv may be less than heads_q, which it divides.
        return_lse: also return log(sum(exp(scores))), float32, [batch, heads_q, L], which has a gradient.
        kernel_options: taken, and not looked at: they choose among ways to the same result.
        return_aux: PyTorch's AuxRequest, for (out, AuxOutput); of the two the LSE alone.

    Returns:
        out [batch, heads_q, L, Ev], or (out, lse). A row that sees no key gives 0, LSE -inf.

    Raises:
        ValueError, TypeError: naming the argument, before any launch; of what Strobe's kernels cannot say with a way out.
    """
    call = _read_call(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux)
    if call.empty:
        out = empty_result(query, key, value, (*query.shape[:-1], value.shape[-1]))
        lse = out.new_full(query.shape[:-1], -torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
    else:
        log.info("flex_attention: mask_mod %s; score_mod %s", call.mask_words, call.score_words)
        out, lse = api.attention(call.q, call.k, call.v, **call.keywords, return_lse=True)
        out = out[..., : value.shape[-1]].transpose(1, 2)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput  # who gave an AuxRequest has imported it

        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class FlexExplanation:
    """What became of a call of `flex_attention`, and which kernel runs it."""

    mask: str
    score: str
    kernel: Explanation

    def __str__(self) -> str:
        return f"mask_mod  {self.mask}\nscore_mod {self.score}\n{self.kernel}"


def explain(query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False) -> FlexExplanation:
    """Print, and return, what `flex_attention` makes of these arguments: what was read from mask_mod and score_mod, whether
    blocks that the mask hides are left out, which kernel runs, and why the others do not. Raises what `flex_attention` raises.
    """
    call = _read_call(query, key, value, score_mod, block_mask, scale, enable_gqa, False, None)
    if call.empty:
        raise ValueError("explain: there is no pair of a query and a key, so nothing runs")
    explanation = FlexExplanation(call.mask_words, call.score_words, api.explained(call.q, call.k, call.v, **call.keywords))
    print(explanation)
    return explanation


@dataclass(frozen=True)
class _Call:
    """A call in Strobe's terms; q, k and v [batch, rows, heads, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keywords: dict[str, Any]
    mask_words: str
    score_words: str
    empty: bool = False


def _read_call(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux) -> _Call:
    _check(query, key, value, score_mod, block_mask, enable_gqa, return_lse, return_aux)
    key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    shape = Shape(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if 0 in shape:
        return _Call(query, key, value, {}, "", "", empty=True)
    found = _score(score_mod, shape, query)
    mask, keys, words = _mask(block_mask, shape, query.device)
    score = _of_first_keys(found.score, keys)
    q, k, v = (rows_ahead_of_heads(x) for x in (query, key[..., :keys, :], value[..., :keys, :]))
    scale = (query.shape[-1] ** -0.5 if scale is None else scale) * found.factor
    return _Call(q, k, v, dict(mask=mask, score=score, scale=scale), words, found.words)


def read_functions(
    q: torch.Tensor, k: torch.Tensor, score_mod: ScoreMod | None, mask_mod: Callable | None
) -> tuple[Mask, int, Score, float]:
    """What FlexAttention's functions mean without a BlockMask: the mask, the number of keys that it is among, the score, and
    what the scale is multiplied by. q [batch, seqlen_q, heads_q, D], k [batch, seqlen_kv, heads_kv, D]. A mask_mod that has no
    normal form is asked about every pair.

    Raises:
        TypeError: a function that Strobe's kernels cannot say, or that is not in PyTorch's operators.
    """
    shape = Shape(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    found = _score(score_mod, shape, q)
    mask, keys = _mask_of_function(mask_mod, shape, q.device)
    return mask, keys, _of_first_keys(found.score, keys), found.factor


def _mask_of_function(mask_mod: Callable | None, shape: Shape, device) -> tuple[Mask, int]:
    if mask_mod is None:
        return Full(), shape.n_kv
    try:
        found = read(trace("mask_mod", mask_mod, PAIR, device), shape)
    except NoFormula:
        from torch.nn.attention.flex_attention import create_block_mask

        return _mask(create_block_mask(mask_mod, *shape, device=device), shape, device)[:2]
    return found.mask, found.keys


def _of_first_keys(score: Score, keys: int) -> Score:
    if score.bias is None or score.bias.shape[-1] == 1:
        return score
    return replace(score, bias=score.bias[..., :keys])


def _score(score_mod, shape: Shape, query: torch.Tensor) -> ReadScore:
    if score_mod is None:
        return ReadScore(Score())
    traced = trace("score_mod", score_mod, ("score", *PAIR), query.device)
    return read_score(traced, shape, query.dtype, query.device)


def _mask(block_mask, shape: Shape, device) -> tuple[Mask, int, str]:
    """The mask of a BlockMask; how many keys it is among; in words what became of it."""
    if block_mask is None:
        return Full(), shape.n_kv, "full"
    traced = traced_mask(block_mask, device)
    return once(block_mask, "mask", (shape, traced), lambda: _read_mask(block_mask, traced, shape))


def _read_mask(block_mask, traced: Traced, shape: Shape) -> tuple[Mask, int, str]:
    lists = lists_of(block_mask, traced, shape)
    try:
        if not lists.agree:
            raise NoFormula("says other things than the lists of its BlockMask")
        found = read(traced, shape)
        if found.mask.function is not None and hides_more(lists, found.mask, shape, found.keys):
            raise NoFormula("is a function that hides blocks")
    except NoFormula as reason:
        blocks = blocks_of(block_mask, traced, shape)
        hidden = f"{int((lists.kinds == 0).sum())} of {lists.kinds.numel()} are hidden and not visited"
        return Mask(blocks=blocks), shape.n_kv, f"{Mask(blocks=blocks)}, of which {hidden}: mask_mod {reason}"
    if found.mask.function is not None:
        return found.mask, found.keys, f"{_of_keys(found, shape)}; no block is hidden but by the rest of the mask"
    return found.mask, found.keys, f"{_of_keys(found, shape)}; blocks that it hides are not visited"


def _of_keys(found: Read, shape: Shape) -> str:
    return str(found.mask) + ("" if found.keys == shape.n_kv else f" of the first {found.keys} keys")


def _check(query, key, value, score_mod, block_mask, enable_gqa, return_lse, return_aux) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.is_nested or x.dim() != 4:
            got = "a nested tensor" if x.is_nested else f"shape {list(x.shape)}"
            raise ValueError(f"{name} must have shape [batch, heads, length, head_dim], got {got}")
    for name, x in (("key", key), ("value", value)):
        if x.shape[0] not in (1, query.shape[0]):
            raise ValueError(f"{name} must have query's batch {query.shape[0]} or 1, got {x.shape[0]}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key must have query's head dim {query.shape[-1]}, got {key.shape[-1]}")
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(f"value must have key's heads and length {list(key.shape[1:3])}, got {list(value.shape[1:3])}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"key must have query's {query.shape[1]} heads, or enable_gqa=True be given, got {key.shape[1]} heads")
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod must be a function or None, got {type(score_mod).__name__}")
    if return_lse and return_aux is not None:
        raise ValueError("return_lse must be left out where return_aux is given: ask for AuxRequest(lse=True)")
    if return_aux is not None and return_aux.max_scores:
        raise ValueError("return_aux must be AuxRequest(lse=...): Strobe's kernels do not return the largest score")
    if block_mask is not None:
        _check_block_mask(block_mask, query, key)


_ANY_LENGTH = 1 << 30
"""The block size of PyTorch's BlockMask of a single block, which fits any length."""


def _check_block_mask(block_mask, query, key) -> None:
    if not is_block_mask(block_mask):
        raise TypeError(
            f"block_mask must be a torch.nn.attention.flex_attention.BlockMask or None, got {type(block_mask).__name__}"
        )
    if block_mask.kv_num_blocks.device != query.device:
        raise ValueError(f"block_mask must be on query's device {query.device}, got {block_mask.kv_num_blocks.device}")
    lengths, given = (query.shape[2], key.shape[2]), tuple(block_mask.shape[-2:])
    if tuple(block_mask.BLOCK_SIZE) != (_ANY_LENGTH, _ANY_LENGTH) and given != lengths:
        raise ValueError(
            f"block_mask must be of {lengths[0]} queries and {lengths[1]} keys, got one of {given[0]} and {given[1]}"
        )
    for name, n, of in zip(("batch", "heads"), block_mask.kv_num_blocks.shape, query.shape, strict=False):
        if n not in (1, of):
            raise ValueError(f"block_mask must have query's {name} {of} or 1, got {n}")
