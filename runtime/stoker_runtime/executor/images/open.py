"""Brings a vision tower to a device.

Invariants: nothing is larger than the plan says.
Knows nothing of steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_runtime.config import EngineConfig
from stoker_runtime.executor.images.encoder import ImageEncoder
from stoker_runtime.executor.images.plan import ImagePlan
from stoker_runtime.executor.images.show import ImageSteps
from stoker_runtime.executor.resolve import sampled_rows
from stoker_runtime.models.config_source import ModelSource
from stoker_runtime.models.vision.tower import Tower
from stoker_runtime.weights.vision.load import load_vision


def open_images(
    plan: ImagePlan, config: EngineConfig, source: ModelSource, device: torch.device, dtype: torch.dtype
) -> ImageSteps:
    """What an executor shows images with. Raises ModelError for a tower that cannot be read."""
    encoder = None
    if plan.embeds:
        weights = read_tower(plan, config, source, device, dtype)
        rule = plan.rule
        tower = Tower(plan.spec, weights, rescale=rule.rescale, mean=rule.mean, std=rule.std)
        encoder = ImageEncoder(tower, device, room=plan.room, pixels_at_once=plan.pixels_at_once)
    tokens = max(config.max_num_batched_tokens, sampled_rows(config))
    side = plan.spec.block_pixels
    return ImageSteps(encoder, config.max_num_seqs, tokens, device, plan.axes, side, whole=plan.whole)


def read_tower(
    plan: ImagePlan, config: EngineConfig, source: ModelSource, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tower's weights. Raises ModelError for files that lack them."""
    return load_vision(source, plan.spec, device, dtype, seed=config.seed)
