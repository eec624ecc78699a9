"""A server whose model reasons and calls tools, for the tests of the routes that translate to the chat route."""

from __future__ import annotations

from api_server import Running
from fake_engine import EOS, FakeEngine

CALLS = (
    "<think>\nShall I?\n</think>\n\nSure.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TEMPLATE = (
    "{% if tools %}tools:{% for t in tools %} {{ t.function.name }}{% endfor %};{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "{% endfor %}{% if reasoning_effort %}effort {{ reasoning_effort }};{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)


class LongEngine(FakeEngine):
    """Room for tools in the prompt."""

    max_model_len = 4096


def says(server: Running, text: str) -> None:
    """Let the model say `text` and stop."""
    server.engine.script = lambda _: [*text.encode(), EOS]


def prompt(server: Running) -> str:
    """The last prompt that the engine got."""
    return bytes(server.engine.requests[-1].prompt_token_ids).decode()
