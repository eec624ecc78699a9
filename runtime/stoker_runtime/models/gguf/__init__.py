"""GGUF metadata in config.json's words: which architectures (`table.py`), under which keys, and how they rotate.

Knows nothing of weights beyond their names and shapes. A new architecture: a row of `table.py`, and what its files say
in ways of their own in `config.py`; of an encoder, both in `encoders.py`.
"""

from stoker_runtime.models.gguf.config import config_from_gguf
from stoker_runtime.models.gguf.encoders import GGUF_ENCODERS, GGUFEncoder
from stoker_runtime.models.gguf.table import GGUF_ROWS, GGUFRow

__all__ = ["GGUF_ENCODERS", "GGUF_ROWS", "GGUFEncoder", "GGUFRow", "config_from_gguf"]
