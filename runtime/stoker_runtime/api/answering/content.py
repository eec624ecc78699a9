"""The content of a message: one text, or where it holds images, the parts that templates of models that see iterate.

Invariants: a message without an image is the same text for every model; what is no text and no image is refused by
its type, and so is an image where nothing sees.
Knows nothing of templates and of pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker_runtime.api.answering.chat_message import ChatMessage
from stoker_runtime.errors import RequestError
from stoker_runtime.images.source import ImageSource

TEXTS = ("text", "input_text", "output_text", "refusal")
IMAGES = ("image_url", "input_image")
DETAILS = (None, "auto", "low", "high", "original")
"""What clients may ask for; every image has the size that the model's own files say."""
Content = str | list[dict[str, Any]] | None


def content_text(content: Content, where: str) -> str:
    """A content as one text; parts stand on lines of their own."""
    if not isinstance(content, list):
        return content or ""
    return "\n".join([_text(part, f"{where}[{at}]", "reads text only") for at, part in enumerate(content)])


def has_image(content: Content) -> bool:
    """Whether one of its parts is an image."""
    return isinstance(content, list) and any(part.get("type") in IMAGES for part in content)


def content_parts(content: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """A content with images as published templates iterate it. Raises RequestError."""
    return [
        {"type": "image"}
        if part.get("type") in IMAGES
        else {"type": "text", "text": _text(part, f"{where}[{at}]", "reads texts and images")}
        for at, part in enumerate(content)
    ]


def _text(part: Mapping[str, Any], where: str, reads: str) -> str:
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind is None:
        raise RequestError(f"{where}.type is required.", param=f"{where}.type")
    if kind not in TEXTS:
        raise RequestError(f"{where}.type is {kind!r}; this model {reads}.", param=f"{where}.type")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string.", param=f"{where}.text")
    return text


def image_sources(messages: Sequence[ChatMessage]) -> list[ImageSource]:
    """Where the images of a conversation are, in its order. Raises RequestError."""
    return [
        _source(part, f"messages[{at}].content[{place}]")
        for at, message in enumerate(messages)
        if isinstance(message.content, list)
        for place, part in enumerate(message.content)
        if part.get("type") in IMAGES
    ]


def _source(part: Mapping[str, Any], where: str) -> ImageSource:
    """`image_url` is a URL, or an object that has it as its `url`."""
    field, detail = f"{where}.image_url", part.get("detail")
    url = part.get("image_url")
    if part.get("file_id") is not None:
        raise RequestError(f"{where}.file_id is not supported; send the image as image_url.", param=f"{where}.file_id")
    if isinstance(url, dict):
        field, detail = f"{field}.url", url.get("detail")
        url = url.get("url")
    if not isinstance(url, str) or not url:
        raise RequestError(f"{field} must be a URL.", param=field)
    if detail not in DETAILS:
        raise RequestError(f"{where}.detail is {detail!r:.40}; it must be auto, low or high.", param=f"{where}.detail")
    return ImageSource(url, field)
