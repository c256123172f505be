"""Derived: the key by which Triton's cache knows a config. Another subject than `memory_map`: what a
cache must tell apart, not what lies where."""

from __future__ import annotations


class Derived:
    """A config that is a compile-time argument of a kernel, which reads its fields and its properties."""

    @property
    def cache_key(self) -> str:
        """Text by which Triton finds a compiled kernel on disk, beside the kernel's source: all that a kernel may read. By the
        fields alone, an update that changes the rule behind a property would go on running what the old rule compiled."""
        names = {name for kind in type(self).__mro__ for name, value in vars(kind).items() if isinstance(value, property)}
        derived = {name: getattr(self, name) for name in sorted(names - {"cache_key"})}
        return f"{self!r} {derived}"
