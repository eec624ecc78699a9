"""Which GGUF architectures are read, as what, and under which keys their files say what config.json says.

Invariants: plain data. The keys of all architectures stand in `config.py`; here are those that one has of its own.
Knows nothing of how metadata is read. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class GGUFRow:
    """`architecture` is the row of the table that reads it, if none of `variants`, which its files may turn out to be.

    `eps` is config.json's key of the norms' epsilon, which files call by their kind of norm (`layer_norm`). `own` is
    config.json's key → the GGUF key after "<architecture>."; `says`, what its files leave out.
    """

    architecture: str
    eps: str = "rms_norm_eps"
    layer_norm: bool = False
    own: Mapping[str, str] = field(default_factory=dict)
    says: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[str, ...] = ()


# config.json's key → the GGUF key after "<architecture>.", without which no file is read.
REQUIRED = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
WINDOW = {"sliding_window": "attention.sliding_window"}
LOCAL_EXPERTS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
# Experts that are scored and scaled as DeepSeek's.
SCALED_EXPERTS = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
LATENT = {"q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank"}
MAMBA = {
    "mamba_num_heads": "ssm.time_step_rank",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "conv_kernel": "ssm.conv_kernel",
}
DELTA = {
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_num_key_heads": "ssm.group_count",
    "linear_key_head_dim": "ssm.state_size",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
}
GRANITE = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
PARALLEL = {"use_parallel_residual": "use_parallel_residual"}
GPT2 = {
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "n_positions": "context_length",
    "n_inner": "feed_forward_length",
}

GGUF_ROWS: dict[str, GGUFRow] = {
    # With experts Mixtral, with a window Mistral.
    "llama": GGUFRow("LlamaForCausalLM", own=LOCAL_EXPERTS, variants=("MistralForCausalLM", "MixtralForCausalLM")),
    # Text of models that see, too; with queries that grow Ministral 3.
    "mistral3": GGUFRow("MistralForCausalLM", says={"sliding_window": None}, variants=("Ministral3ForCausalLM",)),
    "qwen2": GGUFRow("Qwen2ForCausalLM"),
    "qwen3": GGUFRow("Qwen3ForCausalLM"),
    # What sees is in a file of its own; of text these models are Qwen2 and Qwen3.
    "qwen2vl": GGUFRow("Qwen2ForCausalLM"),
    "qwen3vl": GGUFRow("Qwen3ForCausalLM"),
    "qwen2moe": GGUFRow(
        "Qwen2MoeForCausalLM",
        own=EXPERTS | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        says={"norm_topk_prob": False},
    ),
    "qwen3moe": GGUFRow("Qwen3MoeForCausalLM", own=EXPERTS, says={"norm_topk_prob": True}),
    "qwen3vlmoe": GGUFRow("Qwen3MoeForCausalLM", own=EXPERTS, says={"norm_topk_prob": True}),
    "gemma": GGUFRow("GemmaForCausalLM"),
    "gemma2": GGUFRow(
        "Gemma2ForCausalLM",
        own=WINDOW
        | {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "gemma3": GGUFRow("Gemma3ForCausalLM", own=WINDOW | {"final_logit_softcapping": "final_logit_softcapping"}),
    "granite": GGUFRow("GraniteForCausalLM", own=GRANITE),
    "granitemoe": GGUFRow(
        "GraniteMoeForCausalLM",
        own=GRANITE | LOCAL_EXPERTS | {"shared_intermediate_size": "expert_shared_feed_forward_length"},
    ),
    "smollm3": GGUFRow("SmolLM3ForCausalLM"),
    "phi2": GGUFRow("PhiForCausalLM", "layer_norm_eps", layer_norm=True),
    "phi3": GGUFRow("Phi3ForCausalLM", own=WINDOW),
    "phimoe": GGUFRow("PhimoeForCausalLM", own=WINDOW | LOCAL_EXPERTS),
    "gptneox": GGUFRow("GPTNeoXForCausalLM", "layer_norm_eps", layer_norm=True, own=PARALLEL),
    "stablelm": GGUFRow("StableLmForCausalLM", "layer_norm_eps", layer_norm=True, own=PARALLEL),
    "command-r": GGUFRow("CohereForCausalLM", "layer_norm_eps", layer_norm=True, own={"logit_scale": "logit_scale"}),
    "cohere2": GGUFRow(
        "Cohere2ForCausalLM", "layer_norm_eps", layer_norm=True, own=WINDOW | {"logit_scale": "logit_scale"}
    ),
    "chatglm": GGUFRow("GlmForCausalLM"),
    "glm4": GGUFRow("Glm4ForCausalLM"),
    "glm4moe": GGUFRow("Glm4MoeForCausalLM", own=SCALED_EXPERTS | {"num_nextn_predict_layers": "nextn_predict_layers"}),
    "nemotron": GGUFRow("NemotronForCausalLM", "norm_eps", layer_norm=True),
    "jais2": GGUFRow("Jais2ForCausalLM", "layer_norm_eps", layer_norm=True),
    "gpt2": GGUFRow("GPT2LMHeadModel", "layer_norm_epsilon", layer_norm=True, own=GPT2),
    # With one key and one value that all heads share.
    "starcoder": GGUFRow("GPTBigCodeForCausalLM", "layer_norm_epsilon", layer_norm=True, own=GPT2),
    "gpt-oss": GGUFRow("GptOssForCausalLM", own=WINDOW | LOCAL_EXPERTS),
    # Which of DeepSeek's generations it is, the experts' scores say.
    "deepseek2": GGUFRow("DeepseekV2ForCausalLM", own=LATENT | SCALED_EXPERTS, variants=("DeepseekV3ForCausalLM",)),
    "minicpm3": GGUFRow("MiniCPM3ForCausalLM", own=LATENT),
    "minicpm": GGUFRow("MiniCPMForCausalLM"),
    # With a window OLMo 3.
    "olmo2": GGUFRow("Olmo2ForCausalLM", own=WINDOW, variants=("Olmo3ForCausalLM",)),
    "olmoe": GGUFRow("OlmoeForCausalLM", own=EXPERTS, says={"norm_topk_prob": False}),
    # All published models have this window, and no file says so.
    "starcoder2": GGUFRow("Starcoder2ForCausalLM", "norm_epsilon", layer_norm=True, says={"sliding_window": 4096}),
    "nemotron_h": GGUFRow("NemotronHForCausalLM", "layer_norm_epsilon", own=MAMBA),
    "nemotron_h_moe": GGUFRow(
        "NemotronHForCausalLM",
        "layer_norm_epsilon",
        own=MAMBA
        | SCALED_EXPERTS
        | {
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "moe_latent_size": "moe_latent_size",
        },
    ),
    "qwen3next": GGUFRow(
        "Qwen3NextForCausalLM",
        own=EXPERTS | DELTA | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        says={"norm_topk_prob": True},
    ),
    "internlm2": GGUFRow("InternLM2ForCausalLM"),
    "exaone": GGUFRow("ExaoneForCausalLM", "layer_norm_epsilon", own={"num_layers": "block_count"}),
    "exaone4": GGUFRow("Exaone4ForCausalLM", own=WINDOW, says={"sliding_window": None}),
    "baichuan": GGUFRow("BaichuanForCausalLM"),
    "arcee": GGUFRow("ArceeForCausalLM"),
    "seed_oss": GGUFRow("SeedOssForCausalLM"),
    "hunyuan-dense": GGUFRow("HunYuanDenseV1ForCausalLM"),
    "ernie4_5": GGUFRow("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": GGUFRow(
        "Ernie4_5_MoeForCausalLM",
        own={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
    ),
    "minimax-m2": GGUFRow("MiniMaxM2ForCausalLM", own=LOCAL_EXPERTS),
    "dots1": GGUFRow("Dots1ForCausalLM", own=SCALED_EXPERTS, says={"sliding_window": None}),
}
