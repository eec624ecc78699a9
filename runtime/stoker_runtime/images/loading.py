"""The images of one request, from what it says of them to pixels, beside the event loop.

Invariants: the order is the request's; no image is unpacked once those before it fill the model's context; at most
`WORKERS` images are unpacked at a time, whatever the number of requests.
Knows nothing of messages and prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from stoker_runtime.errors import RequestError
from stoker_runtime.images.placeholders import Placeholders
from stoker_runtime.images.rule import ImageRule
from stoker_runtime.images.source import ImageSource, read_data_url
from stoker_runtime.request import Image

WORKERS = 2
"""Pillow lets go of the interpreter while it decodes; an image of the most pixels takes 700 MB meanwhile."""
_POOL = ThreadPoolExecutor(WORKERS, thread_name_prefix="images")


class ImageLoader:
    """Loads images for one model. `limit` is the most of one prompt, None for any number."""

    def __init__(
        self, rule: ImageRule, placeholders: Placeholders, domains: tuple[str, ...] = (), limit: int | None = None
    ) -> None:
        self.rule = rule
        self.placeholders = placeholders
        self.limit = limit
        # Pillow and an HTTP client, which a server of texts never loads.
        from stoker_runtime.images.decoding import Opened
        from stoker_runtime.images.fetching import Budget, Fetcher

        self._open = Opened
        self._budget = Budget
        self._fetcher = Fetcher(domains)

    def check(self, sources: Sequence[ImageSource]) -> None:
        """Raise RequestError for more images than the server takes."""
        if self.limit is not None and len(sources) > self.limit:
            raise RequestError(
                f"There are {len(sources)} images; this server takes at most {self.limit} in one prompt "
                "(--limit-mm-per-prompt).",
                param=sources[self.limit].field,
            )

    async def load(self, sources: Sequence[ImageSource], room: int) -> list[Image]:
        """The images of a prompt that may have `room` tokens; their `at` is still open. Raises RequestError."""
        self.check(sources)
        # All files first, so that slow hosts are waited for together.
        budget = self._budget()
        fetching = {
            at: asyncio.ensure_future(self._fetcher.fetch(source, budget))
            for at, source in enumerate(sources)
            if not source.is_data
        }
        try:
            fetched = dict(zip(fetching, await asyncio.gather(*fetching.values()), strict=True))
        finally:
            for task in fetching.values():
                task.cancel()
        loaded: list[Image] = []
        for at, source in enumerate(sources):
            loaded.append(await self._unpacked(source, fetched.get(at), room))
            room -= loaded[-1].tokens
        return loaded

    async def _unpacked(self, source: ImageSource, data: bytes | None, room: int) -> Image:
        def unpack() -> Image:
            opened = self._open(read_data_url(source) if data is None else data, self.rule, source.field)
            if opened.tokens > room:
                raise RequestError(
                    f"{source.field}: the image takes {opened.tokens} tokens, and the prompt has room for "
                    f"{max(room, 0)} more. Send a smaller image, or fewer.",
                    param=source.field,
                    code="context_length_exceeded",
                )
            return opened.decode()

        return await asyncio.get_running_loop().run_in_executor(_POOL, unpack)
