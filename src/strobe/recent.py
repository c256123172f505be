"""Bounded tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(Generic[Value]):
    """At most `size` entries, of which it keeps those in use: the unused go first, the oldest one that nobody got since it was
    last spared (the "clock" approximation of least recently used, for which getting costs one look-up).

    Threads may share it: at worst one makes an entry again."""

    def __init__(self, size: int):
        self._size = size
        self._entries: dict[Hashable, list] = {}
        """Key -> [entry, whether it was got]."""

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
            if found is not None and found[1]:  # dicts keep the order of insertion: it comes last now
                self._entries[oldest] = [found[0], False]

    def clear(self) -> None:
        self._entries.clear()


class Made(dict[Key, Value]):
    """made[key] is make(key), made once; a full table forgets all. Of what is there, getting costs no Python call.

    Threads may share it: at worst an entry is made twice."""

    def __init__(self, size: int, make: Callable[[Key], Value]):
        super().__init__()
        self._size, self._make = size, make

    def __missing__(self, key: Key) -> Value:
        if len(self) >= self._size:
            self.clear()
        value = self[key] = self._make(key)
        return value
