"""Tables of bounded size, which forget entries when they are full."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class ClockCache(Generic[Value]):
    """A table of at most `size` entries that drops the least used ones by the "clock" algorithm.

    A full table drops its oldest entry, unless somebody got it: then it is spared once, as if it were new. That is nearly
    "least recently used", and getting an entry costs one look-up. Threads may share a table: at worst one makes an entry
    again."""

    def __init__(self, size: int):
        self._size = size
        self._entries: dict[Hashable, list] = {}
        """Key -> [entry, whether somebody got it since it was put in or last spared]."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Value | None:
        found = self._entries.get(key)
        if found is None:
            return None
        found[1] = True
        return found[0]

    def put(self, key: Hashable, entry: Value) -> None:
        self._entries[key] = [entry, False]
        while len(self._entries) > self._size:
            oldest = next(iter(self._entries))
            found = self._entries.pop(oldest, None)
            if found is not None and found[1]:  # dicts keep the order of insertion, so it comes last now
                self._entries[oldest] = [found[0], False]

    def clear(self) -> None:
        self._entries.clear()


class Memo(dict[Key, Value]):
    """A dict whose missing values are made: memo[key] is make(key), made once. A full table forgets everything. Getting a value
    that is there costs no Python call.

    Threads may share it: at worst an entry is made twice."""

    def __init__(self, size: int, make: Callable[[Key], Value]):
        super().__init__()
        self._size, self._make = size, make

    def __missing__(self, key: Key) -> Value:
        if len(self) >= self._size:
            self.clear()
        value = self[key] = self._make(key)
        return value
