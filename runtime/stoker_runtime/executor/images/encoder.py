"""Runs the tower, and keeps the states of images that were shown lately, by what they look like.

An image that many prompts show is encoded once while it is kept; one that two chunks of a prompt share, too.

Invariants: what is kept never takes more than its room, but for the images of the step that is under way.
Knows nothing of sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker_runtime.executor.arena import sent
from stoker_runtime.models.vision.tower import Tower
from stoker_runtime.request import Image


@dataclass(frozen=True, slots=True)
class ImageStates:
    """Of one image: `states [tokens, H]` that its tokens enter with, and what is added behind the first layers."""

    states: Tensor
    deeper: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(each.nbytes for each in (self.states, *self.deeper))


class ImageEncoder:
    """The images of one device."""

    def __init__(self, tower: Tower, device: torch.device, *, room: int, pixels_at_once: int) -> None:
        """`room`: bytes of states that are kept; the tower sees so many pixels at once, or one image."""
        self.tower = tower
        self._device = device
        self._room, self._pixels_at_once = room, pixels_at_once
        self._kept: OrderedDict[bytes, ImageStates] = OrderedDict()

    def states(self, images: Sequence[Image]) -> dict[bytes, ImageStates]:
        """The states of `images` by their digests."""
        wanted = {image.digest: image for image in images}
        self._encode([image for digest, image in wanted.items() if digest not in self._kept])
        for digest in wanted:
            self._kept.move_to_end(digest)
        found = {digest: self._kept[digest] for digest in wanted}
        taken = sum(each.nbytes for each in self._kept.values())
        while taken > self._room:
            _, oldest = self._kept.popitem(last=False)
            taken -= oldest.nbytes
        return found

    def rehearse(self) -> None:
        """Encode blank images, and keep nothing of them."""
        self.tower.rehearse()

    def forget(self) -> None:
        """Keep nothing."""
        self._kept.clear()

    def _encode(self, images: Sequence[Image]) -> None:
        group: list[Image] = []
        for image in images:
            if group and sum(map(_pixels, (*group, image))) > self._pixels_at_once:
                self._encode_group(group)
                group = []
            group.append(image)
        if group:
            self._encode_group(group)

    def _encode_group(self, images: Sequence[Image]) -> None:
        output = self.tower.encode([self._on_device(image) for image in images])
        counts = [image.tokens for image in images]
        parts = [each.split(counts) for each in (output.embeddings, *output.deepstack)]
        for image, (states, *deeper) in zip(images, zip(*parts, strict=True), strict=True):
            # Copies: a view would keep the states of all that were encoded with it.
            alone = len(images) == 1
            own = states if alone else states.clone()
            self._kept[image.digest] = ImageStates(own, tuple(each if alone else each.clone() for each in deeper))

    def _on_device(self, image: Image) -> Tensor:
        rows = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
        return sent(torch.from_numpy(rows.copy()), self._device)


def _pixels(image: Image) -> int:
    return image.height * image.width
