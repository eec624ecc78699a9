"""Configurations of vision towers as they were published."""

from __future__ import annotations

from typing import Any

QWEN2_5, QWEN3, GEMMA3 = (f"{each}ForConditionalGeneration" for each in ("Qwen2_5_VL", "Qwen3VL", "Gemma3"))
# As published: 7B of Qwen2.5-VL, whose text model's settings lie at the top; 8B of Qwen3-VL; 4B of Gemma 3.
PUBLISHED: dict[str, dict[str, Any]] = {
    QWEN2_5: {
        "hidden_size": 3584,
        "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
            "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    },
    QWEN3: {
        "text_config": {"hidden_size": 4096},
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304,
            "model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    },
    GEMMA3: {
        "mm_tokens_per_image": 256,
        "text_config": {"hidden_size": 2560},
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    },
}  # fmt: skip
