"""Keeps torch.autocast away from the products of the references, whose precision is their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

Reference = TypeVar("Reference", bound=Callable)


def without_autocast(function: Reference) -> Reference:
    """The function, run without torch.autocast, which would round its products."""

    @functools.wraps(function)
    def run(*arguments, **keywords):
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*arguments, **keywords)

    return run  # type: ignore[return-value]
