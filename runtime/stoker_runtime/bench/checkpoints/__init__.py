"""Checkpoints of a known shape with random weights, for measuring with real files: `write_checkpoint(shape, folder)`.

`layouts.py` says how linears lie in each layout of safetensors, `write.py` writes those, `gguf_file.py` writes files of
blocks, `tokens.py` makes their tokenizers. Knows nothing of what is measured. A new layout: an entry of LAYOUTS or of
MIXES.
"""

from stoker_runtime.bench.checkpoints.tokens import byte_tokenizer
from stoker_runtime.bench.checkpoints.write import FORMATS, tensors, write_checkpoint

__all__ = ["FORMATS", "byte_tokenizer", "tensors", "write_checkpoint"]
