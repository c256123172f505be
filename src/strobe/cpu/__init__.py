"""The backends for a CPU, in plain PyTorch."""
