"""How far a command is, on the terminal of whoever waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def each(things: Sequence[T], doing: str, console: Console | None = None) -> Iterator[T]:
    """The things one by one, and meanwhile a bar on the error stream that says what is done with them and how many are left.
    Where that stream is no terminal there is none."""
    console = console or Console(stderr=True)
    yield from track(things, doing, console=console, transient=True, disable=not console.is_terminal)
