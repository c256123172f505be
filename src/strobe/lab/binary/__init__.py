"""Reads compiled kernels: their instructions, registers and spills."""
