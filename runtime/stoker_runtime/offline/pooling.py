"""Embedding and scoring in this process, behind `LLM.embed` and `LLM.score`.

Invariants: the same loop serves here and behind HTTP. Every call leaves it idle, also when it raises.
Knows nothing of HTTP and processes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.executor_protocol import PoolingExecutor
from stoker_runtime.engine.pooling_loop import PoolingLoop
from stoker_runtime.errors import RequestError
from stoker_runtime.models.pooling import Task, check_dimensions
from stoker_runtime.offline.progress_line import Progress
from stoker_runtime.outputs import EmbeddingOutput, EmbeddingRequestOutput, ScoringOutput, ScoringRequestOutput
from stoker_runtime.request import PoolingParams, Request, SamplingParams

if TYPE_CHECKING:
    from stoker_runtime.text.tokenizer import Encoded, Tokenizer

Text = str | Sequence[int]


class Pooled(NamedTuple):
    """What came of one text."""

    name: str
    ids: list[int]
    vector: NDArray[np.float32]


class LocalPooling:
    """A model that pools and its loop. `tokenizer` gives the model's tokenizer when a text is first seen."""

    def __init__(self, executor: PoolingExecutor, config: EngineConfig, tokenizer: Callable[[], Tokenizer]) -> None:
        self._loop = PoolingLoop(executor, config)
        self._spec = executor.pooling
        self._tokenizer = tokenizer
        self._names = itertools.count()

    def embed(
        self, texts: Sequence[Text], dimensions: int | None, normalize: bool | None, show: bool
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each text; `show`: with a line of progress. Raises RequestError."""
        if self._spec.task is not Task.EMBED:
            raise RequestError("This model scores pairs of texts; it has no embeddings.")
        check_dimensions(self._spec, dimensions)
        pooled = self._run([self._encode(text) for text in texts], PoolingParams(dimensions, normalize), show)
        return [EmbeddingRequestOutput(one.name, EmbeddingOutput(one.vector.tolist()), one.ids) for one in pooled]

    def score(self, first: list[str], second: list[str], show: bool) -> list[ScoringRequestOutput]:
        """A score for each pair. Raises RequestError."""
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise RequestError(f"There are {len(first)} first texts and {len(second)} second ones.")
        if self._spec.task is Task.SCORE:
            pairs = [self._encode(one, two) for one, two in zip(first, second, strict=True)]
            return [_scored(one.name, one.vector[0], one.ids) for one in self._run(pairs, PoolingParams(), show)]
        texts = list(dict.fromkeys((*first, *second)))
        pooled = self._run([self._encode(text) for text in texts], PoolingParams(None, True), show)
        unit = dict(zip(texts, pooled, strict=True))
        both = [(unit[one], unit[two]) for one, two in zip(first, second, strict=True)]
        return [_scored(one.name, one.vector @ two.vector, [*one.ids, *two.ids]) for one, two in both]

    def _encode(self, text: Text, second: str | None = None) -> Encoded:
        from stoker_runtime.text.pairs import encode_pair
        from stoker_runtime.text.tokenizer import Encoded

        if not isinstance(text, str):
            return Encoded(list(text))
        if self._spec.lower_case:
            text, second = text.lower(), second.lower() if second is not None else None
        if second is None:
            return self._tokenizer().encode_texts(text, None)
        return encode_pair(self._tokenizer(), self._spec.pair_prompt, text, second)

    def _run(self, texts: Sequence[Encoded], params: PoolingParams, show: bool) -> list[Pooled]:
        loop, now = self._loop, time.monotonic()
        running = []
        found: dict[str, NDArray[np.float32]] = {}
        bar = Progress(len(texts)) if show and texts else None
        try:
            for text in texts:
                pooling = PoolingParams(params.dimensions, params.normalize, text.second)
                name = f"llm-{next(self._names)}"
                request = Request(name, tuple(text.ids), SamplingParams(max_tokens=0), arrival=now, pooling=pooling)
                running.append(loop.add(request))
            while loop.has_work:
                for sequence, vector in loop.step().vectors:
                    found[sequence.request.id] = np.frombuffer(vector, dtype=np.float32)
                    if bar is not None:
                        bar.show(len(found), len(sequence.request.prompt_token_ids))
        except BaseException as error:
            loop.fail(error)
            raise
        finally:
            for sequence in running:
                loop.abort(sequence)
            if bar is not None:
                bar.close()
        return [
            Pooled(name, list(sequence.request.prompt_token_ids), found[name])
            for sequence in running
            for name in (sequence.request.id,)
        ]


def _scored(name: str, score: Any, ids: list[int]) -> ScoringRequestOutput:
    return ScoringRequestOutput(name, ScoringOutput(float(score)), ids)
