"""Which decode steps attend the pages that all their rows begin with once for all rows, and what those keep.

Invariants: a choice depends on the pages of the step's rows and on the model alone, and is made anew for each step;
how many keys are shared is told to the device, so one graph serves any number.
Knows nothing of kernels but when they pay.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from stoker_kernels.attention import PrefixSpace, prefix_pays, prefix_refusal, prefix_space
from stoker_kernels.launch.dispatch import sm_of
from stoker_runtime.config import EngineConfig
from stoker_runtime.executor.prefix.pages import CommonPages
from stoker_runtime.executor.prefix.plan import model_refusal, prefix_sizes
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.step.batch import Batch

Upload = Callable[[npt.NDArray[np.int32], torch.Tensor], None]
"""Copies values to the first elements of a tensor without waiting, as `Staging.upload`."""


class SharedSteps:
    """The steps of one executor. `space` is None where no step shares a prefix, for the reason `refusal`."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        upload: Upload,
    ) -> None:
        """`dtypes` of the model and of its cache; `upload` takes the number of shared keys to the device."""
        self.refusal = model_refusal(config, spec) or prefix_refusal(sm_of(device), *dtypes)
        self.space: PrefixSpace | None = None
        self._upload = upload
        if self.refusal is None:
            sizes = prefix_sizes(config, spec)
            self.space = prefix_space(sizes, device)
            self._pages = CommonPages(config.max_num_seqs, sizes.pages)
            self._keys = 0

    def __str__(self) -> str:
        """Of the log: what attends what rows have in common."""
        if self.refusal is not None:
            return f"each row by itself: {self.refusal}"
        return "once for all rows of a decode step, where it pays"

    def follow(self, batch: Batch) -> None:
        """Take in which pages its sequences have now."""
        if self.space is not None:
            for each in batch.page_updates:
                if each.table == 0:
                    self._pages.update(each.slot, each.start, each.pages)

    def keys(self, batch: Batch) -> int:
        """How many keys the rows of a step that decodes alone share, if it pays to attend them together, else 0.

        The device is told of them.
        """
        if self.space is None or len(batch.decodes) < 2:
            return 0
        sizes = self.space.sizes
        keys = self._pages.common(batch.decodes) * sizes.page_size
        if not prefix_pays(
            len(batch.decodes), keys, num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim, kv_bytes=sizes.kv_bytes
        ):
            return 0
        if keys != self._keys:
            self._upload(np.array([keys], dtype=np.int32), self.space.keys)
            self._keys = keys
        return keys
