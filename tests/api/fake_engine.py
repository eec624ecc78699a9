"""An engine in one process that says what a test tells it to, through the same protocol as the real front.

Invariants: outputs come one token at a time, from a task a request, in the server's own event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from stoker_runtime.errors import CapacityError, EngineDeadError, NotFoundError, RequestError
from stoker_runtime.request import Adapter, EngineStats, FinishReason, Request, TokenLogprobs, TokenOutput

SPOKEN = "The quick brown fox jumps over the lazy dog. "
EOS = 3
UNFAILING = ord("b")
"""A prompt that begins with this token survives `fail_after`."""


def bytes_of(text: str) -> list[int]:
    """The byte tokenizer's ids of `text`."""
    return list(text.encode())


def default_script(request: Request) -> list[int]:
    """The sentence, over and over."""
    return (bytes_of(SPOKEN) * (request.params.max_tokens // len(SPOKEN) + 1))[: request.params.max_tokens]


def entry(token: int, top: int) -> TokenLogprobs:
    """Made-up log-probabilities: the token at -0.5, its neighbours below."""
    return TokenLogprobs(-0.5, 1, tuple(((token + at) % 256, -0.5 - at) for at in range(top)))


class FakeStream:
    """Outputs of one submission."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[TokenOutput] = asyncio.Queue()

    async def next(self) -> Sequence[TokenOutput]:
        found = [await self.queue.get()]
        while not self.queue.empty():
            found.append(self.queue.get_nowait())
        return found


class FakeEngine:
    """Settings are attributes; a test sets them and the fixture resets them."""

    max_model_len = 256
    vocab_size = 512

    def __init__(self) -> None:
        self._streams: dict[str, FakeStream] = {}
        self.reset()

    def reset(self) -> None:
        """Back to an engine that works. What still runs, of a test before, can still be aborted by its server."""
        self.script: Callable[[Request], list[int]] = default_script
        self.entry_of: Callable[[int, int], TokenLogprobs] = entry
        self.delay = 0.0
        self.group = 1
        self.fail_after: int | None = None
        self.full = False
        self.dead = False
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.adapters: dict[str, Adapter] = {}

    async def load_adapter(self, name: str, path: str, *, parent: str = "", replace: bool = False) -> None:
        await asyncio.sleep(0)
        if path.startswith("bad") or (name in self.adapters and not replace):
            raise RequestError(f"{path}: not this one.", param="lora_path")
        self.adapters[name] = Adapter(len(self.adapters) + 1, name, path, parent)

    async def unload_adapter(self, name: str) -> None:
        await asyncio.sleep(0)
        if self.adapters.pop(name, None) is None:
            raise NotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")

    async def sleep(self, level: int = 1, *, abort: bool = False) -> None:
        raise NotFoundError("It never sleeps.")

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        raise NotFoundError("It never sleeps.")

    def submit(self, requests: Sequence[Request]) -> FakeStream:
        self.check_health()
        if self.full:
            raise CapacityError("The queue is full: 4096 requests wait.")
        stream = FakeStream()
        for request in requests:
            self.requests.append(request)
            self._streams[request.id] = stream
            asyncio.get_running_loop().create_task(self._speak(request, stream))
        return stream

    def abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            stream = self._streams.pop(name, None)
            if stream is not None:
                self.aborted.append(name)
                stream.queue.put_nowait(TokenOutput(name, (), FinishReason.ABORT))

    @property
    def open_requests(self) -> int:
        return len(self._streams)

    def stats(self) -> EngineStats:
        return EngineStats(
            steps=7,
            running=len(self._streams),
            pages_used=25,
            pages_total=100,
            prefix_queries=8,
            prefix_hits=4,
            swapped=2,
            host_pages_used=10,
            host_pages_total=20,
            host_hits=3,
            pages_swapped_out=9,
        )

    def check_health(self) -> None:
        if self.dead:
            raise EngineDeadError("The engine process ended with signal SIGKILL.")

    async def _speak(self, request: Request, stream: FakeStream) -> None:
        said = 0
        script = self.script(request)
        while request.id in self._streams:
            await asyncio.sleep(self.delay)
            if request.id not in self._streams:
                return
            if self.fail_after is not None and said >= self.fail_after and request.prompt_token_ids[0] != UNFAILING:
                stream.queue.put_nowait(TokenOutput(request.id, (), FinishReason.ERROR, error="The step failed."))
                break
            tokens = tuple(script[said : said + self.group])
            output = self._output(request, tokens, said)
            stream.queue.put_nowait(output)
            said += len(tokens)
            if output.finish is not None:
                break
        self._streams.pop(request.id, None)

    def _output(self, request: Request, tokens: tuple[int, ...], said: int) -> TokenOutput:
        params, last = request.params, tokens[-1]
        finish, stop_token = None, None
        if last == EOS and not params.ignore_eos:
            finish = FinishReason.STOP
        elif last in params.stop_token_ids:
            finish, stop_token = FinishReason.STOP, last
        elif said + len(tokens) >= params.max_tokens:
            finish = FinishReason.LENGTH
        asked = params.prompt_logprobs
        return TokenOutput(
            request.id,
            tokens,
            finish,
            stop_token,
            logprobs=()
            if params.logprobs is None
            else tuple(self.entry_of(token, params.logprobs) for token in tokens),
            prompt_logprobs=()
            if said or asked is None
            else tuple(entry(token, asked) for token in request.prompt_token_ids[1:]),
            cached_tokens=2 if not said else 0,
            queue_seconds=0.25 if not said else None,
        )
