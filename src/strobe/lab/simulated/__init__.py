"""Runs kernels, and mutants of them, in the simulator."""
