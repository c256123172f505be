"""Writes the documentation's generated parts, and checks them against their sources."""
