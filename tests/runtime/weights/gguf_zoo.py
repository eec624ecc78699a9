"""Writes random checkpoints as GGUF files, as their published converter lays them out.

Names are those of the gguf package's own tables for each architecture, keys those of its writer. What a converter does
to numbers is written out here once more: it orders rows for rotation by neighbours, stacks experts, takes merged
matrices apart, adds what a norm's weight stands above, and turns columns into rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from tests.runtime.weights.gguf_file import write_tensors
from torch import Tensor

Kind = gguf.GGMLQuantizationType
Tensors = dict[str, Tensor]
Pairs = Iterable[tuple[str, Tensor]]

# Architectures whose converter orders the rows of Q and K for pairs of neighbours.
PERMUTED = ("llama", "granite", "granitemoe", "smollm3", "minicpm", "arcee", "baichuan", "internlm2", "mistral3")
# Those of which the writer has a key for layers' norms by mean and variance.
EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def permuted(rows: Tensor, heads: int) -> Tensor:
    """Row 2i of a head is its i-th, row 2i + 1 is the one half a head behind it."""
    halves = rows.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2).contiguous()


class Conversion:
    """One checkpoint folder on its way into a file of `architecture`."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self.architecture = architecture
        self.config = json.loads((folder / "config.json").read_text())
        self.config = {**self.config, **(self.config.get("text_config") or {})}
        self.tensors: Tensors = {
            re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name).replace("model.lm_head", "lm_head"): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
            if not re.match(r"(model\.)?(visual|vision_tower|multi_modal_projector)\.", name)
        }
        arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        self.names = gguf.get_tensor_name_map(arch, self.layers)

    def get(self, *keys: str, default: Any = None) -> Any:
        """The first of these settings that is there."""
        rope = {**(self.config.get("rope_parameters") or {}), **(self.config.get("rope_scaling") or {})}
        # Of Gemma 3 a file says what layers do that see all, and leaves the others' to who reads it.
        rope = rope.get("full_attention") or rope
        return next((each[key] for each in (self.config, rope) for key in keys if each.get(key) is not None), default)

    @property
    def layers(self) -> int:
        blocks = self.get("layers_block_type", "hybrid_override_pattern", default=())
        return int(self.get("num_hidden_layers", "n_layer", "num_layers", default=len(blocks)))

    @property
    def heads(self) -> int:
        return int(self.get("num_attention_heads", "n_head"))

    @property
    def kv_heads(self) -> int:
        return int(self.get("num_key_value_heads", default=self.heads))

    @property
    def hidden(self) -> int:
        return int(self.get("hidden_size", "n_embd"))

    @property
    def head_dim(self) -> int:
        return int(self.get("head_dim", default=self.hidden // self.heads))

    def called(self, name: str) -> str:
        """What the package calls a published tensor of this architecture."""
        found = self.names.get_name(name, (".weight", ".bias"))
        assert found is not None, f"{name} has no name in {self.architecture}"
        return found

    # --- numbers ---

    def converted(self) -> Pairs:
        """The file's tensors."""
        stacks: dict[str, dict[int, Tensor]] = {}
        for name, tensor in self.tensors.items():
            expert = EXPERT.fullmatch(name)
            if expert is not None:
                stacks.setdefault(self._stack_name(expert[1], expert[3]), {})[int(expert[2])] = tensor
                continue
            yield from self._one(name, tensor)
        for name, stack in stacks.items():
            yield self.called(name), torch.stack([stack[expert] for expert in range(len(stack))])
        yield from self._added()

    def _stack_name(self, prefix: str, projection: str) -> str:
        if self.architecture == "llama":
            layer = prefix.split(".")[2]
            return f"layers.{layer}.feed_forward.experts.{projection}.weight"
        if self.architecture == "nemotron_h_moe":
            return f"model.layers.{prefix.split('.')[2]}.mlp.experts.{projection}.weight"
        return f"{prefix}.{projection}.weight"

    def _one(self, name: str, tensor: Tensor) -> Pairs:
        special: dict[str, Callable[[str, Tensor], Pairs]] = {
            "gptneox": self._neox, "baichuan": self._merged, "internlm2": self._by_kv_head, "gpt2": self._turned,
            "granitemoe": self._granite, "gpt-oss": self._gpt_oss, "deepseek2": self._latent, "chatglm": self._plain,
            "stablelm": self._normed_heads, "nemotron": self._above_one, "nemotron_h": self._mamba,
            "nemotron_h_moe": self._mamba, "qwen3next": self._delta, "qwen2moe": self._shared_gate,
            "gemma": self._above_one, "gemma2": self._above_one, "gemma3": self._above_one,
        }  # fmt: skip
        if self.architecture in PERMUTED and (match := re.search(r"\.([qk])_proj\.", name)):
            tensor = permuted(tensor, self.heads if match[1] == "q" else self.kv_heads)
        yield from special.get(self.architecture, self._plain)(name, tensor)

    def _plain(self, name: str, tensor: Tensor) -> Pairs:
        yield self.called(name.replace("e_score_correction_bias", "e_score_correction.bias")), tensor

    def _above_one(self, name: str, tensor: Tensor) -> Pairs:
        yield from self._plain(name, tensor + 1 if name.endswith("norm.weight") else tensor)

    def _shared_gate(self, name: str, tensor: Tensor) -> Pairs:
        yield from self._plain(name, tensor[0] if name.endswith("shared_expert_gate.weight") else tensor)

    def _mamba(self, name: str, tensor: Tensor) -> Pairs:
        name = name.replace(".dt_bias", ".dt_proj.bias")
        if name.endswith(("A_log", ".D")):
            tensor = (-tensor.exp() if name.endswith("A_log") else tensor)[:, None]
        elif name.endswith("conv1d.weight"):
            tensor = tensor.squeeze(1)
        elif name.endswith("mixer.norm.weight"):
            tensor = tensor.view(self.get("n_groups"), -1)
        yield from self._plain(name, tensor)

    def _delta(self, name: str, tensor: Tensor) -> Pairs:
        name = name.replace(".dt_bias", ".dt_proj.bias")
        if name.endswith("A_log"):
            tensor = -tensor.exp()
        elif name.endswith("conv1d.weight"):
            tensor = tensor.squeeze(1)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
        if not name.endswith("in_proj_qkvz.weight"):
            yield from self._shared_gate(name, tensor)
            return
        keys, size = self.get("linear_num_key_heads"), self.get("linear_key_head_dim")
        wide = self.get("linear_num_value_heads") // keys * self.get("linear_value_head_dim")
        parts = tensor.unflatten(0, (keys, -1)).split([size, size, wide, wide], dim=1)
        queries, key, value, gate = (part.flatten(0, 1) for part in parts)
        layer = f"blk.{name.split('.')[2]}"
        yield f"{layer}.attn_qkv.weight", torch.cat([queries, key, value])
        yield f"{layer}.attn_gate.weight", gate

    def _neox(self, name: str, tensor: Tensor) -> Pairs:
        if "query_key_value" in name:
            tensor = tensor.unflatten(0, (self.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        yield from self._plain(name, tensor)

    def _merged(self, name: str, tensor: Tensor) -> Pairs:
        if "W_pack" not in name:
            yield from self._plain(name, tensor)
            return
        for each, part in zip("qkv", tensor.chunk(3), strict=True):
            part = part if each == "v" else permuted(part, self.heads)
            yield self.called(name.replace("W_pack", f"{each}_proj")), part

    def _by_kv_head(self, name: str, tensor: Tensor) -> Pairs:
        if "wqkv" not in name:
            yield from self._plain(name, tensor)
            return
        group = self.heads // self.kv_heads
        heads = tensor.unflatten(0, (self.kv_heads, group + 2, -1))
        parts = (heads[:, :group].flatten(0, 2), heads[:, group].flatten(0, 1), heads[:, group + 1].flatten(0, 1))
        layer = name.split(".")[2]
        for each, part in zip("qkv", parts, strict=True):
            part = part if each == "v" else permuted(part, self.heads if each == "q" else self.kv_heads)
            yield f"blk.{layer}.attn_{each}.weight", part

    def _turned(self, name: str, tensor: Tensor) -> Pairs:
        columns = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        yield self.called(name.removeprefix("transformer.")), tensor.t() if columns else tensor

    def _granite(self, name: str, tensor: Tensor) -> Pairs:
        if "input_linear" not in name:
            yield from self._plain(name, tensor)
            return
        kind = "exps" if "block_sparse_moe" in name else "shexp"
        for each, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
            yield f"blk.{name.split('.')[2]}.ffn_{each}_{kind}.weight", half

    def _gpt_oss(self, name: str, tensor: Tensor) -> Pairs:
        layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if name.endswith("sinks"):
            yield f"{layer}.attn_sinks.weight", tensor
        elif ".experts." in name:
            suffix = "bias" if name.endswith("bias") else "weight"
            turned = tensor if suffix == "bias" else tensor.transpose(1, 2)
            if "gate_up" in name:
                yield f"{layer}.ffn_gate_exps.{suffix}", turned[:, ::2]
                yield f"{layer}.ffn_up_exps.{suffix}", turned[:, 1::2]
            else:
                yield f"{layer}.ffn_down_exps.{suffix}", turned
        else:
            yield from self._plain(name, tensor)

    def _latent(self, name: str, tensor: Tensor) -> Pairs:
        if "kv_b_proj" not in name:
            yield from self._plain(name, tensor)
            return
        keys, values = self.get("qk_nope_head_dim"), self.get("v_head_dim")
        by_head = tensor.unflatten(0, (self.heads, keys + values))
        yield self.called(name.replace("kv_b_proj", "k_b_proj")), by_head[:, :keys].transpose(1, 2)
        yield self.called(name.replace("kv_b_proj", "v_b_proj")), by_head[:, keys:]

    def _normed_heads(self, name: str, tensor: Tensor) -> Pairs:
        found = re.fullmatch(r"(.*_layernorm)\.norms\.(\d+)\.weight", name)
        if found is None:
            yield from self._plain(name, tensor)
        elif found[2] == "0":
            count = self.heads if ".q_" in name else self.kv_heads
            yield (
                self.called(f"{found[1]}.weight"),
                torch.stack([self.tensors[f"{found[1]}.norms.{head}.weight"] for head in range(count)]),
            )

    def _added(self) -> Pairs:
        """Factors of frequencies, which are tensors there."""
        for kind in ("long", "short"):
            if (factors := self.get(f"{kind}_factor")) is not None:
                yield f"rope_factors_{kind}.weight", torch.tensor(factors, dtype=torch.float32)
        if self.get("rope_type") == "llama3":
            yield "rope_freqs.weight", self._llama3()

    def _llama3(self) -> Tensor:
        """What each frequency is divided by."""
        factor, low, high, trained = (
            self.get(key)
            for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        theta = self.get("rope_theta")
        lengths = 2 * math.pi * theta ** (torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        smooth = ((trained / lengths - low) / (high - low)).clamp(0, 1)
        return (1 / ((1 - smooth) / factor + smooth)).float()

    # --- keys ---

    def write_keys(self, writer: gguf.GGUFWriter) -> None:
        """What all converters write, and what those of single architectures add."""
        architecture, get = self.architecture, self.get
        behind = int(get("num_nextn_predict_layers", default=0)) if architecture == "glm4moe" else 0
        positions = get("max_position_embeddings", "n_positions", "model_max_length")
        writer.add_block_count(self.layers + behind)
        writer.add_context_length(positions)
        writer.add_embedding_length(self.hidden)
        writer.add_head_count(self.heads)
        if architecture.startswith("nemotron_h"):
            self._write_blocks(writer)
        else:
            writer.add_feed_forward_length(get("intermediate_size", "n_inner", default=4 * self.hidden))
        if "num_key_value_heads" in self.config and not architecture.startswith("nemotron_h"):
            writer.add_head_count_kv(self.kv_heads)
        if (theta := get("rope_theta")) is not None:
            # Hunyuan's stretched once and for all.
            theta *= get("alpha", default=1.0) ** (self.head_dim / (self.head_dim - 2))
            writer.add_rope_freq_base(theta)
        if (eps := get("rms_norm_eps")) is not None:
            writer.add_layer_norm_rms_eps(eps)
        if (eps := get(*EPS)) is not None:
            by_root = architecture.startswith(("exaone", "nemotron_h"))
            writer.add_layer_norm_rms_eps(eps) if by_root else writer.add_layer_norm_eps(eps)
        if "head_dim" in self.config:
            writer.add_key_length(self.head_dim)
            writer.add_value_length(self.head_dim)
        self._write_experts(writer)
        self._write_rotation(writer, positions)
        self._write_own(writer)
        writer.add_eos_token_id(2)

    def _write_blocks(self, writer: gguf.GGUFWriter) -> None:
        """Sizes layer by layer, 0 where a layer has nothing of the kind, and those of states."""
        get, words = self.get, {"*": "attention", "full_attention": "attention", "-": "mlp", "E": "moe"}
        blocks = [words.get(each, each) for each in get("layers_block_type", "hybrid_override_pattern")]
        wide = {"mlp": get("intermediate_size"), "moe": get("moe_intermediate_size")}
        writer.add_head_count_kv([self.kv_heads if each == "attention" else 0 for each in blocks])
        writer.add_feed_forward_length([wide.get(each, 0) for each in blocks])
        writer.add_ssm_conv_kernel(get("conv_kernel"))
        writer.add_ssm_state_size(get("ssm_state_size"))
        writer.add_ssm_group_count(get("n_groups"))
        writer.add_ssm_inner_size(get("mamba_num_heads") * get("mamba_head_dim"))
        writer.add_ssm_time_step_rank(get("mamba_num_heads"))

    def _write_experts(self, writer: gguf.GGUFWriter) -> None:
        get = self.get
        written = {
            ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"): writer.add_expert_count,
            ("num_experts_per_tok", "moe_k"): writer.add_expert_used_count,
            ("moe_intermediate_size",): writer.add_expert_feed_forward_length,
            (
                "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"
            ):
                writer.add_expert_shared_feed_forward_length,
            ("n_shared_experts", "moe_num_shared_experts"): writer.add_expert_shared_count,
            ("moe_layer_interval",): writer.add_interleave_moe_layer_step,
            ("first_k_dense_replace", "moe_layer_start_index"): writer.add_leading_dense_block_count,
            ("n_group",): writer.add_expert_group_count,
            ("topk_group",): writer.add_expert_group_used_count,
            ("num_nextn_predict_layers",): writer.add_nextn_predict_layers,
        }  # fmt: skip
        for keys, write in written.items():
            if (value := get(*keys)) is not None:
                write(value)
        if self.architecture in ("deepseek2", "glm4moe", "nemotron_h_moe", "dots1"):
            writer.add_expert_weights_scale(get("routed_scaling_factor"))
            if (renormalized := get("norm_topk_prob")) is not None:
                writer.add_expert_weights_norm(renormalized)
            second = self.config["architectures"][0] == "DeepseekV2ForCausalLM"
            kind = gguf.ExpertGatingFuncType.SOFTMAX if second else gguf.ExpertGatingFuncType.SIGMOID
            writer.add_expert_gating_func(kind)

    def _write_rotation(self, writer: gguf.GGUFWriter, positions: int) -> None:
        get, kind = self.get, self.get("rope_type", "type")
        partial = get("partial_rotary_factor", "rotary_pct", default=1.0)
        if self.architecture in ("deepseek2", "minicpm3"):
            writer.add_rope_dimension_count(get("qk_rope_head_dim"))
        elif partial != 1.0 or self.architecture not in ("qwen3", "qwen2moe"):
            writer.add_rope_dimension_count(int(self.head_dim * partial))
        trained = get("original_max_position_embeddings")
        if trained is not None and kind in ("yarn", "longrope"):
            writer.add_rope_scaling_orig_ctx_len(trained)
        if kind == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(get("factor"))
        if kind == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(get("factor"))
            if (weight := get("mscale_all_dim")) is not None:
                writer.add_rope_scaling_yarn_log_mul(weight if self.architecture == "mistral3" else 0.1 * weight)
        if kind == "longrope" and self.architecture in ("phi3", "phimoe"):
            stretched = positions / trained
            factor = math.sqrt(1 + math.log(stretched) / math.log(trained)) if stretched > 1 else 1.0
            writer.add_rope_scaling_attn_factors(factor)

    def _write_own(self, writer: gguf.GGUFWriter) -> None:
        architecture, get = self.architecture, self.get
        window = get("sliding_window")
        windowed = ("llama", "phi3", "phimoe", "cohere2", "gpt-oss", "olmo2", "exaone4", "gemma2", "gemma3")
        if architecture in windowed and window:
            writer.add_sliding_window(window)
            if architecture in ("olmo2", "exaone4"):
                writer.add_sliding_window_pattern([each == "sliding_attention" for each in get("layer_types")])
        if architecture in ("gptneox", "stablelm"):
            writer.add_parallel_residual(get("use_parallel_residual", default=False))
        if architecture == "mistral3" and (growth := get("llama_4_scaling_beta")):
            writer.add_attn_temperature_scale(growth)
        if architecture in ("command-r", "cohere2"):
            writer.add_logit_scale(get("logit_scale"))
        if (cap := get("attn_logit_softcapping")) is not None:
            writer.add_attn_logit_softcapping(cap)
        if (cap := get("final_logit_softcapping")) is not None:
            writer.add_final_logit_softcapping(cap)
        if architecture in ("granite", "granitemoe"):
            writer.add_embedding_scale(get("embedding_multiplier"))
            writer.add_residual_scale(get("residual_multiplier"))
            writer.add_attention_scale(get("attention_multiplier"))
            writer.add_logit_scale(get("logits_scaling"))
        if architecture == "minicpm":
            writer.add_embedding_scale(float(get("scale_emb")))
            writer.add_residual_scale(get("scale_depth") / self.layers**0.5)
            writer.add_logit_scale(self.hidden / get("dim_model_base"))
        if architecture in ("deepseek2", "minicpm3"):
            self._write_latent(writer)
        if architecture == "qwen3next":
            writer.add_ssm_conv_kernel(get("linear_conv_kernel_dim"))
            writer.add_ssm_state_size(get("linear_key_head_dim"))
            writer.add_ssm_group_count(get("linear_num_key_heads"))
            writer.add_ssm_time_step_rank(get("linear_num_value_heads"))
            writer.add_ssm_inner_size(get("linear_num_value_heads") * get("linear_value_head_dim"))

    def _write_latent(self, writer: gguf.GGUFWriter) -> None:
        get = self.get
        rank, rotated = get("kv_lora_rank"), get("qk_rope_head_dim")
        if get("q_lora_rank"):
            writer.add_q_lora_rank(get("q_lora_rank"))
        writer.add_kv_lora_rank(rank)
        if self.architecture == "minicpm3":
            writer.add_key_length(get("qk_nope_head_dim") + rotated)
            return
        # To its attention each latent is a key of one head, and its first part a value.
        writer.add_key_length(rank + rotated)
        writer.add_value_length(rank)
        writer.add_key_length_mla(get("qk_nope_head_dim") + rotated)
        writer.add_value_length_mla(get("v_head_dim"))


def fused(tensors: Tensors) -> Tensors:
    """Gate and up of all experts in one tensor, gate's rows first."""
    gates = [name for name in tensors if "ffn_gate_exps" in name]
    found = {name.replace("gate", "gate_up"): (name, name.replace("gate", "up")) for name in gates}
    pairs = {name: torch.cat([tensors.pop(half) for half in halves], dim=1) for name, halves in found.items()}
    return tensors | pairs


def merged(tensors: Tensors) -> Tensors:
    """Queries, keys and values in one tensor, with their biases."""
    queries = [name for name in tensors if "attn_q." in name]
    found = {name.replace("_q.", "_qkv."): [name.replace("_q.", f"_{each}.") for each in "qkv"] for name in queries}
    return tensors | {name: torch.cat([tensors.pop(part) for part in parts]) for name, parts in found.items()}


def write(
    folder: Path,
    path: Path,
    architecture: str,
    kind: Callable[[str], Kind] = lambda name: Kind.F32,
    *,
    rounded: Callable[[str], Kind] | None = None,
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors,
) -> Path:
    """`folder`'s checkpoint as a GGUF file at `path`; `kind` says as what a tensor of two dimensions or more is.

    `rounded`: the numbers are first what blocks of that kind stand for. `change` is made before.
    """
    conversion = Conversion(folder, architecture)
    writer = gguf.GGUFWriter(path, architecture)
    conversion.write_keys(writer)
    writer.add_token_list([f"token {token}" for token in range(conversion.get("vocab_size"))])
    write_tensors(writer, change(dict(conversion.converted())), kind, rounded)
    return path
