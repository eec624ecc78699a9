"""How settings of media are spelled: numbers of images, and hosts to fetch them from.

Invariants: what vLLM would take is taken, other media included, which no model here reads.
Knows nothing of images.
"""

from __future__ import annotations

import json
import re

from stoker_runtime.settings.values import BadValue
from stoker_runtime.settings.vllm_values import COUNT, either, json_object, listed, matching, of_each

MODALITIES = ("image", "video", "audio", "vision_chunk")
_LIMIT = rf"({'|'.join(MODALITIES)})=[0-9]+"
LIMITS = either(
    matching(f"{_LIMIT}(,{_LIMIT})*", f"MODALITY=N, separated by commas, of {listed(MODALITIES)}"),
    json_object(dict.fromkeys(MODALITIES, of_each(COUNT, ("count", "width", "height", "num_frames", "length")))),
)


def image_limit(value: str) -> int | None:
    """The most images of a prompt; None where it is not said."""
    if wrong := LIMITS.wrong(value):
        raise BadValue(wrong)
    if not value.lstrip().startswith("{"):
        counts = dict(each.split("=") for each in value.split(","))
        return int(counts["image"]) if "image" in counts else None
    found = json.loads(value).get("image")
    count: int | None = found.get("count") if isinstance(found, dict) else found
    return count


def host(value: str) -> str:
    """The name of a host."""
    if not re.fullmatch(r"[A-Za-z0-9.-]+", value):
        raise BadValue("a name of a host, without scheme and port")
    return value
