"""GGUF metadata in config.json's words: which architectures, under which keys, and how they rotate."""

from stoker_runtime.models.gguf.config import config_from_gguf
from stoker_runtime.models.gguf.table import GGUF_ROWS, GGUFRow

__all__ = ["GGUF_ROWS", "GGUFRow", "config_from_gguf"]
