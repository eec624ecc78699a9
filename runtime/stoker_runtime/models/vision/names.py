"""What checkpoints of each family of vision towers call their tensors.

Invariants: plain data; names are those of the first published files, into which `renamed` turns those of later ones; a
final tensor's modules stand in the order of its rows, of a gated feed-forward the gate first.
Knows nothing of configurations and of shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class VisionNames:
    """`renamed`: beginnings of names, and what stands for the first of them that fits. `own`: beginnings of what is a
    tower's, once renamed, of which `ignored` says what has no part in its result.

    `top`: what there is once, by its final name; `layer`: what each layer has, behind `layers` and its number;
    `merger` likewise of each merger of inner states (DeepStack), behind `mergers`. `bare` are tensors by themselves,
    where others are modules with a weight.
    """

    renamed: tuple[tuple[str, str], ...]
    own: tuple[str, ...]
    top: Mapping[str, str]
    layers: str
    layer: Mapping[str, tuple[str, ...]]
    mergers: str = ""
    merger: Mapping[str, str] = field(default_factory=dict)
    bare: frozenset[str] = frozenset()
    ignored: str = r".*\brotary_pos_emb\.inv_freq"

    def canonical(self, name: str) -> str:
        """A checkpoint's name of a tensor as the first published files have it."""
        for beginning, first in self.renamed:
            if name.startswith(beginning):
                return first + name.removeprefix(beginning)
        return name


_QWEN_RENAMED = (("model.visual.", "visual."),)
QWEN2_5 = VisionNames(
    renamed=_QWEN_RENAMED,
    own=("visual.",),
    top={
        "patch": "visual.patch_embed.proj",
        "final_norm": "visual.merger.ln_q",
        "merger.up": "visual.merger.mlp.0",
        "merger.down": "visual.merger.mlp.2",
    },
    layers="visual.blocks.",
    layer={
        "attention_norm": ("norm1",),
        "qkv": ("attn.qkv",),
        "output": ("attn.proj",),
        "ffn_norm": ("norm2",),
        "up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    },
)
QWEN3 = VisionNames(
    renamed=_QWEN_RENAMED,
    own=("visual.",),
    top={
        "patch": "visual.patch_embed.proj",
        "position": "visual.pos_embed",
        "final_norm": "visual.merger.norm",
        "merger.up": "visual.merger.linear_fc1",
        "merger.down": "visual.merger.linear_fc2",
    },
    layers="visual.blocks.",
    layer={**QWEN2_5.layer, "up": ("mlp.linear_fc1",), "down": ("mlp.linear_fc2",)},
    mergers="visual.deepstack_merger_list.",
    merger={"norm": "norm", "up": "linear_fc1", "down": "linear_fc2"},
)
_SIGLIP = "vision_tower.vision_model."
GEMMA3 = VisionNames(
    renamed=(
        ("model.vision_tower.vision_model.", _SIGLIP),
        ("model.vision_tower.", _SIGLIP),
        (_SIGLIP, _SIGLIP),
        ("vision_tower.", _SIGLIP),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    own=(_SIGLIP, "multi_modal_projector."),
    top={
        "patch": f"{_SIGLIP}embeddings.patch_embedding",
        "position": f"{_SIGLIP}embeddings.position_embedding",
        "final_norm": f"{_SIGLIP}post_layernorm",
        "pooled_norm": "multi_modal_projector.mm_soft_emb_norm",
        "projection": "multi_modal_projector.mm_input_projection_weight",
    },
    layers=f"{_SIGLIP}encoder.layers.",
    layer={
        "attention_norm": ("layer_norm1",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "output": ("self_attn.out_proj",),
        "ffn_norm": ("layer_norm2",),
        "up": ("mlp.fc1",),
        "down": ("mlp.fc2",),
    },
    bare=frozenset(("projection",)),
    # SigLIP's own head pools a whole image; embeddings for a decoder do without it.
    ignored=r"vision_tower\.vision_model\.(head\..*|embeddings\.position_ids)",
)
