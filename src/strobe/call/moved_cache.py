"""Triton's folder of compiled kernels, wherever it stands.

Triton writes down the whole paths of the files that belong to a kernel, so in a folder that was moved, or copied into a
container, it finds nothing and compiles again. With

    TRITON_CACHE_MANAGER=strobe.call.moved_cache:MovedCache

it looks for these files beside the list of them. `strobe precompile` fills such a folder. It may be read-only: what is compiled
beside is kept elsewhere, until the process ends.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile

from triton.runtime.cache import FileCacheManager


class MovedCache(FileCacheManager):
    """Triton's own cache, of which the files of a kernel are looked for where the kernel's folder is now."""

    def __init__(self, key: str, override: bool = False, dump: bool = False):
        try:
            super().__init__(key, override=override, dump=dump)
        except OSError:  # the folder is read-only, and the key is none of its own
            self.cache_dir = os.path.join(_spare_folder().name, key)
            self.lock_path = os.path.join(self.cache_dir, "lock")
            os.makedirs(self.cache_dir, exist_ok=True)

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


@functools.cache
def _spare_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="strobe-kernels-")
