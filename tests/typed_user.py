"""A user's program, as type checkers see it (`test_types.py`). A line with `# wrong` is one that they must find."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import assert_type

import strobe
from strobe import Mask, Score
from strobe.integrations import flex
from strobe.integrations.transformers import register


def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor, ask: bool) -> None:
    mask = strobe.Causal() & strobe.Window(left=128) & strobe.Document(ids)
    assert_type(mask, Mask)
    assert_type(strobe.attention(q, k, v, mask=mask), torch.Tensor)
    assert_type(strobe.attention(q, k, v, return_lse=True), tuple[torch.Tensor, torch.Tensor])
    assert_type(strobe.attention(q, k, v, return_lse=ask), torch.Tensor | tuple[torch.Tensor, torch.Tensor])
    assert_type(strobe.attention_fp8(q, k, v, return_lse=True), tuple[torch.Tensor, torch.Tensor])
    strobe.attention(q, k, v, score=Score(softcap=30.0, alibi=ids), deterministic=True, backend="tiled")
    runs, reasons = strobe.supports(q, k, v, mask=strobe.Full())
    assert_type(runs, bool)
    assert_type(reasons, list[str])
    assert_type(strobe.explain(q, k, v).chosen, str | None)


def serves(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> None:
    cache, turned = strobe.append(strobe.Cache(k, v, lengths), k, v, q=q)
    assert_type(cache, strobe.Cache)
    assert_type(turned, torch.Tensor | None)
    assert_type(strobe.decode(q, cache), torch.Tensor)
    out, lse = strobe.decode(q, cache, return_lse=True)
    assert_type(strobe.merge([out], [lse]), tuple[torch.Tensor, torch.Tensor])


def comes_from_elsewhere(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    assert_type(strobe.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), torch.Tensor)
    assert_type(strobe.flex_attention(q, k, v), torch.Tensor)
    assert_type(strobe.flex_attention(q, k, v, return_lse=True), tuple[torch.Tensor, torch.Tensor])
    assert_type(flex.explain(q, k, v).kernel.chosen, str | None)
    assert_type(strobe.flash_attn_func(q, k, v, causal=True), Any)  # out, or a tuple with it: as flash-attn, it has no types
    with strobe.install_as_flash_attn():
        register()


def is_mistaken(q: torch.Tensor) -> None:
    strobe.attention(q, q)  # wrong
    strobe.attention(q, q, q, mask="causal")  # wrong
    strobe.attention(q, q, q, causal=True)  # wrong
    strobe.attention(q, q, q, return_lse=True).sum()  # wrong
    strobe.Window(left="all")  # wrong
    strobe.flex_attention(q, q, q, return_lse=True).sum()  # wrong
