"""Stoker's kernels: each op has a PyTorch reference, the oracle and the CPU backend, and GPU versions."""
