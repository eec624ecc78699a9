"""`linear` on a CPU: oneDNN's products of bf16 (`onednn.py`), and products whose sums have one order (`dot.py`).

Must never know: what the weight belongs to.
"""
