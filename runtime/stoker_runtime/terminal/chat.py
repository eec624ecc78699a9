"""`stoker chat`: talk to a running server from the terminal.

Invariants: speaks the public API only, so it works with any OpenAI-compatible server; the conversation is kept
here and goes whole with each question; an answer that was interrupted stays in it as far as it came.
Knows nothing of models or engines.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /quit leaves"
CONNECT_SECONDS = 5.0


class ChatError(Exception):
    """What went wrong, in one sentence for the person at the terminal."""


@dataclass(slots=True)
class Answer:
    """What a finished answer cost. Seconds from the question."""

    text: str = ""
    tokens: int = 0
    first_seconds: float = 0.0
    seconds: float = 0.0

    def summary(self) -> str:
        """`42 tokens, 31.4 tok/s, first after 0.12 s`."""
        writing = self.seconds - self.first_seconds
        speed = f"{(self.tokens - 1) / writing:.1f} tok/s, " if self.tokens > 1 and writing > 0 else ""
        return f"{self.tokens} tokens, {speed}first after {self.first_seconds:.2f} s"


@dataclass(slots=True)
class Conversation:
    """A client with what was said so far. `options` are further fields of each request."""

    client: httpx.Client
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self, system: str = "") -> None:
        """Forget everything; begin with a system message if there is one."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str, show: Callable[[str], None]) -> Answer:
        """Send a question and `show` the answer as it comes. Raises ChatError."""
        self.messages.append({"role": "user", "content": question})
        answer = Answer()
        began = time.monotonic()
        try:
            for event in self._events():
                if event.get("usage"):
                    answer.tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    if piece and not answer.text:
                        answer.first_seconds = time.monotonic() - began
                    answer.text += piece
                    show(piece)
        finally:
            if answer.text:
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages.pop()
        answer.seconds = time.monotonic() - began
        return answer

    def _events(self) -> Iterator[dict[str, Any]]:
        body = {
            "model": self.model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatError(error_message(response))
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ChatError(str(event["error"]["message"]))
                    yield event
        except httpx.HTTPError as error:
            raise ChatError(f"the connection failed: {error}") from error


def error_message(response: httpx.Response) -> str:
    """The server's own words, or its status."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"


def find_model(client: httpx.Client) -> str:
    """The first model that the server lists. Raises ChatError."""
    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ChatError(f"no server at {str(client.base_url).rstrip('/')}: {error}; say where with --url") from error
    if response.status_code != 200:
        raise ChatError(error_message(response))
    return str(response.json()["data"][0]["id"])


def main(argv: list[str]) -> int:
    """Run `stoker chat` and return its exit status."""
    arguments = _parser().parse_args(argv)
    if urlsplit(arguments.url).scheme not in ("http", "https"):
        sys.stderr.write(f"stoker chat: --url is {arguments.url!r}; it must begin with http:// or https://\n")
        return 2
    headers = {"authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    options = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    with httpx.Client(base_url=arguments.url, headers=headers, timeout=timeout) as client:
        try:
            model = arguments.model or find_model(client)
            options = {name: value for name, value in options.items() if value is not None}
            conversation = Conversation(client, model, options)
            conversation.reset(arguments.system)
            if arguments.question:
                conversation.ask(" ".join(arguments.question), _show)
                sys.stdout.write("\n")
                return 0
            sys.stdout.write(f"{model} at {arguments.url}. {HELP}.\n")
            _converse(conversation, arguments.system)
        except ChatError as error:
            sys.stderr.write(f"stoker chat: {error}\n")
            return 1
    return 0


def _converse(conversation: Conversation, system: str) -> None:
    """Read questions until the end of input or /quit."""
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
        command, _, rest = line.partition(" ")
        if command in ("/quit", "/exit"):
            return
        if command in ("/reset", "/system"):
            system = rest if command == "/system" else system
            conversation.reset(system)
            sys.stdout.write(f"[forgotten; system message: {system or 'none'}]\n")
        elif command.startswith("/"):
            sys.stdout.write(f"{HELP}.\n")
        elif line:
            _answer(conversation, line)


def _answer(conversation: Conversation, question: str) -> None:
    try:
        answer = conversation.ask(question, _show)
        sys.stdout.write(f"\n[{answer.summary()}]\n")
    except ChatError as error:
        sys.stdout.write(f"\n[{error}]\n")
    except KeyboardInterrupt:
        sys.stdout.write("\n[interrupted]\n")


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stoker chat", description=f"Talk to a running server. {HELP}.")
    parser.add_argument("question", nargs="*", help="ask this one thing and leave")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server")
    parser.add_argument("--model", default="", help="the model; the first one listed unless given")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY", ""),
        metavar="KEY",
        help="better in OPENAI_API_KEY: other users of the machine see command lines",
    )
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 takes the likeliest token (default: the model's)"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="longest answer (default: what the model's context leaves)"
    )
    return parser
