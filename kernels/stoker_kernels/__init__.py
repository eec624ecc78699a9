"""Stoker's kernels: each op has a PyTorch reference, the oracle and the CPU backend, and GPU versions.

A folder is an op: its public function and types, the reference, each implementation, what is compiled ahead, its bench.
`launch/` is what all share, `bench/` measures several ops together. Outside of an op's folder only what its package
exports is imported. A new op: a folder with `op.py`, `reference.py` and an implementation, and its floor in
pyproject.toml's contract.
Must never know: requests, models, Kubernetes.
"""
