"""Reads a GPU's hardware counters."""
