"""Checkpoints as far as they are read before tensors are: their configuration, or a GGUF file's header.

Knows nothing of engines and services.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tests.runtime.weights.integer_forms import AWQ_CONFIG
from tests.runtime.weights.test_fp4_checkpoint import compressed_config, modelopt_config

from stoker_kernels.quant import BLOCK_FORMATS

Config = dict[str, Any]


def config(architecture: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    names = (
        "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
        "num_hidden_layers",
    )  # fmt: skip
    common = {"max_position_embeddings": 8192, "eos_token_id": 2, "dtype": "bfloat16", "rms_norm_eps": 1e-5}
    return {"architectures": [f"{architecture}ForCausalLM"], **common, **dict(zip(names, sizes, strict=True)), **more}


def drawn(rng: random.Random) -> dict[str, Any]:
    """A random shape that two ranks can share, in the blocks and groups of every format."""
    heads, tied = 2 * rng.randint(1, 12), rng.random() < 0.5
    shape = (256 * rng.randint(2, 16), heads, 2, 256 * rng.randint(2, 40), 2 * rng.randint(500, 90_000))
    return config("Llama", (*shape, rng.randint(2, 9)), head_dim=128, tie_word_embeddings=tied)


# Published, and in no other list of shapes: a fourth of the first is embedding and head.
SALAMANDRA_7B = config("Llama", (4096, 32, 8, 11008, 256_000, 32))
# With an odd vocabulary, and nobody's.
TIED = config("Llama", (3840, 30, 6, 10_240, 49_157, 22), tie_word_embeddings=True, head_dim=128)
# Nobody's: each rank has what makes latents whole, a fourteenth of a layer, and a part of the rest.
LATENTS = config(
    "DeepseekV2", (2048, 16, 16, 8192, 51_200, 12), kv_lora_rank=512, qk_nope_head_dim=64, qk_rope_head_dim=64,
    v_head_dim=64, q_lora_rank=1536, first_k_dense_replace=12, n_routed_experts=8, moe_intermediate_size=256,
    num_experts_per_tok=2,
)  # fmt: skip
MIXTRAL_8X22B = config("Mixtral", (6144, 48, 8, 16384, 32768, 56), num_local_experts=8, num_experts_per_tok=2)
GPT_OSS_120B = config(
    "GptOss", (2880, 64, 8, 2880, 201_088, 36), head_dim=64, num_local_experts=128, num_experts_per_tok=4,
    sliding_window=128, rope_theta=150000.0, quantization_config={"quant_method": "mxfp4"},
)  # fmt: skip
FP8_BLOCKS = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": False, "sym": True}
# How safetensors files are quantized, and what files of blocks most matrices are in, and the others.
METHODS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8": FP8_BLOCKS,
    "awq": AWQ_CONFIG,
    "gptq": GPTQ_CONFIG,
    "nvfp4": modelopt_config("NVFP4", group_size=16),
    "mxfp4": compressed_config("mxfp4-pack-quantized", 32),
}
BLOCKS: dict[str, tuple[str, dict[str, str]]] = {
    "Q4_K_M": ("Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}),
    "Q8_0": ("Q8_0", {}),
    "IQ4_NL": ("IQ4_NL", {"output": "Q6_K", "attn_q": "F16", "attn_k": "Q5_0"}),
    "F16": ("F16", {}),
}


def folder(path: Path, model: Config, method: Config | None = None) -> Path:
    """A model's folder, as far as it is read before tensors are."""
    quantized = {} if method is None else {"quantization_config": method}
    (path / "config.json").write_text(json.dumps(model | quantized))
    return path


def blocks(path: Path, model: Config, form: str) -> Path:
    """A GGUF file's header; of the tensors behind it there are holes."""
    default, others = BLOCKS[form]
    hidden, ffn, heads, kv = (
        model[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    width, layers, vocab = model.get("head_dim", hidden // heads), model["num_hidden_layers"], model["vocab_size"]
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, layers), (writer.add_embedding_length, hidden), (writer.add_feed_forward_length, ffn),
        (writer.add_head_count, heads), (writer.add_head_count_kv, kv), (writer.add_key_length, width),
        (writer.add_value_length, width), (writer.add_context_length, 8192), (writer.add_vocab_size, vocab),
    ):  # fmt: skip
        add(value)
    writer.add_layer_norm_rms_eps(1e-5)
    layer = {
        "attn_q": (heads * width, hidden), "attn_k": (kv * width, hidden), "attn_v": (kv * width, hidden),
        "attn_output": (hidden, heads * width), "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn), "attn_norm": (hidden,), "ffn_norm": (hidden,),
    }  # fmt: skip
    shapes = {f"blk.{at}.{name}": shape for at in range(layers) for name, shape in layer.items()}
    shapes |= {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    shapes |= {} if model.get("tie_word_embeddings") else {"output": (vocab, hidden)}
    size = 0
    for name, shape in shapes.items():
        kind = "F32" if len(shape) == 1 else others.get(name.rpartition(".")[2], default)
        if kind in BLOCK_FORMATS:
            columns, block = BLOCK_FORMATS[kind]
            shape, dtype = (shape[0], shape[1] // columns * block), np.dtype(np.uint8)
        else:
            dtype = np.dtype({"F16": np.float16, "F32": np.float32}[kind])
        length = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(f"{name}.weight", shape, dtype, length, gguf.GGMLQuantizationType[kind])
        size += -(-length // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 32 + size)
    return path

SEEING: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL-7B": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
        "image_token_id": 151655, "rope_theta": 1e6, "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31], "temporal_patch_size": 2,
        },
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256, "image_token_index": 262144,
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072,
            "sliding_window": 1024, "dtype": "bfloat16",
        },
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
        },
    },
}  # fmt: skip
