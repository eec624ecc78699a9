"""Benchmarks that run several ops: one layer as the engine runs it, fused products beside their parts, the small ops.

An op's own benchmark lies with the op (`attention/bench/`, `gemm/bench.py`).
Must never know: engines and models beyond the shapes that they ask for.
"""
