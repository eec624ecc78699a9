"""What a model that sees takes of a device beside its text model, and how large its images get there.

Invariants: pure; every size is known before the tower is loaded.
Knows nothing of pixels, and of who sends them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import GIB
from stoker_runtime.images.rule import ImageRule, read_rule
from stoker_runtime.models.architectures.llama import text_of
from stoker_runtime.models.config_source import ModelSource
from stoker_runtime.models.parameter import ITEM_BYTES
from stoker_runtime.models.rope_axes import rope_axes
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.models.vision.spec import Projector, VisionSpec
from stoker_runtime.models.vision.table import read_vision

log = logging.getLogger(__name__)

# Steps whose images are kept: of the one under way, and as many before it.
KEPT_STEPS = 2


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """How a model sees. `axes` and `whole` as of `ImageSteps`; `embeds`: this rank has the tower. `weights`, `working`
    and `room` in bytes: of the tower, of a pass of it over `pixels_at_once` (0: over one image), of states that are
    kept.
    """

    spec: VisionSpec
    rule: ImageRule
    axes: tuple[int, ...]
    whole: bool
    embeds: bool
    weights: int
    working: int
    room: int
    pixels_at_once: int

    @property
    def state(self) -> int:
        """Bytes beside the weights."""
        return self.working + self.room


def plan_images(
    config: EngineConfig, source: ModelSource, spec: ModelSpec, *, embeds: bool = True
) -> ImagePlan | None:
    """How the model of `source` sees, of a resolved `config`; None where it does not. `embeds`: of a rank that embeds
    tokens; others have no tower.

    Raises ModelError for a tower that cannot be used, ConfigError for settings that it does not go with.
    """
    if config.language_model_only:
        return None
    rule, vision = read_rule(source), read_vision(source)
    if rule is None or vision is None:
        return None
    whole = vision.projector is Projector.POOLING
    nearest = min((window for window in spec.windows if window), default=0)
    longest = vision.tokens_of(vision.image_size, vision.image_size) if vision.image_size else 0
    if whole and 0 < nearest < longest:
        raise ModelError(
            f"{source.name}: an image of {longest} tokens is longer than a window of {nearest}.", param="sliding_window"
        )
    if embeds and len(vision.deepstack_layers) >= spec.num_layers:
        raise ConfigError(
            f"{source.name} adds to the first {len(vision.deepstack_layers)} layers what its tower saw: a stage of "
            f"{spec.num_layers} layers is too short; lower --pipeline-parallel-size.",
            param="pipeline_parallel_size",
        )
    item = ITEM_BYTES[config.dtype]
    side = vision.block_pixels
    # No image is larger than the largest that the rule makes, nor than what a prompt has room for.
    pixels = min(rule.most_pixels, config.max_model_len * side * side)
    token = vision.text_hidden * (1 + len(vision.deepstack_layers)) * item
    sizes = (
        vision.parameter_bytes(config.dtype),
        vision.working_bytes(-(-pixels // vision.patch_size**2), config.dtype),
        KEPT_STEPS * config.max_num_batched_tokens * token,
    )
    weights, working, room = sizes if embeds else (0, 0, 0)
    # Bits that depend on nothing else are those of one image at a time.
    at_once = 0 if config.batch_invariant else pixels
    axes = rope_axes(text_of(source.config), spec.rope.dim // 2)
    return ImagePlan(vision, rule, axes, whole, embeds, weights, working, room, at_once)


def log_images(plan: ImagePlan) -> None:
    """Say what seeing takes."""
    log.info(
        "images: a tower of %d layers, %.2f GiB of weights; %.2f GiB for a pass of it and what is kept of images",
        plan.spec.num_layers, plan.weights / GIB, plan.state / GIB,
    )  # fmt: skip
