"""Configurations of published models, as their config.json say them: what a server is asked to serve.

They are the question that `test_start_compiles_nothing` puts to what is compiled ahead; nothing that is compiled was
chosen by looking here. Layers are left out: every layer launches the same kernels.
Knows nothing of kernels.
"""

from __future__ import annotations

from typing import Any

_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e6},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 128},
    "llama": {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 5e5},
    "mistral": {"architectures": ["MistralForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 1e6,
                "sliding_window": None},
    "qwen3moe": {"architectures": ["Qwen3MoeForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 128,
                 "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "moe_intermediate_size": 768},
    "qwen2moe": {"architectures": ["Qwen2MoeForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e6, "num_experts": 60,
                 "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "deepseek2": {"architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 512, "qk_nope_head_dim": 128,
                  "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "moe_intermediate_size": 1408,
                  "first_k_dense_replace": 1},
    # The experts of its sparse layers alone are 22 GB each: what is traced here are those before them.
    "deepseek3": {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "qk_nope_head_dim": 128,
                  "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536, "first_k_dense_replace": 3},
    "minicpm3": {"architectures": ["MiniCPM3ForCausalLM"], "kv_lora_rank": 256, "qk_nope_head_dim": 64,
                 "qk_rope_head_dim": 32, "v_head_dim": 64, "q_lora_rank": 768},
    "gemma": {"architectures": ["GemmaForCausalLM"], "head_dim": 256},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "head_dim": 256},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "head_dim": 256, "sliding_window": 1024,
               "sliding_window_pattern": 2},
    "phi": {"architectures": ["PhiForCausalLM"], "partial_rotary_factor": 0.4},
    "phi3": {"architectures": ["Phi3ForCausalLM"]},
    "neox": {"architectures": ["GPTNeoXForCausalLM"]},
    "stablelm": {"architectures": ["StableLmForCausalLM"], "use_qkv_bias": True},
    "cohere": {"architectures": ["CohereForCausalLM"]},
    "cohere2": {"architectures": ["Cohere2ForCausalLM"], "sliding_window_pattern": 2},
    "glm4": {"architectures": ["Glm4ForCausalLM"]},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_layer": 2},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "granite": {"architectures": ["GraniteForCausalLM"], "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                "attention_multiplier": 0.0078125, "logits_scaling": 16.0},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2},
    "exaone4": {"architectures": ["Exaone4ForCausalLM"], "head_dim": 128, "sliding_window_pattern": 2},
    "nemotron": {"architectures": ["NemotronForCausalLM"]},
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"], "sliding_window": 4096},
    "phi3small": {"architectures": ["Phi3SmallForCausalLM"]},
    "baichuan": {"architectures": ["BaichuanForCausalLM"], "max_position_embeddings": None, "model_max_length": 4096},
    "bloom": {"architectures": ["BloomForCausalLM"]},
    "mpt": {"architectures": ["MPTForCausalLM"], "n_layers": 2},
    "falcon": {"architectures": ["FalconForCausalLM"], "new_decoder_architecture": True},
}  # fmt: skip
_COMMON = {"max_position_embeddings": 8192, "eos_token_id": 2, "dtype": "bfloat16"}

# Name → family, sizes in the order of _SIZES, and what else the model's config.json says.
_MODELS: dict[str, tuple[str, tuple[int, int, int, int, int], dict[str, Any]]] = {
    "Qwen2.5-0.5B": ("qwen2", (896, 14, 2, 4864, 151936), {"tie_word_embeddings": True}),
    "Qwen2.5-1.5B": ("qwen2", (1536, 12, 2, 8960, 151936), {"tie_word_embeddings": True}),
    "Qwen2.5-3B": ("qwen2", (2048, 16, 2, 11008, 151936), {"tie_word_embeddings": True}),
    "Qwen2.5-7B": ("qwen2", (3584, 28, 4, 18944, 152064), {}),
    "Qwen2.5-14B": ("qwen2", (5120, 40, 8, 13824, 152064), {}),
    "Qwen2.5-32B": ("qwen2", (5120, 40, 8, 27648, 152064), {}),
    "Qwen2.5-72B": ("qwen2", (8192, 64, 8, 29568, 152064), {}),
    "Qwen1.5-4B": ("qwen2", (2560, 20, 20, 6912, 151936), {}),
    "Qwen3-0.6B": ("qwen3", (1024, 16, 8, 3072, 151936), {"tie_word_embeddings": True}),
    "Qwen3-1.7B": ("qwen3", (2048, 16, 8, 6144, 151936), {"tie_word_embeddings": True}),
    "Qwen3-4B": ("qwen3", (2560, 32, 8, 9728, 151936), {"tie_word_embeddings": True}),
    "Qwen3-8B": ("qwen3", (4096, 32, 8, 12288, 151936), {}),
    "Qwen3-14B": ("qwen3", (5120, 40, 8, 17408, 151936), {}),
    "Qwen3-32B": ("qwen3", (5120, 64, 8, 25600, 151936), {}),
    "Llama-2-7B": ("llama", (4096, 32, 32, 11008, 32000), {"dtype": "float16"}),
    "Llama-2-13B": ("llama", (5120, 40, 40, 13824, 32000), {"dtype": "float16"}),
    "Llama-3.1-8B": ("llama", (4096, 32, 8, 14336, 128256), {}),
    "Llama-3.1-70B": ("llama", (8192, 64, 8, 28672, 128256), {}),
    "Llama-3.2-1B": ("llama", (2048, 32, 8, 8192, 128256), {"head_dim": 64, "tie_word_embeddings": True}),
    "Llama-3.2-3B": ("llama", (3072, 24, 8, 8192, 128256), {"head_dim": 128, "tie_word_embeddings": True}),
    "TinyLlama-1.1B": ("llama", (2048, 32, 4, 5632, 32000), {"rope_theta": 1e4}),
    "OpenLLaMA-3B": ("llama", (3200, 32, 32, 8640, 32000), {"dtype": "float16", "rope_theta": 1e4}),
    "SmolLM2-135M": ("llama", (576, 9, 3, 1536, 49152), {"tie_word_embeddings": True}),
    "SmolLM2-360M": ("llama", (960, 15, 5, 2560, 49152), {"tie_word_embeddings": True}),
    "SmolLM2-1.7B": ("llama", (2048, 32, 32, 8192, 49152), {"tie_word_embeddings": True}),
    "CodeLlama-34B": ("llama", (8192, 64, 8, 22016, 32000), {"rope_theta": 1e6}),
    "Yi-6B": ("llama", (4096, 32, 4, 11008, 64000), {}),
    "Yi-34B": ("llama", (7168, 56, 8, 20480, 64000), {}),
    "Falcon3-1B": ("llama", (2048, 8, 4, 8192, 131072), {"head_dim": 256}),
    "Falcon3-7B": ("llama", (3072, 12, 4, 23040, 131072), {"head_dim": 256}),
    "DeepSeek-Coder-1.3B": ("llama", (2048, 16, 16, 5504, 32256), {}),
    "Amber-7B": ("llama", (4096, 32, 32, 11008, 32000), {"dtype": "float32"}),
    "Danube-1.8B": ("mistral", (2560, 32, 8, 6912, 32000), {"sliding_window": 4096}),
    "Danube3-4B": ("llama", (3840, 32, 8, 10240, 32000), {"head_dim": 120}),
    "Granite-3B-code": ("llama", (2560, 32, 32, 10240, 49152), {"attention_bias": True, "mlp_bias": True}),
    "Mistral-7B-v0.1": ("mistral", (4096, 32, 8, 14336, 32000), {"sliding_window": 4096, "rope_theta": 1e4}),
    "Mistral-7B-v0.3": ("mistral", (4096, 32, 8, 14336, 32768), {}),
    "OpenHermes-2.5-7B": ("mistral", (4096, 32, 8, 14336, 32002), {"sliding_window": 4096}),
    "Ministral-8B": ("mistral", (4096, 32, 8, 12288, 131072), {"head_dim": 128, "sliding_window": 32768}),
    "Mistral-Nemo-12B": ("mistral", (5120, 32, 8, 14336, 131072), {"head_dim": 128}),
    "Mistral-Small-22B": ("mistral", (6144, 48, 8, 16384, 32768), {"head_dim": 128}),
    "Mistral-Small-24B": ("mistral", (5120, 32, 8, 32768, 131072), {"head_dim": 128}),
    "Qwen3-30B-A3B": ("qwen3moe", (2048, 32, 4, 6144, 151936), {}),
    "Qwen1.5-MoE-A2.7B": ("qwen2moe", (2048, 16, 16, 5632, 151936), {}),
    "Mixtral-8x7B": ("mixtral", (4096, 32, 8, 14336, 32000), {}),
    "Mistral-Large-123B": ("mistral", (12288, 96, 8, 28672, 32768), {"head_dim": 128}),
}

# As above, of the architectures that have other kinds of layers.
_OTHERS: dict[str, tuple[str, tuple[int, int, int, int, int], dict[str, Any]]] = {
    "DeepSeek-V2-Lite": ("deepseek2", (2048, 16, 16, 10944, 102400), {}),
    "DeepSeek-V3": ("deepseek3", (7168, 128, 128, 18432, 129280), {}),
    "MiniCPM3-4B": ("minicpm3", (2560, 40, 40, 6400, 73448), {}),
    "Gemma-7B": ("gemma", (3072, 16, 16, 24576, 256000), {}),
    "Gemma-2-9B": ("gemma2", (3584, 16, 8, 14336, 256000), {}),
    "Gemma-2-27B": ("gemma2", (4608, 32, 16, 36864, 256000), {"head_dim": 128, "query_pre_attn_scalar": 144}),
    "Gemma-3-1B": ("gemma3", (1152, 4, 1, 6912, 262144), {}),
    "Phi-2": ("phi", (2560, 32, 32, 10240, 51200), {"dtype": "float16"}),
    "Phi-3-mini": ("phi3", (3072, 32, 32, 8192, 32064), {"sliding_window": 2047}),
    "Phi-4-mini": ("phi3", (3072, 24, 8, 8192, 200064), {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "Pythia-1.4B": ("neox", (2048, 16, 16, 8192, 50304), {"dtype": "float16"}),
    "StableLM-2-1.6B": ("stablelm", (2048, 32, 32, 5632, 100352), {}),
    "Command-R": ("cohere", (8192, 64, 64, 22528, 256000), {}),
    "Command-R-plus": ("cohere", (12288, 96, 8, 33792, 256000), {"use_qk_norm": True}),
    "Command-R7B": ("cohere2", (4096, 32, 8, 14336, 256000), {}),
    "GLM-4-9B": ("glm4", (4096, 32, 2, 13696, 151552), {}),
    "GPT-2": ("gpt2", (768, 12, 12, 3072, 50257), {"n_embd": 768, "n_head": 12}),
    "OLMo-2-7B": ("olmo2", (4096, 32, 32, 11008, 100352), {}),
    "Granite-3.1-8B": ("granite", (4096, 32, 8, 12800, 49155), {}),
    "SmolLM3-3B": ("smollm3", (2048, 16, 4, 11008, 128256), {}),
    "EXAONE-4-32B": ("exaone4", (5120, 40, 8, 27392, 102400), {}),
    "Minitron-4B": ("nemotron", (3072, 24, 8, 9216, 256000), {"head_dim": 128}),
    "StarCoder2-7B": ("starcoder2", (4608, 36, 4, 18432, 49152), {}),
    "Phi-3-small": ("phi3small", (4096, 32, 8, 14336, 100352), {"ff_intermediate_size": 14336, "hidden_act": "gegelu"}),
    "Baichuan2-13B": ("baichuan", (5120, 40, 40, 13696, 125696), {}),
    "BLOOM-560M": ("bloom", (1024, 16, 16, 4096, 250880), {}),
    "BLOOM-7B1": ("bloom", (4096, 32, 32, 16384, 250880), {}),
    "MPT-7B": ("mpt", (4096, 32, 32, 16384, 50432), {"d_model": 4096, "n_heads": 32}),
    "Falcon-40B": ("falcon", (8192, 128, 8, 32768, 65024), {"num_kv_heads": 8}),
}

PUBLISHED: dict[str, dict[str, Any]] = {
    name: {**_COMMON, **_FAMILIES[family], **dict(zip(_SIZES, sizes, strict=True)), **more}
    for name, (family, sizes, more) in (_MODELS | _OTHERS).items()
}
"""Name → a config.json without its number of layers."""
OTHERS = tuple(_OTHERS)
