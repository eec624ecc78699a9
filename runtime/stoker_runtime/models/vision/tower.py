"""The one vision tower, for every architecture of the vision towers' table: images in, embeddings for a decoder out.

Invariants: `encode` reads its images and nothing else; images of a call lie end to end and do not see each other, so an
image's embeddings depend on the image alone. Nothing waits for the device.
Knows nothing of requests, of where in a prompt an image stands, or of checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from stoker_kernels.bidirectional import bidirectional_attention
from stoker_kernels.embedding import embed
from stoker_kernels.gemm import linear
from stoker_kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from stoker_kernels.quant import LinearWeight
from stoker_kernels.rope import qk_norm_rope_kv_write
from stoker_runtime.models.encoders.encoder import ACTIVATIONS, GATED
from stoker_runtime.models.layer_specs.rope_spec import RopeSpec
from stoker_runtime.models.rope import inverse_frequencies
from stoker_runtime.models.vision.layout import Grid, Layout, lay_out, stretch
from stoker_runtime.models.vision.patches import PixelScale, cut_patches
from stoker_runtime.models.vision.spec import NormKind, Projector, VisionSpec


@dataclass(frozen=True, slots=True)
class VisionOutput:
    """`embeddings [tokens, H]` of all images end to end, `H` the text model's; `deepstack`: for each of the text
    model's first layers what is added to the states behind it at the same tokens, of the same shape.
    """

    embeddings: Tensor
    deepstack: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Sight:
    """Which patches see each other, and how they rotate: `images`, `windows` are starts as attention reads them."""

    images: Tensor
    windows: Tensor | None
    turns: Tensor | None
    places: Tensor
    slots: Tensor


class Tower:
    """A vision tower on one device. `weights` holds every tensor of `spec.tensors`, by name.

    `rescale`, `mean`, `std`: pixels are read as (pixel · rescale − mean) / std, as the model's image processor says.
    """

    def __init__(
        self,
        spec: VisionSpec,
        weights: dict[str, Tensor],
        *,
        rescale: float,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        self.spec = spec
        self.weights = weights
        self._device = weights["patch"].device
        self._dtype = weights["patch"].dtype
        self._scale = PixelScale(rescale, mean, std, self._device)
        rope = RopeSpec(dim=spec.head_dim // 2, theta=spec.rope_theta or 1.0)
        self._frequencies = inverse_frequencies(rope, 1).to(self._device) if spec.rope_theta else None

    def renew(self, weights: dict[str, Tensor]) -> None:
        """See with other weights of the same shapes from now on; with none until then nothing is encoded."""
        self.weights = weights

    @torch.inference_mode()
    def encode(self, images: Sequence[Tensor]) -> VisionOutput:
        """The embeddings of images, each uint8 `[height, width, 3]` on this device in a size that the model takes.

        Embeddings are what the decoder's first layer reads, and are multiplied by nothing. Raises ValueError for images
        of other sizes or types, or none.
        """
        if not images:
            raise ValueError("there are no images to encode")
        for image in images:
            if image.dtype is not torch.uint8 or image.dim() != 3 or image.shape[2] != 3:
                raise ValueError(f"an image is {image.dtype} {tuple(image.shape)}, and not uint8 [height, width, 3]")
        spec = self.spec
        grids = [spec.grid_of(image.shape[0], image.shape[1]) for image in images]
        layout = lay_out(grids, spec.merge_size, spec.window)
        stream = self._linear(cut_patches(images, grids, spec, self._scale, self._dtype), "patch")
        if layout.order is not None:
            stream = stream.unflatten(0, (-1, spec.block))[self._upload(layout.order)].flatten(0, 1)
        normed, deepstack = self._layers(stream, self._positions(grids, layout), self._sight(layout))
        embeddings = self._project(normed)
        if layout.returning is not None:
            back = self._upload(layout.returning)
            embeddings, deepstack = embeddings[back], [each[back] for each in deepstack]
        return VisionOutput(embeddings, tuple(deepstack))

    def rehearse(self) -> None:
        """Encode images of all sizes that kernels are chosen by, in a rehearsal (`stoker_kernels.launch.rehearsal`)."""
        spec = self.spec
        # Of more than 128 patches the rotation's blocks are larger.
        many = spec.block_pixels * (12 // spec.merge_size + 1)
        for side in (spec.image_size,) if spec.image_size else (spec.block_pixels, many):
            self.encode([torch.zeros((side, side, 3), dtype=torch.uint8, device=self._device)])

    def _layers(self, stream: Tensor, positions: Tensor | None, sight: _Sight) -> tuple[Tensor, list[Tensor]]:
        """(what the projector reads, what becomes of inner states) of embedded patches and their learned positions."""
        spec = self.spec
        deepstack: dict[int, Tensor] = {}
        first = "layers.0.attention_norm"
        normed = self._norm(stream, first) if positions is None else self._add(positions, stream, first)
        del positions  # whose memory what is normed has
        for layer in range(spec.num_layers):
            name = f"layers.{layer}"
            update = self._linear(self._attend(normed, sight, layer).flatten(1), f"{name}.output")
            normed = self._add(update, stream, f"{name}.ffn_norm")
            update = self._linear(self._activate(self._linear(normed, f"{name}.up")), f"{name}.down")
            last = layer + 1 == spec.num_layers
            normed = self._add(update, stream, "final_norm" if last else f"layers.{layer + 1}.attention_norm")
            if layer in spec.deepstack_layers:
                at = spec.deepstack_layers.index(layer)
                blocks = self._norm(stream.view(-1, spec.hidden * spec.block), f"deepstack.{at}.norm")
                deepstack[layer] = self._merge(blocks, f"deepstack.{at}")
        return normed, list(deepstack.values())

    def _attend(self, normed: Tensor, sight: _Sight, layer: int) -> Tensor:
        """What each patch's heads see: `[T, H]` → `[T, heads, D]`."""
        spec = self.spec
        heads, dim = spec.heads, spec.head_dim
        qkv = self._linear(normed, f"layers.{layer}.qkv")
        if sight.turns is None:
            q, k, v = (part.unflatten(1, (heads, dim)) for part in qkv.split(spec.hidden, dim=1))
        else:
            # Pages of one patch: keys and values lie as attention without a cache reads them.
            keys, values = torch.empty((2, len(qkv), heads, 1, dim), dtype=qkv.dtype, device=qkv.device)
            q = qk_norm_rope_kv_write(
                qkv, sight.places, sight.slots, sight.turns, keys, values,
                num_q_heads=heads, num_kv_heads=heads, head_dim=dim,
            )  # fmt: skip
            k, v = keys[:, :, 0], values[:, :, 0]
        starts = sight.windows if sight.windows is not None and spec.windowed(layer) else sight.images
        return bidirectional_attention(q, k, v, starts, scale=dim**-0.5)

    def _project(self, normed: Tensor) -> Tensor:
        """Embeddings `[tokens, text_hidden]` of the last layer's normed states, block by block."""
        spec = self.spec
        if spec.projector is Projector.MERGER:
            return self._merge(normed.view(-1, spec.hidden * spec.block), "merger")
        pooled = normed.unflatten(0, (-1, spec.block)).mean(1, dtype=torch.float32).to(normed.dtype)
        return self._linear(rms_norm(pooled, self.weights["pooled_norm"], spec.eps, out=pooled), "projection")

    def _merge(self, blocks: Tensor, name: str) -> Tensor:
        wide = self._linear(blocks, f"{name}.up")
        return self._linear(ACTIVATIONS["gelu"](wide, out=wide), f"{name}.down")

    def _positions(self, grids: Sequence[Grid], layout: Layout) -> Tensor | None:
        """Learned positions of all patches: `[T, H]`; None where there are none."""
        spec = self.spec
        if not spec.position_side:
            return None
        table = self.weights["position"]
        if not spec.interpolated:
            ids = layout.places[:, 0] * spec.position_side + layout.places[:, 1]
            return embed(self._upload(ids), table)
        corners = stretch(grids, spec.merge_size, spec.position_side)
        weights = self._upload(corners.weights)
        found = functional.embedding_bag(self._upload(corners.ids), table, mode="sum", per_sample_weights=weights)
        return found.to(self._dtype)

    def _sight(self, layout: Layout) -> _Sight:
        patches = len(layout.places)
        turns = None
        if self._frequencies is not None:
            angles = (self._upload(layout.places)[:, :, None].float() * self._frequencies).flatten(1)
            turns = torch.cat((angles.cos(), angles.sin()), dim=1)
        windows = None if layout.windows is None else self._upload(layout.windows)
        places = torch.arange(patches, dtype=torch.int32, device=self._device)
        return _Sight(self._upload(layout.starts), windows, turns, places, places.long())

    def _activate(self, wide: Tensor) -> Tensor:
        if self.spec.gated:
            return GATED[self.spec.activation](wide)
        return ACTIVATIONS[self.spec.activation](wide, out=wide)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name]
        return linear(x, LinearWeight(weight), bias=self.weights.get(f"{name}_bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, eps = self.weights[name], self.spec.eps
        if self.spec.norm is NormKind.RMS:
            return rms_norm(x, weight, eps)
        return layer_norm(x, weight, self.weights[f"{name}_bias"], eps)

    def _add(self, update: Tensor, stream: Tensor, name: str) -> Tensor:
        """Add `update` to the stream in place; → its norm, in the place of `update`."""
        weight, eps = self.weights[name], self.spec.eps
        if self.spec.norm is NormKind.RMS:
            return add_rms_norm(update, stream, weight, eps, out=update)
        return add_layer_norm(update, stream, weight, self.weights[f"{name}_bias"], eps, out=update)

    def _upload(self, values: NDArray[Any]) -> Tensor:
        """Upload without waiting: through pinned memory, which torch keeps until the copy is done."""
        tensor = torch.from_numpy(values)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
