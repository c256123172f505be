"""A bar where somebody waits at a terminal, nothing elsewhere."""

import io

from rich.console import Console

from strobe.lab.progress import each


def test_a_bar_is_shown_on_a_terminal_alone():
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal)
        assert list(each([1, 2, 3], "compiling", console)) == [1, 2, 3]
        assert ("compiling" in console.file.getvalue()) == terminal
