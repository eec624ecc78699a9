"""Writes a GGUF file of a known shape, its matrices in random blocks of one format or of llama.cpp's mixes.

Invariants: the metadata is what the table of GGUF architectures reads back; a tensor has the type that llama.cpp's
quantizer gives it in that mix (`use_more_bits` of llama-quant.cpp: of `attn_v` and `ffn_down` the first and the last
eighth of layers and each third between are of the better type, and so is the head). Biases are zero, norms one.
Rotary factors of long contexts are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from stoker_kernels.quant import BLOCK_FORMATS, block_row_bytes
from stoker_runtime.bench.checkpoints.tokens import byte_letters
from stoker_runtime.models.gguf.config import OPTIONAL
from stoker_runtime.models.gguf.table import GGUF_ROWS, REQUIRED
from stoker_runtime.models.parameter import Role
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.routing import Vocabulary, piece_rows, tensor_names

# Names of mixes: the type of most matrices, and of those that get the better one.
MIXES = {
    "q4_k_m": ("Q4_K", "Q6_K"),
    "q5_k_m": ("Q5_K", "Q6_K"),
    "iq4_xs": ("IQ4_XS", "IQ4_XS"),
    "q6_k": ("Q6_K", "Q6_K"),
    "q8_0": ("Q8_0", "Q8_0"),
}
BETTER = ("attn_v", "ffn_down")
MATRICES = (Role.LINEAR, Role.EMBEDDING, Role.HEAD)
# Where the fp16 numbers of a block stand, and what they are for weights of a few hundredths.
NUMBERS = {
    "Q8_0": ((0, 2.7e-4),),
    "IQ4_XS": ((0, 2e-5),),
    "Q4_K": ((0, 1e-4), (2, 7e-4)),
    "Q5_K": ((0, 5e-5), (2, 7e-4)),
    "Q6_K": ((208, 1.5e-5),),
}
RANDOM_BLOCKS = 1 << 17
ARCHITECTURES = ("llama", "qwen2", "qwen3")


def write_gguf(spec: ModelSpec, config: dict[str, Any], folder: Path, mix: str) -> int:
    """Write `folder`/model.gguf of the shape in one of MIXES; returns its bytes.

    `config` is the shape's config.json. Raises ValueError for an architecture or a row length that it cannot hold.
    """
    named = {GGUF_ROWS[each].architecture: each for each in ARCHITECTURES}
    if spec.architecture not in named:
        raise ValueError(f"GGUF files are written of {', '.join(named)}, not of {spec.architecture}")
    if spec.vocab <= 256:
        raise ValueError(f"its vocabulary of {spec.vocab} does not hold the bytes and two spaces")
    wanted = list(_tensors(spec, *MIXES[mix]))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, named[spec.architecture])
    _add_metadata(writer, spec, config, named[spec.architecture])
    for name, shape, kind in wanted:
        size = _num_bytes(shape, kind)
        if kind == "F32":
            writer.add_tensor_info(name, shape, np.dtype(np.float32), size)
        else:
            stored = (*shape[:-1], block_row_bytes(kind, shape[-1]))
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), size, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(0)
    random = {kind: _blocks(generator, kind) for kind in {kind for *_, kind in wanted} - {"F32"}}
    for name, shape, kind in wanted:
        if kind == "F32":
            writer.write_tensor_data(np.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=np.float32))
        else:
            writer.write_tensor_data(np.resize(random[kind], _num_bytes(shape, kind)))
    writer.close()
    return path.stat().st_size


def _tensors(spec: ModelSpec, most: str, better: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, type) of each tensor of the file. Raises ValueError for rows of no whole blocks."""
    for parameter in spec.parameters():
        names = tensor_names(spec, parameter.name, Vocabulary.GGUF)
        for name, rows in zip(names, piece_rows(spec, parameter, len(names)), strict=True):
            shape = (rows, *parameter.shape[1:])
            if len(shape) == 1 or parameter.role not in MATRICES:
                yield name, shape, "F32"
                continue
            kind = better if _has_more(spec, name) else most
            if shape[-1] % BLOCK_FORMATS[kind][0]:
                raise ValueError(f"{name} has rows of {shape[-1]}, not of blocks of {BLOCK_FORMATS[kind][0]} ({kind})")
            yield name, shape, kind


def _has_more(spec: ModelSpec, name: str) -> bool:
    """Whether a matrix gets the better type of a mix."""
    if name == ("token_embd.weight" if spec.tie_embeddings else "output.weight"):
        return True
    parts, eighth = name.split("."), spec.num_layers // 8
    if parts[0] != "blk" or parts[2] not in BETTER:
        return False
    layer = int(parts[1])
    return layer < eighth or layer >= 7 * spec.num_layers // 8 or (layer - eighth) % 3 == 2


def _add_metadata(writer: gguf.GGUFWriter, spec: ModelSpec, config: dict[str, Any], architecture: str) -> None:
    given = {"num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim, **config}
    for key, name in {**REQUIRED, **OPTIONAL, **GGUF_ROWS[architecture].own}.items():
        value = given.get(key)
        if isinstance(value, float):
            writer.add_float32(f"{architecture}.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    # Two spaces are a token, as readers want one merge at least.
    letters = byte_letters()
    space = letters[ord(" ")]
    writer.add_token_list([*letters, 2 * space, *(f"<{at}>" for at in range(257, spec.vocab))])
    writer.add_token_types([gguf.TokenType.NORMAL] * spec.vocab)
    writer.add_token_merges([f"{space} {space}"])


def _num_bytes(shape: tuple[int, ...], kind: str) -> int:
    row = 4 * shape[-1] if kind == "F32" else block_row_bytes(kind, shape[-1])
    return math.prod(shape[:-1]) * row


def _blocks(generator: np.random.Generator, kind: str) -> npt.NDArray[np.uint8]:
    """uint8 [RANDOM_BLOCKS, bytes of a block]."""
    found = generator.integers(0, 256, (RANDOM_BLOCKS, BLOCK_FORMATS[kind][1]), dtype=np.uint8)
    for at, number in NUMBERS[kind]:
        found[:, at : at + 2] = np.full((RANDOM_BLOCKS, 1), number, dtype=np.float16).view(np.uint8)
    return found
