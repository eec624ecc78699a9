"""EAGLE-3 heads of random weights in their published layout, and what they draft, written down plainly.

`save_head` makes one that is often right about a model in which the last token says most of the next (`quiet`): each
token attends to itself, and its embedding tells what follows.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu, softmax

EPS = 1e-5


def save_head(
    model: str,
    seed: int,
    *,
    taps: tuple[int, ...] = (),
    own_table: bool = False,
    speculators: bool = False,
    unit: int = 1,
) -> str:
    """A folder within `model`, with a head that fits it; `speculators` writes config.json as that package does.

    `unit` divides the sizes that are the head's own.
    """
    config = json.loads((Path(model) / "config.json").read_text())
    target = load_file(Path(model) / "model.safetensors")
    table, out = target["model.embed_tokens.weight"], target.get("lm_head.weight")
    out = table if out is None else out
    rng = random.Random(seed)
    (vocab, state), layers = table.shape, config["num_hidden_layers"]
    # Without a table of its own it is as wide as the model.
    hidden = rng.choice([12, 28, 44]) if own_table else state
    kv_heads, head_dim = (rng.choice([1, 2]), rng.choice([4, 8, 12])) if own_table else (1, hidden)
    heads, ffn, drafted = kv_heads * rng.choice([1, 3]), rng.randint(9, 90), round(vocab * rng.uniform(0.6, 0.95))
    ffn, drafted = (max(unit, size // unit * unit) for size in (ffn, drafted))
    taps = taps or tuple(sorted(rng.choices(range(layers), k=3)))
    ids = torch.tensor(sorted(rng.sample(range(vocab), drafted)))

    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int, spread: float = 0.15) -> Tensor:
        return torch.randn(*shape, generator=generator) * spread

    follower = linear(table * (table.pow(2).mean(-1, keepdim=True) + EPS).rsqrt(), out).argmax(-1)
    little = 0.15 if own_table else 0.02
    fuse, rows = weight(hidden, len(taps) * state, spread=little), weight(vocab, hidden, spread=little)
    if not own_table:
        rows.index_add_(0, follower, table / table.norm(dim=-1, keepdim=True))
    sizes = {
        "self_attn.q_proj": (heads * head_dim, 2 * hidden), "self_attn.k_proj": (kv_heads * head_dim, 2 * hidden),
        "self_attn.v_proj": (kv_heads * head_dim, 2 * hidden), "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn),
    }  # fmt: skip
    layer = {name: weight(*shape, spread=little if shape[0] == hidden else 0.15) for name, shape in sizes.items()}
    if not own_table:
        same, eye = weight(hidden, hidden, spread=0.4), torch.eye(hidden)
        for name, value in (("q", same.repeat(heads, 1)), ("k", same), ("v", eye)):
            layer[f"self_attn.{name}_proj"][:, :hidden] = value
        layer["self_attn.o_proj"] += eye.repeat(1, heads) / heads
    layer |= {name: 1 + weight(hidden) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    begins = "layers.0." if speculators else "midlayer."
    tensors = {f"{begins}{name}.weight": value for name, value in layer.items()}
    tensors |= {"fc.weight": fuse, "norm.weight": 1 + weight(hidden), "lm_head.weight": rows[ids].contiguous()}
    tensors |= {"d2t": ids - torch.arange(drafted), "t2d": torch.isin(torch.arange(vocab), ids)}
    if own_table:
        tensors["embed_tokens.weight"] = weight(vocab, hidden, spread=0.9)
    folder = Path(model) / "head"
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    described: dict[str, Any] = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
        "max_position_embeddings": 64, "rms_norm_eps": EPS, "rope_theta": 10000.0, "hidden_act": "silu",
    }  # fmt: skip
    given = _as_speculators(described, taps) if speculators else _as_sglang(described, taps)
    (folder / "config.json").write_text(json.dumps({**given, "draft_vocab_size": drafted}))
    return str(folder)


def quiet(model: str) -> str:
    """`model`, whose layers add a tenth of what they did to its stream."""
    file = Path(model) / "model.safetensors"
    parts = (".o_proj.weight", ".down_proj.weight")
    save_file({name: each * (0.1 if name.endswith(parts) else 1) for name, each in load_file(file).items()}, file)
    return model


def _as_speculators(described: dict[str, Any], taps: tuple[int, ...]) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"], "transformer_layer_config": described, "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": taps,
    }  # fmt: skip


def _as_sglang(described: dict[str, Any], taps: tuple[int, ...]) -> dict[str, Any]:
    own = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in taps]}
    return {"architectures": ["LlamaForCausalLMEagle3"], **described, "eagle_config": own}


@dataclass
class PlainHead:
    """The head in `folder`, beside a model of transformers, whose states `taps` it reads."""

    folder: Path
    target: Any
    taps: tuple[int, ...]
    norm_first: bool = False

    def __post_init__(self) -> None:
        self.config = json.loads((self.folder / "config.json").read_text())
        self.config |= self.config.get("transformer_layer_config", {})
        found = load_file(self.folder / "model.safetensors")
        self.ids = torch.arange(len(found["d2t"])) + found["d2t"]
        self.tensors = {name.removeprefix("midlayer.").removeprefix("layers.0."): each for name, each in found.items()}

    @torch.inference_mode()
    def drafts(self, known: list[int], count: int) -> tuple[list[int], Tensor]:
        """What it drafts behind `known`, and the logits `[drafted]` of the last draft."""
        table = self.tensors.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        every = self.target(torch.tensor([known]), output_hidden_states=True).hidden_states
        states = linear(torch.cat([every[layer][0] for layer in self.taps], dim=-1), self.tensors["fc.weight"])[:-1]
        tokens, drafts = known[1:], []
        for _ in range(count):
            out = self._layer(table[torch.tensor(tokens)], states)
            logits = linear(self._norm(out[-1:], "norm"), self.tensors["lm_head.weight"])[0]
            row = int(logits.argmax())
            drafts.append(row + int(self.tensors["d2t"][row]))
            tokens, states = [*tokens, drafts[-1]], torch.cat((states, out[-1:]))
        return drafts, logits

    def _layer(self, embedded: Tensor, states: Tensor) -> Tensor:
        length, dim = len(states), self.config["head_dim"]
        normed = self._norm(states, "hidden_norm")
        pairs = torch.cat((self._norm(embedded, "input_layernorm"), normed), dim=-1)
        q, k, v = (
            linear(pairs, self.tensors[f"self_attn.{name}_proj.weight"]).view(length, -1, dim).transpose(0, 1)
            for name in "qkv"
        )
        shares = len(q) // len(k)
        q, k, v = self._rotated(q), self._rotated(k).repeat_interleave(shares, 0), v.repeat_interleave(shares, 0)
        scores = q @ k.transpose(1, 2) * dim**-0.5
        scores = scores + torch.full((length, length), -torch.inf).triu(1)
        heads = (softmax(scores, -1) @ v).transpose(0, 1).reshape(length, -1)
        stream = (normed if self.norm_first else states) + linear(heads, self.tensors["self_attn.o_proj.weight"])
        read = self._norm(stream, "post_attention_layernorm")
        gate, up = (linear(read, self.tensors[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return stream + linear(silu(gate) * up, self.tensors["mlp.down_proj.weight"])

    def _rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * self.tensors[f"{name}.weight"]
