"""What the API reads a request's tokens from: buffers filled by the receiver, emptied by one consumer.

Invariants: filling never blocks and wakes the consumer at most once per step; a slow consumer finds its tokens
merged into one output per request. Every request's last output has `finish` set, or `next` raises.
Knows nothing of sockets and processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from stoker_runtime.errors import StokerError
from stoker_runtime.request import FinishReason, TokenLogprobs, TokenOutput


class Part:
    """The news of one request since its stream was last read."""

    __slots__ = (
        "cached_tokens",
        "complete",
        "error",
        "finish",
        "logprobs",
        "prompt_logprobs",
        "queue_seconds",
        "request_id",
        "stop_token",
        "stream",
        "tokens",
        "vector",
    )

    def __init__(self, stream: TokenStream, request_id: str) -> None:
        self.stream = stream
        self.request_id = request_id
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.cached_tokens = 0
        self.queue_seconds: float | None = None
        self.finish: FinishReason | None = None
        self.stop_token: int | None = None
        self.error: str | None = None
        self.complete = False
        self.vector: bytes | None = None

    def take(self) -> TokenOutput:
        """The news as one output; the buffer is empty then."""
        output = TokenOutput(self.request_id, tuple(self.tokens), cached_tokens=self.cached_tokens)
        self.tokens.clear()
        # What few outputs have costs the others nothing but this.
        if self.logprobs or self.prompt_logprobs:
            output.logprobs, output.prompt_logprobs = tuple(self.logprobs), tuple(self.prompt_logprobs)
            self.logprobs.clear()
            self.prompt_logprobs.clear()
        if self.queue_seconds is not None:
            output.queue_seconds, self.queue_seconds = self.queue_seconds, None
        if self.finish is not None:
            output.finish, output.stop_token = self.finish, self.stop_token
            output.error, output.complete, output.vector = self.error, self.complete, self.vector
        return output


class TokenStream:
    """The outputs of requests that were submitted together. One consumer."""

    def __init__(self) -> None:
        self._news: dict[Part, None] = {}
        self._error: StokerError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Sequence[TokenOutput]:
        """Wait until there is news, then return all of it: at most one output per request, at least one in all.

        Must not be called after every request has finished. Raises EngineDeadError when the engine died or hangs,
        and what the engine refused a request for; what came before is returned first.
        """
        while not self._news:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        outputs = [part.take() for part in self._news]
        self._news.clear()
        return outputs

    def notify(self, part: Part) -> None:
        """A part has news."""
        self._news[part] = None
        self._wake()

    def fail(self, error: StokerError) -> None:
        """No more news will come."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
