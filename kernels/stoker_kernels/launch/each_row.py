"""`each_row`: a function of PyTorch's, called for one row at a time.

torch chooses by the shape of a whole call: which elements run as vectors and which as a rest, what is summed together,
and which thread does it. A call for one row has the same shape whatever is beside it, and so the same bits.
Invariants: a row's result depends on that row, on what all rows share, and on the number of threads.
Knows nothing of what the function computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


def each_row(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """`function` row by row of the tensors that `names` are its arguments for (those that are None are left out).

    What it gives, a tensor of as many rows or None, is put together; an `out` is written and returned.
    """
    signature = inspect.signature(function)

    def rows_of(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        count = len(given[names[0]])
        if count <= 1:
            return function(**given)
        out = given.pop("out", None)
        cut = [name for name in names if given.get(name) is not None]
        parts = [function(**given | {name: given[name][row : row + 1] for name in cut}) for row in range(count)]
        if parts[0] is None:
            return None
        whole = torch.cat(parts)
        return whole if out is None else out.copy_(whole)

    return rows_of
