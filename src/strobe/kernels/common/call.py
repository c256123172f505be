"""A launch that is not made yet."""

from typing import Any, NamedTuple


class Call(NamedTuple):
    """`kernel[grid](*arguments, **keywords)`."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    keywords: dict

    def launch(self) -> None:
        """On the current device and its current stream."""
        self.kernel[self.grid](*self.arguments, **self.keywords)
