"""The request bodies of the routes that embed and score, as OpenAI, Cohere, Jina and vLLM define them.

Invariants: as in fields.py; a field that is known and not supported is refused by its name.
Knows nothing of engines, tokens or HTTP.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stoker_runtime.api.http.fields import MAX_SEQUENCES, Body, Integer, Prompt, TimedBody

Texts = str | Annotated[list[str], Field(max_length=MAX_SEQUENCES, fail_fast=True)]


class PoolingFields(TimedBody):
    """What every pooling route knows."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1)] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[Integer, Field(ge=-(2**31), lt=2**31)] | None = None
    user: str | None = None
    cache_salt: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    activation: bool | None = None
    use_activation: bool | None = None
    softmax: bool | None = None

    POOLING_UNSUPPORTED: ClassVar[dict[str, tuple[object, ...]]] = {
        "mm_processor_kwargs": (None, {}),
        "activation": (None, True),
        "use_activation": (None, True),
        "softmax": (None,),
    }
    UNSUPPORTED: ClassVar = POOLING_UNSUPPORTED


class EmbeddingBody(PoolingFields):
    """POST /v1/embeddings: texts, behind the model's own prompt `prompt_name`, or their token ids."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Integer, Field(ge=1, lt=2**31)] | None = None
    normalize: bool | None = None
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    prompt_name: str | None = None
    embed_dtype: str | None = None
    endianness: str | None = None

    UNSUPPORTED: ClassVar = {
        **PoolingFields.POOLING_UNSUPPORTED,
        "messages": (None,),
        "embed_dtype": (None, "float32"),
        "endianness": (None, "native", "little"),
    }


class PoolingBody(EmbeddingBody):
    """POST /pooling: as for embeddings; `task` names what the model does."""

    task: str | None = None


class RerankDocument(Body):
    """A document as an object."""

    text: str


class RerankBody(PoolingFields):
    """POST /rerank, /v1/rerank, /v2/rerank."""

    query: str
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, max_length=MAX_SEQUENCES, fail_fast=True)]
    top_n: Annotated[Integer, Field(ge=0)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Integer | None = None
    instruction: str | None = None

    UNSUPPORTED: ClassVar = {**PoolingFields.POOLING_UNSUPPORTED, "max_tokens_per_doc": (None,)}


class ScoreBody(PoolingFields):
    """POST /score, /v1/score: one text or as many on the first side as on the second."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    instruction: str | None = None
