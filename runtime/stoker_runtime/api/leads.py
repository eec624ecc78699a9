"""What may stand before an answer that is constrained: the reasoning of a model that reasons, and message headers.

Invariants: reasoning is free text up to its closing tag, whatever the answer after it must be; a tag that is one of the
model's special tokens is written as that token, because as characters it is never generated.
Knows nothing of what the answer itself must be: grammars here call it `@answer`.
"""

from __future__ import annotations

import json

from stoker_runtime.api.reasoning import Opened, Tags
from stoker_runtime.tokenizer import Tokenizer

ANY_TEXT = r"/(.|\n)*/"
LINES = r"/\n{0,4}/"
HARMONY_THOUGHT = f'(<|channel|> "analysis" <|message|> {ANY_TEXT} <|end|> <|start|> "assistant")?'


def special_texts(tokenizer: Tokenizer) -> frozenset[str]:
    """The texts of the model's special tokens."""
    return frozenset(tokenizer.token_bytes(token).decode(errors="replace") for token in tokenizer.special_ids)


def tag_lead(tags: Tags, opened: Opened, tokenizer: Tokenizer) -> str:
    """Reasoning between `tags`, as far as the prompt leaves it open; "" where it is over."""
    if opened is Opened.OVER:
        return ""
    specials = special_texts(tokenizer)
    start, end = (_marker(text, specials, tokenizer) for text in (tags.start, tags.end))
    if tags.end in specials:
        thought = f"thought: {ANY_TEXT} {end} {LINES}"
    else:
        # A lazy lexeme ends where its last word does for the first time.
        thought = f"thought: words {LINES}\nwords[lazy]: {ANY_TEXT} {end}"
    begun = f"({LINES} {start})?" if opened is Opened.YES and tags.start in specials else ""
    first = f"({LINES} {start} thought)?" if opened is Opened.OPEN else f"{begun} thought"
    return f"%llguidance {{}}\nstart: {first} @answer\n{thought}"


def _marker(text: str, specials: frozenset[str], tokenizer: Tokenizer) -> str:
    """`text` in a grammar: as characters, or as a token, which goes by its id where its name has no angle brackets."""
    if text not in specials:
        return json.dumps(text)
    return text if text.startswith("<") and text.endswith(">") else f"<[{tokenizer.token_to_id(text)}]>"


def harmony_lead() -> str:
    """gpt-oss: a message of reasoning, then the header of the final one."""
    return f'%llguidance {{}}\nstart: {HARMONY_THOUGHT} <|channel|> "final" <|message|> @answer'
