"""The prompt of a conversation with images: its ids, and the images among them.

Invariants: a conversation without images, and every one of a model that does not see, is encoded as it always was; a
prompt with images is never cut.
Knows nothing of templates: it is given the rendered text.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker_runtime.api.answering.chat_message import ChatMessage
from stoker_runtime.api.answering.content import image_sources
from stoker_runtime.api.answering.prompts import encode_prompt
from stoker_runtime.api.answering.state import Service
from stoker_runtime.api.generate.generation import Prompt
from stoker_runtime.api.http.fields import SamplingFields
from stoker_runtime.errors import RequestError
from stoker_runtime.images.source import ImageSource


def sources_of(service: Service, messages: Sequence[ChatMessage], **unread: object) -> list[ImageSource]:
    """The images of a conversation; none for a model that does not see.

    `unread` are fields that say how media are to be read, by name. Raises RequestError for them beside images, and for
    too many images.
    """
    if service.images is None or not (sources := image_sources(messages)):
        return []
    for name, value in unread.items():
        if value:
            raise RequestError(f"{name} is not supported; an image has the size that the model wants.", param=name)
    service.images.check(sources)
    return sources


async def conversation_prompt(
    service: Service, text: str, sources: Sequence[ImageSource], add_special_tokens: bool, body: SamplingFields
) -> Prompt:
    """The prompt of a rendered conversation, its images loaded. Raises RequestError."""
    images = service.images
    if images is None or not sources:
        return Prompt(await encode_prompt(service, text, add_special_tokens, body), text)
    # Nothing is cut here: whether all fits, `fit` says.
    whole = body.model_copy(update={"truncate_prompt_tokens": None})
    written = images.placeholders.write(text, len(sources))
    ids = await encode_prompt(service, written, add_special_tokens, whole)
    loaded = await images.load(sources, service.limits.max_model_len - len(ids))
    expanded, placed = images.placeholders.expand(ids, loaded)
    return Prompt(expanded, text, placed)
