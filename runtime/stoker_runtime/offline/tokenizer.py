"""The model's tokenizer as scripts know it from transformers, behind `LLM.get_tokenizer`.

Invariants: the ids and texts are the engine's own; what a method of this name takes or gives beyond what stands here
is an error, not ignored.
Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stoker_runtime.errors import RequestError
from stoker_runtime.offline.chat import ChatOptions, Conversations, Message
from stoker_runtime.text.tokenizer import Tokenizer


class ScriptTokenizer:
    """A tokenizer under the names that scripts use."""

    def __init__(self, tokenizer: Tokenizer, model: str) -> None:
        self._tokenizer = tokenizer
        self._model = model

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """`input_ids` and `attention_mask` of a text, or lists of them for several."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        many = [self.encode(each, add_special_tokens) for each in text]
        return {"input_ids": many, "attention_mask": [[1] * len(ids) for ids in many]}

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of ids, special tokens included unless they are to be skipped."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        """`decode` for each of several."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str) -> list[str]:
        """A text in the vocabulary's own spelling."""
        return [self._tokenizer.id_to_token(at) or "" for at in self._tokenizer.encode(text, False)]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """The id of a token in the vocabulary's own spelling, or those of several; None for one that there is not."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """The vocabulary's own spelling of an id, or of several."""
        if isinstance(ids, int):
            return self._tokenizer.id_to_token(ids)
        return [self._tokenizer.id_to_token(at) for at in ids]

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """The prompt of a conversation, as ids or with `tokenize` False as text. `variables` go to the template.

        Raises RequestError when there is no template, or it refuses the messages.
        """
        for name in ("return_tensors", "return_dict", "padding", "truncation", "max_length"):
            if variables.pop(name, None):
                raise RequestError(f"apply_chat_template gives plain ids or text; it has no {name}.", param=name)
        options = ChatOptions(tools, add_generation_prompt, continue_final_message, variables)
        text = Conversations(self._tokenizer, self._model, chat_template).prompt(conversation, options)
        # The template writes the special tokens itself.
        return self._tokenizer.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template for ordinary conversations."""
        return self._tokenizer.chat_templates.get("default")

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return self._tokenizer.vocab_size

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the special tokens."""
        return sorted(self._tokenizer.special_ids)

    def _special(self, name: str) -> str | None:
        return self._tokenizer.special_tokens.get(name)

    def _special_id(self, name: str) -> int | None:
        token = self._special(name)
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text."""
        return self._special("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Its id."""
        return self._special_id("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text."""
        return self._special("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Its id."""
        return self._special_id("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The token that fills texts up."""
        return self._special("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """Its id."""
        return self._special_id("pad_token")
