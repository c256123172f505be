"""Hugging Face's `kernels`: Strobe as a kernel repository, which stands for the ones that transformers and others load.

    strobe.integrations.kernels.write("strobe-kernel")
    LOCAL_KERNELS=kernels-community/flash-attn2=strobe-kernel python train.py

A program that loads kernels-community/flash-attn2 then has Strobe's functions. The repository holds no kernel: it imports
Strobe.
"""

from __future__ import annotations

import json
from pathlib import Path

from strobe.integrations.flash_attn import FUNCTIONS

_DEVICES = ("cpu", "cuda")

_METADATA = {"name": "strobe", "version": 1, "license": "Apache-2.0", "python-depends": []}


def write(folder: str | Path) -> Path:
    """Write a kernel repository with flash-attn's functions, for GPUs and CPUs, and return its folder, which is made if it is
    not there."""
    folder = Path(folder)
    names = ", ".join(FUNCTIONS)
    for device in _DEVICES:
        build = folder / "build" / f"torch-{device}"
        build.mkdir(parents=True, exist_ok=True)
        (build / "metadata.json").write_text(
            json.dumps(_METADATA | {"id": f"strobe_{device}", "backend": {"type": device}}, indent=1) + "\n"
        )
        (build / "__init__.py").write_text(
            '"""Strobe\'s functions under flash-attn\'s names."""\n\nfrom strobe.integrations.flash_attn import FUNCTIONS\n\n'
            f"globals().update(FUNCTIONS)  # {names}\n"
        )
    return folder
