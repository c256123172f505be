"""The ladder: one attention forward, from a loop on one core to the product's kernel, a file for each step.

    strobe ladder run                # every rung checked against float64, then timed; without a GPU simulated and compiled
    strobe ladder show 7             # a rung's source, and what the compiler makes of it
    strobe ladder diff 7 8           # what changed, in the source and in the machine code
    strobe ladder explain 8          # the bottleneck before it, the prediction, the numbers that moved

Inputs are dense, without a mask: [heads, S, D]. docs/ladder.md is the climb.
"""

from strobe.ladder.rungs import RUNGS, Rung

__all__ = ["RUNGS", "Rung"]
