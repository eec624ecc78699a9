"""The table: every architecture that the decoder runs.

Knows nothing of how a row is read: that is in the module of its family.
"""

from __future__ import annotations

from stoker_runtime.models.architectures.layer_norm import LAYER_NORM_ROWS
from stoker_runtime.models.architectures.llama import LLAMA_ROWS
from stoker_runtime.models.architectures.moe import MOE_ROWS
from stoker_runtime.models.architectures.post_norm import POST_NORM_ROWS
from stoker_runtime.models.architectures.row import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    **LLAMA_ROWS,
    **MOE_ROWS,
    **POST_NORM_ROWS,
    **LAYER_NORM_ROWS,
}
