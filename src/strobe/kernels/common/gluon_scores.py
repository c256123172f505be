"""The arithmetic of `strobe.scores`, compiled for the device by Gluon: the same source as Triton runs."""

from strobe import scores
from strobe.kernels.common.gluon_math import compiled

score_and_factor = compiled(scores.score_and_factor)
with_bias = compiled(scores.with_bias)
with_function = compiled(scores.with_function)
gradient_of_function = compiled(scores.gradient_of_function)
