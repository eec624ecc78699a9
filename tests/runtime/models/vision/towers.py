"""Tiny random checkpoints of every family of vision towers, and what transformers makes of images by them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

TEXT = {
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
}
# Name → transformers' classes of configuration and model, then settings of the tower and of the whole.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # Windows of 3 blocks; the last layer sees its window alone; a feed-forward and patches that are padded.
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"depth": 4, "hidden_size": 72, "intermediate_size": 53, "num_heads": 2, "out_hidden_size": 40}
        | {"patch_size": 5, "window_size": 31, "fullatt_block_indexes": [1]},
        {},
    ),
    "qwen2_5_vl-turned": (
        "Qwen2_5_VL",
        {"depth": 3, "hidden_size": 80, "intermediate_size": 64, "num_heads": 1, "out_hidden_size": 40}
        | {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [0, 2], "spatial_merge_size": 1}
        | {"rope_parameters": {"rope_type": "axial", "rope_theta": 730.0}},
        {},
    ),
    # Embeddings for the text model behind the first layer and behind the last.
    "qwen3_vl": (
        "Qwen3VL",
        {"depth": 5, "hidden_size": 72, "intermediate_size": 61, "num_heads": 3, "out_hidden_size": 40}
        | {"patch_size": 6, "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2, 4]},
        {},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {"depth": 3, "hidden_size": 144, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 40}
        | {"patch_size": 4, "num_position_embeddings": 25, "deepstack_visual_indexes": [1], "hidden_act": "gelu"},
        {},
    ),
    "gemma3": (
        "Gemma3",
        {"model_type": "siglip_vision_model", "num_hidden_layers": 3, "hidden_size": 72, "intermediate_size": 59}
        | {"num_attention_heads": 1, "image_size": 60, "patch_size": 5, "vision_use_head": False},
        {"mm_tokens_per_image": 16},
    ),
    "gemma3-head": (
        "Gemma3",
        {"model_type": "siglip_vision_model", "num_hidden_layers": 4, "hidden_size": 48, "intermediate_size": 32}
        | {"num_attention_heads": 2, "image_size": 42, "patch_size": 7, "vision_use_head": True}
        | {"layer_norm_eps": 1e-4},
        {"mm_tokens_per_image": 9},
    ),
}
SCALE = {"rescale": 1 / 255, "mean": (0.48, 0.41, 0.52), "std": (0.27, 0.31, 0.23)}
"""How pixels are normed in these tests: no published model's."""
Image = NDArray[np.uint8]


def save_random(name: str, folder: Path, rename: Callable[[str], str] | None = None) -> Path:
    """`folder` with the named checkpoint, every parameter random, tensors renamed."""
    import transformers

    os.environ["HF_HUB_OFFLINE"] = "1"
    family, vision, whole = CHECKPOINTS[name]
    text = {**TEXT, "moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1} if "moe" in name else TEXT
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision, **whole)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            gain = noise.dim() == 1 and key.endswith("weight") and "soft_emb" not in key
            parameter.copy_(1.0 + 0.2 * noise if gain else 0.15 * noise)
    model.save_pretrained(folder)
    if rename is not None:
        tensors = load_file(folder / "model.safetensors")
        save_file({rename(key): value for key, value in tensors.items()}, folder / "model.safetensors")
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change config.json."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def draw_images(sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[Image]:
    """Images of noise that differs by place and channel."""
    source = np.random.default_rng(seed)
    return [source.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def oracle(folder: Path, name: str, images: Sequence[Image], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """transformers' embeddings of images, then those for its text model's first layers, end to end each."""
    import transformers
    from PIL import Image as Pictures

    family = CHECKPOINTS[name][0]
    found = getattr(transformers, f"{family}ForConditionalGeneration")
    model = found.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()
    vision = model.config.vision_config
    normed: dict[str, Any] = {
        "do_resize": False, "image_mean": list(SCALE["mean"]), "image_std": list(SCALE["std"])
    }  # fmt: skip
    if family == "Gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil as Processor
    else:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor

        normed |= {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
    pictures = [Pictures.fromarray(image) for image in images]
    inputs = Processor(**normed)(pictures, return_tensors="pt")
    with torch.inference_mode():
        if family == "Gemma3":
            return [model.model.get_image_features(inputs["pixel_values"]).pooler_output.flatten(0, 1)]
        output = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        inner = getattr(output, "deepstack_features", None) or []
        return [torch.cat(each) for each in (output.pooler_output, *inner)]
