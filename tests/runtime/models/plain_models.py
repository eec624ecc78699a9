"""Models that transformers does not have, as plainly as PyTorch can say them from what their makers published.

Each is a mapping from config.json and tensors by their published names to the logits of one text, whole and uncached.
Invariants: fp32; shares nothing with the engine. Sources: the definitions of microsoft/Phi-3-small-8k-instruct and
-128k-instruct, and of baichuan-inc/Baichuan-13B-Base, Baichuan2-7B-Base and Baichuan2-13B-Base; ALiBi (arXiv
2108.12409).
Knows nothing of pages, of steps or of how weights are laid out elsewhere.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

LONGEST = 160  # tokens of a text


class PlainModel:
    """A model of these `tensors`; called with ids `[1, n]` it answers as transformers' models do."""

    architecture: ClassVar[str]

    def __init__(self, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.config = {**config, "architectures": [self.architecture], "torch_dtype": "float32"}
        self.tensors = tensors
        self.masks: dict[bool, Tensor] = {}

    def __call__(self, ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits(ids[0])[None])

    def logits(self, ids: Tensor) -> Tensor:
        """`[n]` → `[n, V]`."""
        raise NotImplementedError

    @staticmethod
    def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Its tensors by their published names."""
        raise NotImplementedError

    @classmethod
    def random(cls, config: dict[str, Any], rng: random.Random) -> PlainModel:
        """Of tensors as `test_zoo.save_random` draws them."""
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        tensors = {}
        for name, shape in cls.shapes(config).items():
            noise = torch.randn(shape, generator=generator)
            tensors[name] = 1.0 + 0.3 * noise if "norm" in name and name.endswith("weight") else 0.2 * noise
        return cls(config, tensors)

    def save_pretrained(self, folder: Path) -> None:
        """config.json and model.safetensors, as published."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor) -> Tensor:
    """`[n, heads, D]` each, with what is added to scores, `[heads, n, n]` → `[n, heads · D]`."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale + bias
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def _rotated(x: Tensor, angles: Tensor, scale: float = 1.0) -> Tensor:
    """`[n, heads, D]`, its halves turned by angles `[n, 1, D/2]`."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class PlainPhi3Small(PlainModel):
    """Phi-3-small: muP, blocks of keys, gelu of bounded values, fused and interleaved matrices."""

    architecture = "Phi3SmallForCausalLM"

    @staticmethod
    def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        hidden, ffn, heads = config["hidden_size"], config["ff_intermediate_size"], config["num_attention_heads"]
        rows = (heads + 2 * config["num_key_value_heads"]) * (hidden // heads)
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
        for layer in range(config["num_hidden_layers"]):
            for name, shape in {
                "self_attn.query_key_value": (rows, hidden), "self_attn.dense": (hidden, hidden),
                "mlp.up_proj": (2 * ffn, hidden), "mlp.down_proj": (hidden, ffn),
                "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            }.items():  # fmt: skip
                found[f"model.layers.{layer}.{name}.weight"] = shape
                found[f"model.layers.{layer}.{name}.bias"] = shape[:1]
        return found | {"model.final_layernorm.weight": (hidden,), "model.final_layernorm.bias": (hidden,)}

    def logits(self, ids: Tensor) -> Tensor:
        config, table = self.config, self.tensors["model.embed_tokens.weight"]
        stream = table[ids] * config["mup_embedding_multiplier"]
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            stream = stream + self._attention(self._norm(stream, f"{name}.input_layernorm"), layer)
            both = self._linear(self._norm(stream, f"{name}.post_attention_layernorm"), f"{name}.mlp.up_proj")
            gate, up = both[:, 0::2], both[:, 1::2]
            limit = config["gegelu_limit"]
            gate, up = torch.minimum(gate, torch.tensor(limit)), up.clamp(-limit, limit)
            stream = stream + self._linear(gate * torch.sigmoid(1.702 * gate) * (up + 1), f"{name}.mlp.down_proj")
        logits = self._norm(stream, "model.final_layernorm") @ table.t() / config["mup_width_multiplier"]
        logits[:, config.get("dummy_token_indices", [])] = -math.inf
        return logits

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = (self.tensors[f"{name}.{each}"] for each in ("weight", "bias"))
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.config["layer_norm_epsilon"])

    def _attention(self, x: Tensor, layer: int) -> Tensor:
        config, count, heads = self.config, len(x), self.config["num_attention_heads"]
        dim, groups = config["hidden_size"] // heads, config["num_key_value_heads"]
        grouped = self._linear(x, f"model.layers.{layer}.self_attn.query_key_value").view(count, groups, -1, dim)
        q, k, v = grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
        q, k = self._rotated(q), self._rotated(k)
        k, v = (each.repeat_interleave(heads // groups, dim=1) for each in (k, v))
        scale = config["mup_attn_multiplier"] / dim if config["mup_use_scaling"] else dim**-0.5
        attended = _attend(q, k, v, scale, self._seen(count, layer))
        return self._linear(attended, f"model.layers.{layer}.self_attn.dense")

    def _rotated(self, x: Tensor) -> Tensor:
        """By the long factors where texts may be longer than those it was trained on at first: a model serves all its
        texts alike, so that what is cached of one holds for the next, where the published code looks at each text.
        """
        half, scaling = x.shape[-1] // 2, self.config.get("rope_scaling")
        speeds, scale = self.config["rope_embedding_base"] ** (-torch.arange(half) / half), 1.0
        if scaling is not None:
            longer = self.config["max_position_embeddings"] > scaling["original_max_position_embeddings"]
            speeds = speeds / torch.tensor(scaling["long_factor" if longer else "short_factor"])
            scale = scaling["long_mscale" if longer else "short_mscale"]
        angles = torch.arange(len(x))[:, None, None] * speeds / self.config["rope_position_scale"]
        return _rotated(x, angles, scale)

    def _seen(self, count: int, layer: int) -> Tensor:
        """0 where a query sees a key, else −∞."""
        dense = (layer + 1) % self.config["dense_attention_every_n_layers"] == 0
        if dense not in self.masks:
            self.masks[dense] = self._mask(LONGEST, dense)
        return self.masks[dense][:, :count, :count]

    def _mask(self, count: int, dense: bool) -> Tensor:
        """The same one by one."""
        config, heads = self.config, self.config["num_attention_heads"]
        size, stride = config["blocksparse_block_size"], config["blocksparse_vert_stride"]
        step = 0 if config["blocksparse_homo_head_pattern"] else max(1, int(stride / heads))
        bias = torch.full((heads, count, count), -math.inf)
        for head in range(heads):
            for query in range(count):
                for key in range(query + 1):
                    near = query // size - key // size < config["blocksparse_num_local_blocks"]
                    if dense or near or (key // size + head * step + 1) % stride == 0:
                        bias[head, query, key] = 0.0
        return bias


class PlainBaichuan(PlainModel):
    """Baichuan: Llama with one matrix for Q, K and V, of 13B with slopes, of 7B turned; the second generation's head is
    normed.
    """

    architecture = "BaichuanForCausalLM"

    @staticmethod
    def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        hidden, ffn = config["hidden_size"], config["intermediate_size"]
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
        for layer in range(config["num_hidden_layers"]):
            for name, shape in {
                "self_attn.W_pack": (3 * hidden, hidden), "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn),
                "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            }.items():  # fmt: skip
                found[f"model.layers.{layer}.{name}.weight"] = shape
        return found | {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}

    def logits(self, ids: Tensor) -> Tensor:
        config, stream = self.config, self.tensors["model.embed_tokens.weight"][ids]
        heads = config["num_attention_heads"]
        at = torch.arange(len(ids))
        behind = (at[:, None] - at[None, :]).float()
        turns, dim = "max_position_embeddings" in config, config["hidden_size"] // heads
        slopes = [0.0] * heads if turns else _published_slopes(heads)
        bias = torch.stack([-slope * behind for slope in slopes]).masked_fill(behind < 0, -math.inf)
        angles = at[:, None, None] * 1e4 ** (-torch.arange(dim // 2) / (dim // 2))
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            packed = self._linear(self._norm(stream, f"{name}.input_layernorm"), f"{name}.self_attn.W_pack")
            q, k, v = packed.view(len(ids), 3, heads, -1).unbind(1)
            q, k = (_rotated(each, angles) if turns else each for each in (q, k))
            attended = _attend(q, k, v, q.shape[-1] ** -0.5, bias)
            stream = stream + self._linear(attended, f"{name}.self_attn.o_proj")
            read = self._norm(stream, f"{name}.post_attention_layernorm")
            gate, up = (self._linear(read, f"{name}.mlp.{each}_proj") for each in ("gate", "up"))
            stream = stream + self._linear(F.silu(gate) * up, f"{name}.mlp.down_proj")
        head = self.tensors["lm_head.weight"]
        if "z_loss_weight" in config:
            head = head / head.norm(dim=1, keepdim=True)
        return self._norm(stream, "model.norm") @ head.t()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.config["rms_norm_eps"])


def _published_slopes(heads: int) -> list[float]:
    """Of a power of two a geometric series from its ratio on; of other numbers, that of the power below, then every
    second one of the power above.
    """
    if math.log2(heads).is_integer():
        ratio = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [ratio * ratio**head for head in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return _published_slopes(below) + _published_slopes(2 * below)[0::2][: heads - below]


def _phi3_small(rng: random.Random, **changes: Any) -> dict[str, Any]:
    groups, group, dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([8, 12, 20])
    vocab = rng.randrange(90, 140)
    return {
        "hidden_size": groups * group * dim, "num_attention_heads": groups * group, "num_key_value_heads": groups,
        "num_hidden_layers": 3, "ff_intermediate_size": rng.randrange(50, 120), "vocab_size": vocab,
        "hidden_act": "gegelu", "gegelu_limit": 0.5 + rng.random(), "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 512, "rope_embedding_base": 1e4, "rope_position_scale": 1.0,
        "mup_use_scaling": True, "mup_attn_multiplier": 1 + rng.random(), "mup_embedding_multiplier": 3 + rng.random(),
        "mup_width_multiplier": 2 + rng.random(), "dense_attention_every_n_layers": 2, "blocksparse_block_size": 16,
        "blocksparse_num_local_blocks": rng.choice([1, 2]), "blocksparse_vert_stride": rng.choice([2, 3, 5]),
        "blocksparse_homo_head_pattern": False, "bos_token_id": 1, "eos_token_id": 2, **changes,
    }  # fmt: skip


def _phi3_small_other(rng: random.Random) -> dict[str, Any]:
    """Unscaled, of positions twice as dense, with all heads alike and tokens that are never written."""
    return _phi3_small(
        rng, mup_use_scaling=False, rope_position_scale=2.0, blocksparse_homo_head_pattern=True,
        dummy_token_indices=sorted(rng.sample(range(90), 7)), tie_word_embeddings=True,
    )  # fmt: skip


def _phi3_small_128k(rng: random.Random) -> dict[str, Any]:
    """Trained on texts shorter than those it is for, or as short as these."""
    groups, dim = rng.choice([1, 2]), rng.choice([12, 20])
    factors = {key: [low + 2 * rng.random() for _ in range(dim // 2)]
               for key, low in (("short_factor", 1), ("long_factor", 3))}  # fmt: skip
    scaling = factors | {
        "type": "su", "short_mscale": 0.9 + rng.random() / 5, "long_mscale": 1.2 + rng.random() / 5,
        "original_max_position_embeddings": rng.choice([32, 512]),
    }  # fmt: skip
    return _phi3_small(
        rng, hidden_size=groups * 3 * dim, num_attention_heads=groups * 3, num_key_value_heads=groups,
        rope_scaling=scaling, rope_embedding_base=1e6,
    )  # fmt: skip


def _baichuan(rng: random.Random, **changes: Any) -> dict[str, Any]:
    heads = rng.choice([3, 4, 5, 6])
    return {
        "hidden_size": heads * rng.choice([8, 12, 20]), "num_attention_heads": heads, "num_hidden_layers": 3,
        "intermediate_size": rng.randrange(50, 120), "vocab_size": rng.randrange(90, 140), "hidden_act": "silu",
        "model_max_length": 300, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **changes,
    }  # fmt: skip


def _baichuan2(rng: random.Random) -> dict[str, Any]:
    return _baichuan(rng, z_loss_weight=0)


def _baichuan2_7b(rng: random.Random) -> dict[str, Any]:
    return _baichuan(rng, z_loss_weight=0, max_position_embeddings=300)


PLAIN: dict[str, tuple[type[PlainModel], Any]] = {
    "Phi3SmallForCausalLM": (PlainPhi3Small, _phi3_small),
    "Phi3SmallForCausalLM-unscaled": (PlainPhi3Small, _phi3_small_other),
    "Phi3SmallForCausalLM-128k": (PlainPhi3Small, _phi3_small_128k),
    "BaichuanForCausalLM-13b": (PlainBaichuan, _baichuan),
    "BaichuanForCausalLM-2-7b": (PlainBaichuan, _baichuan2_7b),
    "BaichuanForCausalLM-2-13b": (PlainBaichuan, _baichuan2),
}
