"""The arithmetic and the constants of `strobe.scores` for kernels: the constants for Triton and Gluon, the functions compiled
by Triton (`gluon_scores.py`: by Gluon)."""

import triton.language as tl

from strobe import scores
from strobe.kernels.common.triton_math import compiled

LOG2E = tl.constexpr(scores.LOG2E)
LN2 = tl.constexpr(scores.LN2)

score_of = compiled(scores.score_of)
score_and_factor = compiled(scores.score_and_factor)
with_bias = compiled(scores.with_bias)
with_function = compiled(scores.with_function)
gradient_through_function = compiled(scores.gradient_through_function)
