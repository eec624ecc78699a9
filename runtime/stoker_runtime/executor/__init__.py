"""Runs batches on one device: sizes by arithmetic, allocations, CUDA graphs, KV pages that move to the host.

`executor.py` runs, `step.py` is what graphs capture, `resolve.py` sizes, `build.py` starts. What a new feature
allocates is counted in `resolve.py` or `state.py` before it is allocated.
Must never know: sequences, policies, processes.
"""
