"""Log-probabilities on a CPU, one row at a time, so that a row does not depend on what is beside it.

Invariants: those of `launch/each_row.py`; arithmetic and results as of `reference.py`.
Knows nothing of dispatch.
"""

from __future__ import annotations

from stoker_kernels.launch.each_row import each_row
from stoker_kernels.sampling import reference

token_logprobs = each_row(reference.token_logprobs, "logits", "tokens")
