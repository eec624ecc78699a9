"""What a step adds for models that see: the states of its images, and positions that are no tokens' places.

Invariants: a step without images uploads nothing, unless a sequence's shift changed. Where nothing rotates by rows and
columns, positions are tokens' places and there is nothing to say of them.
Knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stoker_kernels.image_attention import ImageSpans
from stoker_runtime.executor.arena import sent, upload
from stoker_runtime.executor.images.encoder import ImageEncoder
from stoker_runtime.executor.images.places import chunk_positions, rows_of, shift_behind
from stoker_runtime.executor.state import Staging
from stoker_runtime.models.inputs import Rotation, ShownImages
from stoker_runtime.step.batch import Batch, PrefillChunk


class ImageSteps:
    """Of one executor. `encoder`: None on a rank that embeds no tokens. `axes`: of each rotated pair whether it turns
    by time (0), height (1) or width (2); () where tokens rotate by their places. `unit`: pixels that a token of an
    image covers each way; `whole`: the tokens of an image see each other, so that none is cut.
    """

    def __init__(
        self,
        encoder: ImageEncoder | None,
        slots: int,
        tokens: int,
        device: torch.device,
        axes: Sequence[int],
        unit: int,
        *,
        whole: bool,
    ) -> None:
        """For steps of so many `slots` and `tokens` at most."""
        self.encoder, self.whole = encoder, whole
        self._device, self._unit = device, unit
        self._axes = torch.tensor([*axes, *axes], device=device) if axes else None
        # Behind a place for padding, whose slot is −1.
        self._shifts = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self._known = np.zeros(slots + 1, dtype=np.int32)
        self._staging = Staging(slots + 1, device)
        # At rest, so that graphs and tapes find them.
        self._positions = torch.zeros(tokens, dtype=torch.int32, device=device)

    def rehearse(self) -> None:
        """See one blank image, so that nothing is compiled or loaded for the first one of a prompt."""
        if self.encoder is not None:
            self.encoder.rehearse()

    def forget(self) -> None:
        """Keep nothing of images."""
        if self.encoder is not None:
            self.encoder.forget()

    def follow(self, chunks: Sequence[PrefillChunk]) -> None:
        """Have the shifts of slots that run chunks: of one without images its own, else that of what comes behind."""
        if self._axes is None:
            return
        changed = False
        for chunk in chunks:
            shift = shift_behind(chunk)
            changed |= bool(self._known[chunk.slot + 1] != shift)
            self._known[chunk.slot + 1] = shift
        if changed:
            self._staging.upload(self._known, self._shifts)

    def rotation(self, slots: Tensor, positions: Tensor) -> Rotation | None:
        """Of tokens without images, in these `slots [T]` at these `positions [T]`."""
        if self._axes is None:
            return None
        shifts = self._shifts.index_select(0, slots + 1)
        return Rotation(torch.add(positions, shifts, out=self._positions[: len(positions)]), None)

    def rotation_of_rows(self, row_slots: Tensor, query_start: Tensor, positions: Tensor) -> Rotation | None:
        """The same of rows of many tokens, which `query_start [rows + 1]` parts."""
        if self._axes is None:
            return None
        tokens = torch.arange(len(positions), dtype=torch.int32, device=self._device)
        rows = torch.searchsorted(query_start[1:], tokens, right=True).clamp_(max=len(row_slots) - 1)
        return self.rotation(row_slots.index_select(0, rows), positions)

    def rotation_among_images(self, batch: Batch, rotation: Rotation | None, table: Tensor) -> Rotation | None:
        """`rotation` of a step's tokens, with the positions of images in it; `table` is the decoder's."""
        if rotation is None or self._axes is None:
            return None
        placed = rotation.positions.expand(3, -1).contiguous()
        at = len(batch.decodes)
        for chunk in batch.prefills:
            if chunk.images:
                own = sent(torch.from_numpy(chunk_positions(chunk, self._unit)), self._device)
                placed[:, at : at + own.shape[1]] = own
            at += len(chunk.token_ids)
        turned = table.index_select(0, placed.flatten()).view(3, -1, table.shape[1])
        own_table = turned.gather(0, self._axes.expand(1, turned.shape[1], -1))[0]
        return Rotation(torch.arange(placed.shape[1], dtype=torch.int32, device=self._device), own_table)

    def spans(self, batch: Batch) -> ImageSpans | None:
        """Where the images of a step lie, if their tokens see each other."""
        if not self.whole:
            return None
        found: list[tuple[int, int, int, int, int]] = []
        at = len(batch.decodes)
        for chunk in batch.prefills:
            for image in chunk.images:
                rows, _ = rows_of(chunk, image, at)
                found.append((chunk.slot, rows.start, len(rows), image.at, image.end))
            at += len(chunk.token_ids)
        slots, rows_at, counts, begins, ends = upload(list(zip(*found, strict=True)), self._device)
        return ImageSpans(slots, rows_at, counts, begins, ends, most_rows=max(each[2] for each in found))

    def shown(self, batch: Batch) -> ShownImages | None:
        """The states of the images in a step; None without any, and where no tokens are embedded."""
        images = [image for chunk in batch.prefills for image in chunk.images]
        if not images or self.encoder is None:
            return None
        known = self.encoder.states(images)
        rows: list[int] = []
        parts: list[tuple[Tensor, ...]] = []
        at = len(batch.decodes)
        for chunk in batch.prefills:
            for image in chunk.images:
                places, tokens = rows_of(chunk, image, at)
                rows.extend(places)
                found = known[image.digest]
                span = slice(tokens.start, tokens.stop)
                parts.append(tuple(each[span] for each in (found.states, *found.deeper)))
            at += len(chunk.token_ids)
        states, *deeper = (torch.cat(each) for each in zip(*parts, strict=True))
        return ShownImages(upload(rows, self._device, torch.int64), states, tuple(deeper))
