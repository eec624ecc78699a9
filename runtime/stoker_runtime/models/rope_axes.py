"""Which rotated pairs of a head turn by a token's place in time, by its row in an image, and by its column.

Sources: M-RoPE of Qwen2-VL (arXiv 2409.12191), whose sections lie one behind the other, and Qwen3-VL's, where they
take turns until the shorter ones end.

Invariants: pure, torch-free.
Knows nothing of images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker_runtime.errors import ModelError
from stoker_runtime.models.rope_config import merged_parameters

TIME, HEIGHT, WIDTH = 0, 1, 2


def rope_axes(config: Mapping[str, Any], pairs: int) -> tuple[int, ...]:
    """The axis of each of the rotated `pairs` of a text model's configuration; () where all turn by one position."""
    parameters = merged_parameters(config)
    sections = tuple(int(each) for each in parameters.get("mrope_section") or ())
    if not sections:
        return ()
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != pairs:
        raise ModelError(
            f"mrope_section is {list(sections)}; it must be three numbers that together are the {pairs} rotated pairs.",
            param="mrope_section",
        )
    if not parameters.get("mrope_interleaved"):
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    found = [TIME] * pairs
    for axis in (HEIGHT, WIDTH):
        found[axis : 3 * sections[axis] : 3] = [axis] * len(found[axis : 3 * sections[axis] : 3])
    return tuple(found)
