"""Which Triton a test needs."""

import pytest

from strobe.kernels import triton_version

needs_tcgen05 = pytest.mark.skipif(triton_version() < (3, 8), reason="the Blackwell kernel needs Triton 3.8 or newer")
