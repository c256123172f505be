"""Runs Gluon kernels, their source unchanged, on a CPU."""
