"""What may stand around an answer that is constrained: reasoning before it, message headers, calls in its place.

Invariants: reasoning is free text up to its closing tag, whatever the answer after it must be; a tag that is one of the
model's special tokens is written as that token, because as characters it is never generated.
Knows nothing of what the answer itself must be: grammars here call it `@answer`.
"""

from __future__ import annotations

import json

from stoker_runtime.api.tools.reasoning import Opened, Tags
from stoker_runtime.text.tokenizer import Tokenizer

ANY_TEXT = r"/(.|\n)*/"
LINES = r"/\n{0,4}/"
HARMONY_THOUGHT = f'(<|channel|> "analysis" <|message|> {ANY_TEXT} <|end|> <|start|> "assistant")?'


def special_texts(tokenizer: Tokenizer) -> frozenset[str]:
    """The texts of the model's special tokens."""
    return frozenset(tokenizer.token_bytes(token).decode(errors="replace") for token in tokenizer.special_ids)


def text_lead(
    tags: Tags | None,
    opened: Opened,
    tokenizer: Tokenizer,
    openings: tuple[str, ...] = (),
    markers: tuple[str, ...] = (),
) -> str:
    """Reasoning between `tags`, as far as the prompt leaves it open, then the answer; "" where that is all there is.

    `openings` are what a family's calls begin with: calls, with all their `markers`, may then stand in place of the
    answer.
    """
    if not openings and (tags is None or opened is Opened.OVER):
        return ""
    specials = special_texts(tokenizer)
    thought, rules = _thought(tags, opened, specials, tokenizer)
    answer = "@answer"
    if openings:
        first = " | ".join(_marker(text, specials, tokenizer) for text in openings)
        tokens = [_marker(text, specials, tokenizer) for text in markers if text in specials]
        rest = f"({' | '.join([ANY_TEXT, *tokens])})*" if tokens else ANY_TEXT
        answer = "(@answer | calls)"
        rules = [*rules, f"calls: {LINES} ({first}) {rest}"]
    return "\n".join(["%llguidance {}", f"start: {thought} {answer}", *rules])


def _thought(
    tags: Tags | None, opened: Opened, specials: frozenset[str], tokenizer: Tokenizer
) -> tuple[str, list[str]]:
    """What the answer begins with, and the rules that this needs."""
    if tags is None or opened is Opened.OVER:
        return "", []
    start, end = (_marker(text, specials, tokenizer) for text in (tags.start, tags.end))
    if tags.end in specials:
        rules = [f"thought: {ANY_TEXT} {end} {LINES}"]
    else:
        # A lazy lexeme ends where its last word does for the first time.
        rules = [f"thought: words {LINES}", f"words[lazy]: {ANY_TEXT} {end}"]
    begun = f"({LINES} {start})?" if opened is Opened.YES and tags.start in specials else ""
    return (f"({LINES} {start} thought)?" if opened is Opened.OPEN else f"{begun} thought"), rules


def _marker(text: str, specials: frozenset[str], tokenizer: Tokenizer) -> str:
    """`text` in a grammar: as characters, or as a token, which goes by its id where its name has no angle brackets."""
    if text not in specials:
        return json.dumps(text)
    return text if text.startswith("<") and text.endswith(">") else f"<[{tokenizer.token_to_id(text)}]>"


def harmony_lead(*, calls: bool = False) -> str:
    """gpt-oss: a message of reasoning, then the header of the final one, or with `calls` a message to a function."""
    either = '<|channel|> "final" <|message|> @answer'
    if calls:
        header = r'<|channel|> /commentary to=functions\.[\w.:-]+ ?/ (<|constrain|> "json")? <|message|>'
        either = f"({either} | {header} {ANY_TEXT})"
    return f"%llguidance {{}}\nstart: {HARMONY_THOUGHT} {either}"
