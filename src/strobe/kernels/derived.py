"""What a config derives from its fields."""

from __future__ import annotations


class Derived:
    """A config that is a compile-time argument of a kernel, which reads its fields and its properties."""

    @property
    def cache_key(self) -> str:
        """By which Triton finds a compiled kernel on disk, beside its source: all that a kernel may read. By the fields alone,
        an update that changes a rule behind a property would go on running what was compiled by the old one."""
        names = {name for kind in type(self).__mro__ for name, value in vars(kind).items() if isinstance(value, property)}
        derived = {name: getattr(self, name) for name in sorted(names - {"cache_key"})}
        return f"{self!r} {derived}"
