"""Computes what an attention costs, and what a GPU allows, by arithmetic alone."""
