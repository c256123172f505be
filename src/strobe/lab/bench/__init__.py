"""Measures speed: what is timed, against which other attentions, and how sure the ratios are."""
