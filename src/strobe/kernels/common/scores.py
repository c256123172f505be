"""The arithmetic of `strobe.scores`, compiled for the device: one source for Triton and Gluon."""

from strobe import scores
from strobe.kernels.common.triton_math import compiled

score_of = compiled(scores.score_of)
score_and_factor = compiled(scores.score_and_factor)
with_bias = compiled(scores.with_bias)
with_function = compiled(scores.with_function)
gradient_through_function = compiled(scores.gradient_through_function)
