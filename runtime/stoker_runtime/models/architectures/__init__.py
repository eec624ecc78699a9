"""The table of decoders: Hugging Face architecture → how its spec is read and where its checkpoint's tensors go.

A new architecture: a row in the module of its family (`llama.py`, `post_norm.py`, `layer_norm.py`,
`moe.py`), which `table.py` gathers. What the spec cannot say yet is a field of `models/spec.py` first.
Must never know: bytes, devices, how a parameter is computed with.
"""

from stoker_runtime.models.architectures.build import build_spec
from stoker_runtime.models.architectures.reading import read_dtype
from stoker_runtime.models.architectures.row import Architecture, Names
from stoker_runtime.models.architectures.table import ARCHITECTURES, ROWS

__all__ = ["ARCHITECTURES", "ROWS", "Architecture", "Names", "build_spec", "read_dtype"]
