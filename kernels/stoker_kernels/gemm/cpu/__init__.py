"""`linear` on a CPU: oneDNN's products of bf16, and those whose sums have one order."""
