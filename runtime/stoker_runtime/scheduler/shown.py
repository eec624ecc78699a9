"""Images within a sequence: which of them a chunk meets, where it may end, and how far positions lag behind tokens.

An image takes as many tokens as it has patches, but with rotation by rows and columns only as many positions as its
longer side; what stands behind it moves up.

Invariants: pure; images stand in the order of their tokens and do not overlap.
Knows nothing of pixels.
"""

from __future__ import annotations

from stoker_runtime.errors import RequestError
from stoker_runtime.request import Ids, Image, Request
from stoker_runtime.scheduler.limits import SchedulerConfig
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.step.batch import PrefillChunk


def met(images: tuple[Image, ...], start: int, stop: int) -> tuple[Image, ...]:
    """The images that have tokens in `[start, stop)`."""
    return tuple(each for each in images if each.at < stop and start < each.end)


def shift_before(images: tuple[Image, ...], at: int) -> int:
    """What is added to a text token's place `at` to get the position that it is rotated by; never above 0."""
    return sum(each.span - each.tokens for each in images if each.end <= at)


def whole_stop(images: tuple[Image, ...], start: int, stop: int) -> int:
    """Where a chunk `[start, stop)` ends that may not cut an image: before the one that `stop` lies in."""
    cut = next((each.at for each in images if each.at < stop < each.end), stop)
    return max(cut, start)


def shown_chunk(sequence: Sequence, stop: int, *, sample: bool, targets: Ids) -> PrefillChunk:
    """The chunk of what a sequence computes next, up to `stop`."""
    images, start = sequence.request.images, sequence.computed
    ids = tuple(sequence.tokens[start:stop])
    shown, shift = met(images, start, stop), shift_before(images, start)
    return PrefillChunk(sequence.slot, start, ids, sample, targets, shown, shift)


def refuse_images(request: Request, config: SchedulerConfig) -> None:
    """Raise RequestError for images that no step can show."""
    if not request.images:
        return
    if not config.sees:
        raise RequestError("This model reads text only; leave images out.", param="images")
    end, tokens, longest = 0, len(request.prompt_token_ids), config.longest_image
    for image in request.images:
        if not (end <= image.at and 0 < image.span <= image.tokens and image.end <= tokens):
            raise RequestError("images must stand one behind the other within the prompt.", param="images")
        if len(image.pixels) != image.height * image.width * 3 or not image.pixels:
            raise RequestError("An image has not as many pixels as its size says.", param="images")
        if longest and image.tokens > longest:
            raise RequestError(
                f"An image of {image.tokens} tokens does not fit into a step, where {longest} are left of "
                "--max-num-batched-tokens; raise it.",
                param="images",
            )
        end = image.end
