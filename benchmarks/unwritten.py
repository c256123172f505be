"""Compile the portable forward with rows of V narrower than those of K, and list what reads registers that nothing has written.

    python benchmarks/unwritten.py                                   # Triton as it is installed
    PYTHONPATH=.venv/triton-3.6 python benchmarks/unwritten.py       # ptxas of CUDA 12.8: finds some (docs/upstream.md)

Needs no GPU. Status 1 if there are any.
"""

import re
import subprocess
import sys

import torch
import triton
from triton import knobs

from strobe.device import KNOWN
from strobe.kernels.common.call import unfilled
from strobe.kernels.portable import backend
from strobe.lab.binary.offline import pretend_gpu, problem_of
from strobe.lab.binary.sass import disassemble, unwritten
from strobe.masks import Full


def main() -> int:
    problem, arch = problem_of((64, 16), Full(), torch.float16, 1024), KNOWN["H100"]
    [call] = backend.calls(problem, unfilled(problem, backend.buffers(problem, arch)), arch)
    narrow = call._replace(keywords={**call.keywords, "PADDED_V": 16})  # as it was before it was known
    with pretend_gpu(arch.capability):
        found = unwritten(disassemble(narrow.compile().asm["cubin"]))
    said = subprocess.run([knobs.nvidia.ptxas.path, "--version"], capture_output=True, text=True, check=True).stdout
    [ptxas] = re.findall(r"V[\d.]+", said)
    print(f"Triton {triton.__version__}, ptxas {ptxas}: {len(found)} such instructions")
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
