"""GGUF metadata in config.json's words: which architectures (`table.py`), under which keys, and how they rotate.

Knows nothing of weights beyond their names and shapes. A new architecture: a row of `table.py`, and what its files say
in ways of their own in `config.py`.
"""

from stoker_runtime.models.gguf.config import config_from_gguf
from stoker_runtime.models.gguf.table import GGUF_ROWS, GGUFRow

__all__ = ["GGUF_ROWS", "GGUFRow", "config_from_gguf"]
