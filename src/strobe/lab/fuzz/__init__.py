"""Looks for wrong results: random problems through the public door, against the specification."""
