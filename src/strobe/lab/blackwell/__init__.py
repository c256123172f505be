"""Asks the simulator what limits the Blackwell kernel."""
