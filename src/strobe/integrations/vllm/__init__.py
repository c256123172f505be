"""vLLM: an attention backend as a plugin, `--attention-backend STROBE`.

vLLM finds `register` by an entry point of this package, in each of its processes. It adds a name, and nothing runs on Strobe
until a server is started with it.
"""

from __future__ import annotations

import logging

log = logging.getLogger("strobe")

NAME = "STROBE"
"""What the backend is called in vLLM."""


def register() -> None:
    """Add the backend to those that vLLM can be asked for; a second call changes nothing. With a vLLM that takes no backends of
    such names it logs a warning."""
    from vllm.v1.attention.backends import registry

    known = registry.AttentionBackendEnum
    if not hasattr(known, "register"):
        log.warning("this vLLM takes no attention backends by name (0.32 does): --attention-backend %s is not there", NAME)
    elif NAME not in known.__members__:
        registry.register_backend(NAME, "strobe.integrations.vllm.backend.StrobeBackend")
