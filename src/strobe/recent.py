"""A table that keeps the entries which were used last."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The entries that were used last, at most `size`. Threads may share it: at worst one makes an entry again."""

    def __init__(self, size: int):
        self._size = size
        self._entries: dict[Hashable, Value] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Value | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._entries[key] = entry  # dicts keep the order of insertion: what was used last is last
        return entry

    def put(self, key: Hashable, entry: Value) -> None:
        self._entries[key] = entry
        while len(self._entries) > self._size:
            self._entries.pop(next(iter(self._entries)), None)

    def clear(self) -> None:
        self._entries.clear()
