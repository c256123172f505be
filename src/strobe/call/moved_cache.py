"""Triton's folder of compiled kernels, wherever it stands.

Triton writes down the whole paths of the files that belong to a kernel, so in a folder that was moved, or copied into a
container, it finds nothing and compiles again. With

    TRITON_CACHE_MANAGER=strobe.call.moved_cache:MovedCache

it looks for these files beside the list of them. `strobe precompile` fills such a folder.
"""

from __future__ import annotations

import json

from triton.runtime.cache import FileCacheManager


class MovedCache(FileCacheManager):
    """Triton's own cache, of which the files of a kernel are looked for where the kernel's folder is now."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The files of a kernel by their names; None if one of them, or the list, is not there."""
        listed = self.get_file(f"__grp__{filename}")
        if listed is None:
            return None
        try:
            with open(listed) as file:
                names = json.load(file)["child_paths"]
        except (OSError, ValueError, KeyError):  # cut off while it was written
            return None
        found = {name: path for name in names if (path := self.get_file(name)) is not None}
        return found if len(found) == len(names) else None
