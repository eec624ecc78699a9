"""Where images stand in a prompt: from the one marker that a template writes to the ids of all their tokens.

Invariants: there are as many places as images, in the same order; a prompt whose own text holds a marker is refused
beside images, because nothing would tell it from theirs.
Knows nothing of pixels, nor of how a text is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stoker_runtime.errors import ModelError, RequestError
from stoker_runtime.images.rule import ImageKind, ImageRule
from stoker_runtime.request import Ids, Image


@dataclass(frozen=True, slots=True)
class Placeholders:
    """The words for an image: the template's `marker`, what is `written` in its stead, and the `id` that repeats."""

    marker: str
    written: str
    id: int

    def write(self, text: str, images: int) -> str:
        """A rendered prompt as it is to be encoded, one placeholder an image. Raises RequestError."""
        places = text.count(self.marker)
        if places != images:
            raise self._mismatch(places, images)
        return text if self.marker == self.written else text.replace(self.marker, self.written)

    def expand(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[Ids, tuple[Image, ...]]:
        """The ids with each placeholder as often as its image has tokens, and the images where they stand.

        Raises RequestError.
        """
        found: list[int] = []
        placed: list[Image] = []
        begin = 0
        places = [at for at, token in enumerate(ids) if token == self.id]
        if len(places) != len(images):
            raise self._mismatch(len(places), len(images))
        for at, image in zip(places, images, strict=True):
            found += ids[begin:at]
            placed.append(replace(image, at=len(found)))
            found += [self.id] * image.tokens
            begin = at + 1
        found += ids[begin:]
        return tuple(found), tuple(placed)

    def _mismatch(self, places: int, images: int) -> RequestError:
        return RequestError(
            f"The prompt has {places} places for the {images} images of these messages: the chat template takes none "
            f"in one of them, or a text holds {self.marker!r}.",
            param="messages",
        )


def placeholders(rule: ImageRule, spelled: Callable[[int], str | None]) -> Placeholders:
    """How a model writes an image; `spelled` tells an id's token. Raises ModelError for one that has none."""

    def token(name: str, at: int) -> str:
        if not (found := spelled(at)):
            raise ModelError(f"The tokenizer has no token {at}, which is the configuration's {name}.")
        return found

    marker, placeholder = token("marker of an image", rule.marker), token("image token", rule.placeholder)
    if rule.kind is ImageKind.QWEN or rule.end is None:
        return Placeholders(marker, placeholder, rule.placeholder)
    return Placeholders(marker, f"\n\n{marker}{placeholder}{token('end of an image', rule.end)}\n\n", rule.placeholder)
