"""How keys of a cache may lie in shared memory, in numbers that need no Triton (see `groups`)."""

PANEL_COLUMNS, GROUP_KEYS = 64, 8
"""Columns of 16 bits that are swizzled together; keys that lie together with all of their columns."""


def lie_in_groups(page_rows: tuple[int | None, int | None]) -> bool:
    """Whether the pages of K and V lie a whole number of groups apart. page_rows: rows from one to the next."""
    return all(rows is not None and rows % GROUP_KEYS == 0 for rows in page_rows)
