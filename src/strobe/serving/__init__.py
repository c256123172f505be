"""Attention over a cache of keys and values that grows as a model generates: decode, append, merge."""
