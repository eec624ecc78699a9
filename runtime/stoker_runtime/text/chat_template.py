"""Render a conversation into a prompt with the model's own Jinja template, in a sandbox.

Invariants: templates run in an immutable sandbox with the extras that model makers rely on (`raise_exception`,
`strftime_now`, `tojson`, loop controls, `{% generation %}`); what a template refuses or cannot digest is the
caller's fault and a 400 that says why; a template that does not compile stops start-up.
Knows nothing of tokens, HTTP or requests: messages are plain dicts.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.parser import Parser

from stoker_runtime.errors import ConfigError, ModelError, RequestError

Message = Mapping[str, Any]
ADVICE = "start the server with --chat-template FILE, or send the prompt to /v1/completions"


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """Return the body between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class ChatTemplate:
    """The template a server speaks with, or none. `named` sources: `default`, and `tool_use` for tools.

    `source` is all of them together.
    """

    def __init__(self, named: Mapping[str, str], special_tokens: Mapping[str, str], origin: str) -> None:
        """Raises ModelError naming `origin` when a source does not compile."""
        self._special = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        self.origin = origin
        self.source = "\n".join(named.values())
        environment = _environment()
        for name, source in named.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                line = getattr(error, "lineno", None)
                where = f", line {line}" if line else ""
                raise ModelError(f"{origin}: the chat template {name!r}{where} does not compile: {error}.") from error

    @property
    def available(self) -> bool:
        """Whether there is a template for ordinary conversations."""
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises RequestError when there is no template, or the template refuses the messages."""
        template = self._pick(bool(tools))
        mark = f"{secrets.token_hex(16)} " if continue_final_message else ""
        messages = _marked(messages, mark) if mark else messages
        variables: dict[str, Any] = {
            **self._special,
            "messages": [dict(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(extra or {}),
        }
        try:
            text = template.render(variables)
        except jinja2.TemplateError as error:
            raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RequestError(
                f"The chat template fails on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        return _cut_at(text, mark) if mark else text

    def _pick(self, tools: bool) -> jinja2.Template:
        names = ("tool_use", "default") if tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        raise RequestError(f"This model has no chat template; {ADVICE}.", param="messages", code="no_chat_template")


def _marked(messages: Sequence[Message], mark: str) -> list[Message]:
    """The messages with `mark` behind the last one's text: its words alone may stand anywhere in a prompt."""
    last = messages[-1].get("content") if messages else None
    if not isinstance(last, str) or not last.strip():
        raise RequestError("continue_final_message needs a last message with text.", param="continue_final_message")
    return [*messages[:-1], {**messages[-1], "content": last + mark}]


def _cut_at(text: str, mark: str) -> str:
    """Drop what the template put from the mark on, so that the model goes on writing the last message."""
    at = text.rfind(mark.rstrip())
    if at < 0:
        raise RequestError(
            "continue_final_message: the chat template changes the last message's text.",
            param="continue_final_message",
        )
    # A template that took the mark's blank takes those at the end of every message.
    return text[:at] if text.startswith(mark, at) else text[:at].rstrip()


def load_chat_template(
    override: str, from_model: Mapping[str, str], special: Mapping[str, str], model: str
) -> ChatTemplate:
    """The template of `--chat-template` (a file, or Jinja source) or else the model's own.

    Raises ConfigError when `override` is neither a file nor holds any Jinja, ModelError when it does not compile.
    """
    if not override:
        return ChatTemplate(from_model, special, model)
    path = Path(override)
    if "{" not in override and "\n" not in override:
        if not path.is_file():
            raise ConfigError(f"chat_template: no such file: {override}.", param="chat_template")
        return ChatTemplate({"default": path.read_text(encoding="utf-8")}, special, override)
    return ChatTemplate({"default": override}, special, "--chat-template")
