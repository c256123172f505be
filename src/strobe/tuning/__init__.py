"""Measured choices of configs: tables per arch, written by `strobe tune` and read by a kernel's `choose`."""
