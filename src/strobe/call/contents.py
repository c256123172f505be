"""What the lengths and tables of a call must hold, which the host does not see: rules, and their checks.

Each rule is a tensor's name, the tensor, whether it keeps the rule (a tensor, too, so that nothing waits for the GPU), and the
rule in words.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from strobe.call.torch_internals import assert_async
from strobe.serving.problem import AppendOperands, AppendOptions, DecodeOperands, DecodeProblem

Rule = tuple[str, torch.Tensor, torch.Tensor, str]


def check_contents(problem: DecodeProblem, operands: DecodeOperands) -> None:
    """Check the numbers in lengths and tables: always on the CPU, where a wrong one raises; on a GPU only with STROBE_DEBUG=1,
    by asserts that run on the GPU."""
    if are_checked(operands.q):
        for each in _rules(problem, operands):
            check_rule(*each)


def check_append_contents(operands: AppendOperands, options: AppendOptions) -> None:
    """Check the numbers in what an append is given, where `check_contents` checks them, before anything is written."""
    if are_checked(operands.k):
        for each in _rules_of_append(operands, options):
            check_rule(*each)


def are_checked(x: torch.Tensor) -> bool:
    """Whether numbers are checked on x's device."""
    return x.device.type == "cpu" or is_debugging()


def is_debugging() -> bool:
    """Whether numbers are checked on a GPU, too."""
    return os.environ.get("STROBE_DEBUG", "0") == "1"


def check_rule(name: str, numbers: torch.Tensor, good: torch.Tensor, rule: str) -> None:
    """ValueError, or an assert that runs on the GPU, if numbers do not keep a rule. good: whether they do."""
    if numbers.device.type != "cpu":
        assert_async(good, f"{name} must {rule}")
    elif not bool(good):
        raise ValueError(f"{name} must {rule}, got {numbers.tolist()}")


def _rules(problem: DecodeProblem, operands: DecodeOperands) -> Iterator[Rule]:
    """The rules of attention over a cache."""
    lengths, cu = operands.lengths, operands.cu_seqlens_q
    yield _rule_of_lengths(lengths, problem.capacity)
    if operands.leftpad is not None:
        leftpad = operands.leftpad
        yield "leftpad (cache_leftpad)", leftpad, ((leftpad >= 0) & (leftpad <= lengths)).all(), "be from 0 to the length"
    if operands.entries is not None:
        yield _rule_of_entries(operands.entries, problem.pages)
    if operands.page_table is not None and problem.page_size is not None:
        yield _rule_of_pages(operands.page_table, problem.pages, problem.page_size, 0 * lengths, lengths, "keys of its request")
    if cu is not None:
        yield from rules_of_bounds("cu_seqlens_q", cu, len(operands.q))
        most = problem.lengths.seqlen_q
        yield "cu_seqlens_q", cu, (cu.diff() <= most).all(), f"have no request of more than max_seqlen_q = {most} queries"


def _rules_of_append(operands: AppendOperands, options: AppendOptions) -> Iterator[Rule]:
    """The rules of an append."""
    lengths, table = operands.lengths, operands.page_table
    pages, size = operands.k_cache.shape[:2]
    capacity = size * (1 if table is None else table.shape[1])
    for name, cu, x in (
        ("cu_seqlens (cu_seqlens_k_new)", operands.cu_seqlens, operands.k), ("cu_seqlens_q", operands.cu_seqlens_q, operands.q)
    ):  # fmt: skip
        if cu is not None and x is not None:
            yield from rules_of_bounds(name, cu, len(x))
    yield _rule_of_lengths(lengths, capacity)
    counts = _counts(operands.k, operands.cu_seqlens, lengths)
    ends = lengths + counts
    room = f"leave room for the keys that are appended, of {capacity} for a request"
    yield "lengths (cache_seqlens)", lengths, (ends <= capacity).all(), room
    if operands.entries is not None:
        yield _rule_of_entries(operands.entries, pages)
    if table is not None:
        yield _rule_of_pages(table, pages, size, lengths, ends, "keys that are appended")
    if operands.cos is not None:
        begins, name = lengths, "lengths (cache_seqlens)"
        if operands.positions is not None:
            begins, name = operands.positions, "positions (rotary_seqlens)"
        if operands.q is not None:
            turned = _counts(operands.q, operands.cu_seqlens_q, lengths)
            counts = torch.maximum(counts, turned.clamp(max=1) if options.one_position else turned)
        rows = operands.cos.shape[0]
        good = (counts == 0) | ((begins >= 0) & (begins + counts <= rows))
        yield name, begins, good.all(), f"let all that is turned lie within the {rows} rows of the rotary embedding"


def _counts(x: torch.Tensor, cu: torch.Tensor | None, lengths: torch.Tensor) -> torch.Tensor:
    """How many rows of x each request has."""
    return torch.full_like(lengths, x.shape[1]) if cu is None else cu.diff()


def _rule_of_lengths(lengths: torch.Tensor, capacity: int) -> Rule:
    good = (lengths >= 0) & (lengths <= capacity)
    return "lengths (cache_seqlens)", lengths, good.all(), f"be from 0 to the {capacity} keys that a request has room for"


def _rule_of_entries(entries: torch.Tensor, number: int) -> Rule:
    good = (entries >= 0) & (entries < number)
    return "index (cache_batch_idx)", entries, good.all(), f"name one of {number} entries"


def _rule_of_pages(
    table: torch.Tensor, pages: int, size: int, begins: torch.Tensor, ends: torch.Tensor, whose: str
) -> Rule:  # fmt: skip
    """The rule of the pages that hold keys begins ... ends - 1 of each request."""
    first = torch.arange(table.shape[1], device=table.device) * size
    used = (first + size > begins[:, None]) & (first < ends[:, None]) & (begins < ends)[:, None]
    there = (table >= 0) & (table < pages)
    return "page_table (block_table)", table, (there | ~used).all(), f"name one of {pages} pages for all {whose}"


def rules_of_bounds(name: str, cu: torch.Tensor, rows: int) -> Iterator[Rule]:
    """The rules of the bounds of so many packed rows."""
    yield name, cu, (cu[:1] == 0).all() & (cu.diff() >= 0).all(), "start at 0 and never decrease"
    yield name, cu, (cu <= rows).all(), f"not exceed the {rows} rows given"
