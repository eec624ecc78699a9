"""What a decoder that judges pairs is asked: the text around a query and a document, by a model's published recipe.

Invariants: torch-free plain data. The texts before and behind are tokenized apart from what stands between them, as the
recipe does it, so that what is cut of a long document is never the question.
Knows nothing of tokenizers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """`pair` has places for {instruction}, {query} and {document}; `instruction` is what stands there unless a request
    says otherwise.
    """

    before: str
    pair: str
    after: str
    instruction: str

    def between(self, query: str, document: str, instruction: str | None) -> str:
        """The text of a pair, between `before` and `after`."""
        parts = {"instruction": instruction or self.instruction, "query": query, "document": document}
        return self.pair.format_map(parts)


QWEN3_RERANKER = PairPrompt(
    before="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    pair="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
PAIR_PROMPTS: dict[str, PairPrompt | None] = {"qwen3-reranker": QWEN3_RERANKER, "none": None}
"""By the name that `--pooler-config` gives as `template`; none: the texts of a pair follow each other."""
