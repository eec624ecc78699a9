"""What `stoker info` says of a model that sees.

Invariants: the arithmetic is the engine's own. Knows nothing of how images are seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_runtime.terminal.words import Line, gib

if TYPE_CHECKING:
    from stoker_runtime.executor.images.plan import ImagePlan


def image_lines(plan: ImagePlan | None) -> list[Line]:
    """What its tower takes of the weights, and a pass of it of the workspace."""
    if plan is None or not plan.embeds:
        return []
    size = f"a tower of {plan.spec.num_layers} layers, {gib(plan.weights)} of the weights"
    largest = plan.rule.most_pixels / 1e6
    return [
        (
            "images",
            f"{size}; {gib(plan.state)} of the workspace for an image of {largest:.1f} megapixels and what is kept "
            "(--language-model-only: neither)",
        )
    ]
