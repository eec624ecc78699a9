"""The description of a vision tower: sizes, and the parameters that follow from them with their names.

Invariants: frozen plain data without torch; `tensors()` is the one list of final tensors, which allocation, loading
and byte counts all walk. Rows of what reads a patch's values or a feed-forward's inner ones are padded with zeros to
whole 64 values.
Knows nothing of devices, of what pixels mean, or of where in a prompt an image stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import NamedTuple

from stoker_runtime.models.parameter import ITEM_BYTES, Parameter, Role, stored_bytes
from stoker_runtime.models.vision.names import VisionNames

CHANNELS = 3
# Where a patch lies, what sees it and where its key goes; and what allocations are rounded up by.
PLACE_BYTES, SPARE_BYTES = 32, 256 * 1024
# What kernels of matrices want rows to be multiples of: those with bits that depend on nothing else 128 bytes.
ROW = 64


class NormKind(StrEnum):
    """What norms stand before attention, before the feed-forward and behind the last layer."""

    LAYER = "layer_norm"
    RMS = "rms_norm"


class Projector(StrEnum):
    """How the states of `merge_size`² patches become one embedding: side by side through two linears, or their mean,
    normed, through one.
    """

    MERGER = "merger"
    POOLING = "pooling"


class Piece(NamedTuple):
    """A checkpoint's tensor of `shape` that becomes the rows from `row` on, `transposed` its columns.

    A kernel of a convolution is a matrix: its first dimension the rows, all others the columns.
    """

    tensor: str
    shape: tuple[int, ...]
    row: int = 0
    transposed: bool = False

    @property
    def rows(self) -> int:
        """Rows that it fills."""
        return self.shape[-1] if self.transposed else self.shape[0]

    @property
    def columns(self) -> int:
        """Columns that it fills, 1 of a vector."""
        return prod(self.shape) // self.rows


class VisionTensor(NamedTuple):
    """A final tensor, the pieces of it in a checkpoint, and what is added to what these hold. The rest is zeros."""

    parameter: Parameter
    pieces: tuple[Piece, ...]
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """A transformer over the patches of images (ViT, Dosovitskiy et al. 2020) that ends in a projector.

    `text_hidden`: the width of what that gives, the text model's. `patch_size` pixels are a patch's side, of
    `temporal_patch_size` frames, which are all the one of an image. Patches go in blocks of `merge_size`², each of
    which becomes a token. `image_size`: all images have that many pixels a side; 0: any multiples of a block's.
    `position_side`: patches on a side of the grid of learned positions, 0: none; with `interpolated` that grid is
    stretched to an image's (bilinear), else an image has its size. `rope_theta`: half a head rotates by a patch's row
    and half by its column; 0: none does. `window_size`: pixels on a side of the squares within which layers see, those
    of `full_attention_layers` apart, which see the whole image; 0: all do. `deepstack_layers`: behind these, a merger
    of their own makes embeddings for the first layers of the text model (DeepStack, Meng et al. 2024).
    """

    architecture: str
    names: VisionNames
    num_layers: int
    hidden: int
    heads: int
    ffn: int
    text_hidden: int
    patch_size: int
    eps: float
    activation: str
    temporal_patch_size: int = 1
    merge_size: int = 1
    image_size: int = 0
    position_side: int = 0
    interpolated: bool = False
    rope_theta: float = 0.0
    window_size: int = 0
    full_attention_layers: frozenset[int] = frozenset()
    deepstack_layers: tuple[int, ...] = ()
    norm: NormKind = NormKind.LAYER
    gated: bool = False
    patch_bias: bool = True
    projector: Projector = Projector.MERGER

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def block(self) -> int:
        """Patches that become one token."""
        return self.merge_size**2

    @property
    def block_pixels(self) -> int:
        """Pixels on a block's side: an image's height and width are multiples of it."""
        return self.merge_size * self.patch_size

    @property
    def window(self) -> int:
        """Blocks on a window's side; 0: every layer sees the whole image."""
        return self.window_size // self.block_pixels

    @property
    def patch_values(self) -> int:
        """Values of a patch: channels, frames, rows, columns."""
        return CHANNELS * self.temporal_patch_size * self.patch_size**2

    def windowed(self, layer: int) -> bool:
        """Whether a layer sees within windows alone."""
        return self.window > 0 and layer not in self.full_attention_layers

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of patches of an image of that many pixels. Raises ValueError where it is not cut so."""
        if self.image_size and (height, width) != (self.image_size, self.image_size):
            raise ValueError(f"an image of {height}x{width} pixels: all have {self.image_size}x{self.image_size}")
        if min(height, width) < 1 or height % self.block_pixels or width % self.block_pixels:
            raise ValueError(f"an image of {height}x{width} pixels: both must be multiples of {self.block_pixels}")
        return height // self.patch_size, width // self.patch_size

    def token_grid(self, height: int, width: int) -> tuple[int, int]:
        """(rows, columns) of the tokens of an image of that many pixels. Raises ValueError as `grid_of`."""
        rows, columns = self.grid_of(height, width)
        return rows // self.merge_size, columns // self.merge_size

    def tokens_of(self, height: int, width: int) -> int:
        """Tokens of an image of that many pixels. Raises ValueError as `grid_of`."""
        rows, columns = self.token_grid(height, width)
        return rows * columns

    def patches_of(self, height: int, width: int) -> int:
        """Patches of an image of that many pixels, for `working_bytes`. Raises ValueError as `grid_of`."""
        rows, columns = self.grid_of(height, width)
        return rows * columns

    def tensors(self) -> Iterator[VisionTensor]:
        """Every final tensor in the order of use."""
        names, hidden, side = self.names, self.hidden, self.patch_size
        frames = (self.temporal_patch_size,) if self.temporal_patch_size > 1 else ()
        kernel = (hidden, CHANNELS, *frames, side, side)
        yield from self._linear("patch", (names.top["patch"],), kernel, bias=self.patch_bias)
        if self.position_side:
            shape = (self.position_side**2, hidden)
            piece = Piece(f"{names.top['position']}.weight", shape)
            # What is interpolated is summed in fp32.
            exact = "float32" if self.interpolated else ""
            yield VisionTensor(Parameter("position", shape, Role.EMBEDDING, dtype=exact), (piece,))
        for layer in range(self.num_layers):
            yield from self._layer(layer)
        yield from self._norm("final_norm", names.top["final_norm"], hidden)
        if self.projector is Projector.MERGER:
            yield from self._merger("merger", names.top["merger.up"], names.top["merger.down"])
            for at in range(len(self.deepstack_layers)):
                modules = {part: f"{names.mergers}{at}.{module}" for part, module in names.merger.items()}
                yield from self._norm(f"deepstack.{at}.norm", modules["norm"], hidden * self.block)
                yield from self._merger(f"deepstack.{at}", modules["up"], modules["down"])
        else:
            # The published norm is by 1 + weight, which 16 bits would round.
            norm = Parameter("pooled_norm", (hidden,), Role.NORM, dtype="float32")
            yield VisionTensor(norm, (Piece(f"{names.top['pooled_norm']}.weight", (hidden,)),), offset=1.0)
            shape = (self.text_hidden, hidden)
            piece = Piece(names.top["projection"], (hidden, self.text_hidden), transposed=True)
            yield VisionTensor(Parameter("projection", shape, Role.LINEAR), (piece,))

    def _layer(self, layer: int) -> Iterator[VisionTensor]:
        hidden, ffn = self.hidden, self.ffn
        for part, modules in self.names.layer.items():
            name = f"layers.{layer}.{part}"
            full = tuple(f"{self.names.layers}{layer}.{module}" for module in modules)
            if part.endswith("norm"):
                yield from self._norm(name, full[0], hidden)
            elif part == "qkv":
                yield from self._linear(name, full, (3 * hidden // len(full), hidden))
            elif part == "up":
                yield from self._linear(name, full, (ffn, hidden), span=padded(ffn))
            else:
                yield from self._linear(name, full, (hidden, hidden if part == "output" else ffn))

    def _merger(self, name: str, up: str, down: str) -> Iterator[VisionTensor]:
        wide = self.hidden * self.block
        yield from self._linear(f"{name}.up", (up,), (wide, wide), span=padded(wide))
        yield from self._linear(f"{name}.down", (down,), (self.text_hidden, wide))

    def _linear(
        self, name: str, modules: tuple[str, ...], shape: tuple[int, ...], *, span: int = 0, bias: bool = True
    ) -> Iterator[VisionTensor]:
        """A linear whose modules have `shape` each, and begin `span` rows apart."""
        span = span or shape[0]
        # Of what reads patches and the feed-forward's inner states, which are padded alike.
        columns = padded(prod(shape[1:])) if name.endswith(("patch", "down")) else prod(shape[1:])
        rows = span * len(modules)
        weights = tuple(Piece(f"{module}.weight", shape, at * span) for at, module in enumerate(modules))
        yield VisionTensor(Parameter(name, (rows, columns), Role.LINEAR), weights)
        if bias:
            biases = tuple(Piece(f"{module}.bias", shape[:1], at * span) for at, module in enumerate(modules))
            yield VisionTensor(Parameter(f"{name}_bias", (rows,), Role.BIAS), biases)

    def _norm(self, name: str, module: str, width: int) -> Iterator[VisionTensor]:
        yield VisionTensor(Parameter(name, (width,), Role.NORM), (Piece(f"{module}.weight", (width,)),))
        if self.norm is NormKind.LAYER:
            yield VisionTensor(Parameter(f"{name}_bias", (width,), Role.BIAS), (Piece(f"{module}.bias", (width,)),))

    def parameter_bytes(self, dtype: str) -> int:
        """Device bytes of all weights, exactly as allocated."""
        return sum(stored_bytes(each.parameter, dtype, "none") for each in self.tensors())

    def working_bytes(self, patches: int, dtype: str = "bfloat16") -> int:
        """Device bytes, at the most, that encoding so many patches in one call takes, its result included."""
        item, exact = ITEM_BYTES[dtype], ITEM_BYTES["float32"]
        hidden, ffn, values = self.hidden, padded(self.ffn), padded(self.patch_values)
        # Pixels of an image in fp32 as patches are cut of them, then patches and their states.
        cutting = item * values + max(exact * CHANNELS * self.patch_size**2, item * hidden)
        # States, and learned positions, of which those that are interpolated are in fp32 before.
        positions = (2 * item + exact) * hidden if self.interpolated else 2 * item * hidden
        # In all of these the stream, and what is normed of it. The projection, what of it rotates, what was seen;
        attention = item * hidden * (2 + 3 + (3 if self.rope_theta else 0) + 1)
        # inner states, twice where gate and up become one, or what is to be added;
        feed_forward = item * (2 * hidden + (3 * ffn if self.gated else hidden + ffn))
        # what a merger reads, and its inner states.
        merging = 4 * item * hidden
        most = max(cutting, positions, attention, feed_forward, merging)
        rotation = exact * self.head_dim if self.rope_theta else 0
        # Results, and again as they are brought into their order.
        result = 2 * item * self.text_hidden * (1 + len(self.deepstack_layers))
        tokens = -(-patches // self.block)
        return patches * (most + rotation + PLACE_BYTES) + tokens * result + SPARE_BYTES


def padded(width: int) -> int:
    """So many values of a row, up to where the next may begin."""
    return -(-width // ROW) * ROW
