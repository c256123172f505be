"""Measures, compiles and explains the rungs of `strobe.ladder`."""
