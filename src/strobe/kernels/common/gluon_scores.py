"""The arithmetic of `strobe.scores`, compiled for the device by Gluon: the same source as Triton runs."""

from strobe import scores
from strobe.kernels.common.gluon_math import compiled

score_and_factor = compiled(scores.score_and_factor)
score_of = compiled(scores.score_of)
with_bias = compiled(scores.with_bias)
with_function = compiled(scores.with_function)
