"""Writes an encoder's checkpoint as a GGUF file, as the published converter lays it out.

Names are those of the gguf package's own tables, keys those of its writer. Heads that nothing is scored by are left
out, and of a table of positions the rows before the first one's; what lies in one matrix stays there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
from safetensors.torch import load_file
from tests.runtime.weights.gguf_file import write_tensors
from torch import Tensor

Kind = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "Bert": "bert", "Roberta": "bert", "XLMRoberta": "bert", "NomicBert": "nomic-bert", "ModernBert": "modern-bert",
}  # fmt: skip
LEFT_OUT = re.compile(r"pooler\..*|cls\..*|lm_head\..*|decoder\..*|embeddings\.position_ids")
HEADS = re.compile(r"classifier\..*|head\..*")


def architecture_of(config: Mapping[str, Any]) -> str:
    """What a checkpoint's files say in `general.architecture`."""
    family = re.sub(r"(Model|ForMaskedLM|ForSequenceClassification)$", "", config["architectures"][0])
    return ARCHITECTURES[family]


def converted(folder: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The file's tensors."""
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture_of(config))
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    scores = config["architectures"][0].endswith("ForSequenceClassification")
    offset = config["pad_token_id"] + 1 if "Roberta" in config["architectures"][0] else 0
    found: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = re.sub(r"^(bert|roberta|model)\.", "", name)
        if LEFT_OUT.fullmatch(name) or (not scores and HEADS.fullmatch(name)):
            continue
        name = re.sub(r"^classifier\.(weight|bias)$", r"classifier.out_proj.\1", name)
        called = names.get_name(name, (".weight", ".bias"))
        assert called is not None, f"{name} has no name in {arch}"
        found[called] = tensor[offset:] if name.startswith("embeddings.position_embeddings") else tensor
    return found


def write_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any], pooling: gguf.PoolingType | None) -> None:
    """What all converters write, and what ModernBERT's adds."""
    offset = config["pad_token_id"] + 1 if "Roberta" in config["architectures"][0] else 0
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"] - offset)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    if "norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["norm_eps"])
    rope = config.get("rope_parameters") or {}
    if (whole := rope.get("full_attention", rope).get("rope_theta")) is not None:
        writer.add_rope_freq_base(whole)
    if (near := rope.get("sliding_attention", {}).get("rope_theta")) is not None:
        writer.add_rope_freq_base_swa(near)
    if config["architectures"][0].startswith("ModernBert"):
        writer.add_sliding_window(config["local_attention"])
        slides = [each == "sliding_attention" for each in config["layer_types"]]
        periods = (each for each in range(1, 9) if slides == [bool(layer % each) for layer in range(len(slides))])
        writer.add_sliding_window_pattern(next(periods, slides))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_vocab_size(config["vocab_size"])
    if config.get("hidden_act", "gelu") not in ("gelu", "silu"):
        writer.add_string(f"{writer.arch}.hidden_act", config["hidden_act"])


def write(
    folder: Path,
    path: Path,
    pooling: gguf.PoolingType | None = None,
    kind: Callable[[str], Kind] = lambda name: Kind.F32,
    *,
    rounded: Callable[[str], Kind] | None = None,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors,
    keys: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    tokenizer: Mapping[str, Any] | None = None,
    architecture: str = "",
) -> Path:
    """`folder`'s checkpoint as a GGUF file at `path`; `kind` says as what a matrix is.

    `rounded`: the numbers are first what blocks of that kind stand for. `change` is made before; `keys` are written
    besides, as is the `tokenizer`'s metadata; `architecture` is said in the place of the right one.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture or architecture_of(config))
    write_keys(writer, config, pooling)
    keys(writer)
    for key, value in (tokenizer or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    write_tensors(writer, change(converted(folder, config)), kind, rounded)
    return path
