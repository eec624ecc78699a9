"""What the loader asks of whoever knows which part of a model is this rank's.

Invariants: a rank's entries have the names and shapes of its own spec.
Knows nothing of how a model is cut (`parallel/cut.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.routing import Vocabulary


class RankCut(Protocol):
    """One rank's part of the model `whole`."""

    whole: ModelSpec

    def entries(self, entries: Mapping[str, TensorEntry], vocabulary: Vocabulary) -> dict[str, TensorEntry]:
        """The rank's part of a whole checkpoint."""
        ...

    def local_name(self, parameter: str) -> str | None:
        """The rank's own name of a parameter of the whole model; None where it is another stage's."""
        ...

    def values(self, parameter: str, whole: Tensor) -> Tensor:
        """The rank's part of all values of its own `parameter`."""
        ...

    def cache_scales(self, whole: Tensor) -> Tensor:
        """The rank's layers and heads of a cache's scales `[layers, 2, Hkv]`."""
        ...
