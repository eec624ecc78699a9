"""The table: every architecture that the decoder runs, and what the models that have it are called.

Knows nothing of how a row is read: that is in the module of its family.
"""

from __future__ import annotations

from stoker_runtime.models.architectures.alibi import ALIBI_ROWS
from stoker_runtime.models.architectures.corrected_moe import CORRECTED_ROWS
from stoker_runtime.models.architectures.heads import HEAD_ROWS
from stoker_runtime.models.architectures.hybrid import HYBRID_ROWS
from stoker_runtime.models.architectures.latent import LATENT_ROWS
from stoker_runtime.models.architectures.layer_norm import LAYER_NORM_ROWS
from stoker_runtime.models.architectures.llama import LLAMA_ROWS
from stoker_runtime.models.architectures.mistral import MISTRAL_ROWS
from stoker_runtime.models.architectures.moe import MOE_ROWS
from stoker_runtime.models.architectures.post_norm import POST_NORM_ROWS
from stoker_runtime.models.architectures.row import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    **HYBRID_ROWS,
    **LATENT_ROWS,
    **LLAMA_ROWS,
    **MISTRAL_ROWS,
    **MOE_ROWS,
    **CORRECTED_ROWS,
    **POST_NORM_ROWS,
    **LAYER_NORM_ROWS,
    **ALIBI_ROWS,
}
ROWS: dict[str, Architecture] = {**ARCHITECTURES, **HEAD_ROWS}
"""Besides, the heads that draft beside a model, and are none by themselves."""

REFUSED = {
    "Gemma3nForConditionalGeneration": "its layers keep several residual streams; Gemma 3 works",
    "Llama4ForConditionalGeneration": "its layers attend within chunks and scale queries by position; Llama 3 works",
    "MambaForCausalLM": "its states are of Mamba's first generation; models with Mamba-2 layers work",
}
"""What people ask for and no row can say yet, each with its reason."""

# For people, in docs/reference/models.md.
MODELS = {
    "ArceeForCausalLM": "Arcee AFM",
    "BaiChuanForCausalLM": "Baichuan 7B of the first generation",
    "BaichuanForCausalLM": "Baichuan 13B, Baichuan 2 7B and 13B",
    "BloomForCausalLM": "BLOOM and BLOOMZ, 560M to 176B",
    "Cohere2ForCausalLM": "Command R7B, Command A",
    "CohereForCausalLM": "Command-R, Command-R+, Aya 23 and Expanse",
    "DeepseekV2ForCausalLM": "DeepSeek-V2, V2-Lite, V2.5, DeepSeek-Coder-V2",
    "DeepseekV3ForCausalLM": "DeepSeek-V3, V3.1 and R1",
    "Dots1ForCausalLM": "dots.llm1",
    "Ernie4_5ForCausalLM": "ERNIE 4.5 0.3B",
    "Ernie4_5_MoeForCausalLM": "ERNIE 4.5 21B-A3B and 300B-A47B",
    "Exaone4ForCausalLM": "EXAONE 4",
    "ExaoneForCausalLM": "EXAONE 3, 3.5 and Deep",
    "GPT2LMHeadModel": "GPT-2, DistilGPT-2",
    "GPTBigCodeForCausalLM": "StarCoder, StarCoderBase 1B to 15B, Granite 20B and 34B Code",
    "GPTJForCausalLM": "GPT-J 6B, GPT4All-J, Dolly 1",
    "GPTNeoXForCausalLM": "Pythia, GPT-NeoX-20B, Dolly 2, RedPajama-INCITE",
    "FalconForCausalLM": "Falcon RW 1B and 7B, Falcon 7B, 40B and 180B, Falcon 2 11B",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 1B and 270M",
    "Gemma3ForConditionalGeneration": "Gemma 3 4B, 12B and 27B, MedGemma; with images",
    "GemmaForCausalLM": "Gemma, CodeGemma",
    "Glm4ForCausalLM": "GLM-4 (0414), GLM-Z1",
    "Glm4MoeForCausalLM": "GLM-4.5 and its Air",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
    "GlmForCausalLM": "GLM-4 9B of 2024 (hf), GLM-Edge",
    "GptOssForCausalLM": "gpt-oss 20B and 120B",
    "GraniteForCausalLM": "Granite 3 dense",
    "GraniteMoeForCausalLM": "Granite 3 MoE",
    "GraniteMoeHybridForCausalLM": "Granite 4: h-small, h-tiny, h-micro, and micro without Mamba layers",
    "GraniteMoeSharedForCausalLM": "Granite MoE with a shared expert",
    "HeliumForCausalLM": "Helium 1",
    "HunYuanDenseV1ForCausalLM": "Hunyuan 0.5B to 7B, dense; Hunyuan-MT",
    "InternLM2ForCausalLM": "InternLM 2 and 2.5",
    "InternLM3ForCausalLM": "InternLM 3",
    "Jais2ForCausalLM": "Jais 2 8B and 70B",
    "LlamaForCausalLM": "Llama 2 and 3, CodeLlama, Vicuna, DeepSeek-R1-Distill-Llama, SmolLM 1 and 2, Falcon 3, Yi",
    "MiniCPM3ForCausalLM": "MiniCPM3 4B",
    "MiniCPMForCausalLM": "MiniCPM 1B, 2B and 4",
    "MiniMaxM2ForCausalLM": "MiniMax-M2",
    "Ministral3ForCausalLM": "Ministral 3 as a model of text",
    "Mistral3ForConditionalGeneration": "Mistral Small 3.1 and 3.2, Ministral 3; text alone",
    "MistralForCausalLM": "Mistral 7B, Nemo, Small and Large, Ministral, Zephyr",
    "MPTForCausalLM": "MPT 7B and 30B, as published",
    "MixtralForCausalLM": "Mixtral 8x7B and 8x22B",
    "MptForCausalLM": "MPT 7B and 30B, as transformers saves them",
    "NemotronForCausalLM": "Nemotron-4 Minitron",
    "NemotronHForCausalLM": "Nemotron-H 4B to 56B, Nemotron Nano v2, Nemotron 3 Nano 30B-A3B and 4B",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "OlmoeForCausalLM": "OLMoE",
    "Phi3ForCausalLM": "Phi-3 mini and medium, Phi-3.5 mini, Phi-4, Phi-4-mini",
    "Phi3SmallForCausalLM": "Phi-3-small 8K and 128K",
    "PhiForCausalLM": "Phi-1.5, Phi-2",
    "PhimoeForCausalLM": "Phi-3.5-MoE",
    "Qwen2ForCausalLM": "Qwen 1.5, 2 and 2.5, QwQ, DeepSeek-R1-Distill-Qwen",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2 57B-A14B",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL; text alone",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL 3B to 72B; with images",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3 30B-A3B and 235B-A22B, Qwen3-Coder",
    "Qwen3VLForConditionalGeneration": "Qwen3-VL 2B to 32B, dense; with images",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL 30B-A3B and 235B-A22B; with images",
    "Qwen3NextForCausalLM": "Qwen3-Next 80B-A3B",
    "Qwen3_5ForCausalLM": "Qwen3.5, dense, its text model alone",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5 9B and 27B and others, dense; text alone",
    "Qwen3_5MoeForCausalLM": "Qwen3.5 mixtures, their text model alone",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5 35B-A3B and other mixtures; text alone",
    "SeedOssForCausalLM": "Seed-OSS",
    "SmolLM3ForCausalLM": "SmolLM3",
    "StableLmForCausalLM": "StableLM 3B, StableLM 2",
    "Starcoder2ForCausalLM": "StarCoder 2",
}
