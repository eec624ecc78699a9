"""The Python interface: a model in this process, prompts in, text or tokens out, all prompts in one batch.

    from stoker_runtime import LLM, SamplingParams
    llm = LLM("path/to/model", max_model_len=4096)
    outputs = llm.generate(["The sky is"], SamplingParams(max_tokens=32, temperature=0.0))
    print(outputs[0].text)

Invariants: the same step loop serves here and behind HTTP. Every call leaves the engine idle, also when it raises.
Not for several threads at once. The tokenizer is loaded when text is first seen, so token ids need none.
Knows nothing of HTTP and processes.
"""

from __future__ import annotations

import difflib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.executor_protocol import Executor
from stoker_runtime.engine.pooling_protocol import PoolingExecutor
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import ConfigError, RequestError
from stoker_runtime.progress_line import Progress
from stoker_runtime.request import Constraint, FinishReason, Request, SamplingParams, TokenLogprobs
from stoker_runtime.scheduler.draft import StepOutput
from stoker_runtime.scheduler.sequence import Sequence as Running

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from stoker_runtime.detokenizer import Detokenizer
    from stoker_runtime.llm_pooling import LocalPooling
    from stoker_runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None

UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Output:
    """A finished generation. `token_ids` include the id that ended it; `text` does not.

    `stop_reason` is the stop string or stop id that ended it, if one did and it was not EOS; "max_model_len" where the
    context was full before `max_tokens` were out.
    `prompt_logprobs[i]` is of prompt token i + 1.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stream gave since the last one. The last has `finish` set."""

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    stop_reason: str | int | None = None


class LLM:
    """A model and its engine in this process."""

    def __init__(self, model: str, **options: Any) -> None:
        """`options` are the fields of EngineConfig. Raises ConfigError (ModelError, KernelUnavailableError too)."""
        known = {each.name for each in fields(EngineConfig)}
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"LLM has no option {name!r}{hint}", param=name)
        from stoker_runtime.executor.build import build_model

        config = EngineConfig(model=model, **options).validate()
        executor = build_model(config)
        if isinstance(executor, PoolingExecutor):
            self._open_pooling(executor, config)
        else:
            self._open(executor, config)

    @classmethod
    def over(cls, executor: Executor, config: EngineConfig) -> LLM:
        """An LLM over an executor that exists already; it is closed with the LLM."""
        llm = cls.__new__(cls)
        llm._open(executor, config)
        return llm

    def _open(self, executor: Executor, config: EngineConfig) -> None:
        # Whoever calls waits for the result anyway: there is no queue to protect.
        self._generating: StepLoop | None = StepLoop(executor, replace(config, max_queued=UNBOUNDED))
        self._pooling: LocalPooling | None = None
        self._executor: Executor | PoolingExecutor = executor
        self._keep(config)

    def _open_pooling(self, executor: PoolingExecutor, config: EngineConfig) -> None:
        from stoker_runtime.llm_pooling import LocalPooling

        self._generating = None
        self._pooling = LocalPooling(executor, replace(config, max_queued=UNBOUNDED), lambda: self.tokenizer)
        self._executor = executor
        self._keep(config)

    def _keep(self, config: EngineConfig) -> None:
        self._config = config
        self._names = itertools.count()
        self._tokenizer: Tokenizer | None = None
        self._alphabet: LLTokenizer | None = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the device."""
        self._executor.close()

    @property
    def engine(self) -> StepLoop:
        """The step loop, for its statistics and its executor. Raises RequestError for a model that pools."""
        return self._loop

    @property
    def _loop(self) -> StepLoop:
        if self._generating is None:
            raise RequestError("This model embeds or scores texts; it does not generate.")
        return self._generating

    @property
    def _pool(self) -> LocalPooling:
        if self._pooling is None:
            raise RequestError("This model generates; a decoder embeds when it is opened with runner='pooling'.")
        return self._pooling

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ModelError when there is none."""
        if self._tokenizer is None:
            from stoker_runtime.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.load(self._config.tokenizer or self._config.model)
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        stop: Sequence[str] = (),
        progress: bool = False,
    ) -> list[Output]:
        """Generate for all prompts (texts or token ids) together; outputs in their order.

        `params`: one for all, or one each. `stop`: strings that end a sequence, not part of its text.
        Raises RequestError for a prompt that cannot be run; none has been started then.
        """
        running = self._submit([self._encode(each) for each in as_prompts(prompts)], params)
        records = {each: _Record(each, self._detokenizer(stop)) for each in running}
        bar = Progress(len(running)) if progress else None

        def take(output: StepOutput) -> None:
            for sequence in gather(output, records, search=bool(stop)):
                self._loop.abort(sequence)
            if bar is not None:
                bar.show(sum(each.finish is not None for each in running), len(output.tokens))

        self._run(running, take)
        if bar is not None:
            bar.close()
        return [each.output() for each in records.values()]

    def generate_stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, stop: Sequence[str] = ()
    ) -> Iterator[Delta]:
        """Generate for one prompt and yield text as it becomes certain. Closing the iterator ends the sequence."""
        running = self._submit([self._encode(prompt)], params)
        record = _Record(running[0], self._detokenizer(stop))
        try:
            while not record.over:
                if gather(self._step(), {running[0]: record}, search=True):
                    self._loop.abort(running[0])
                if (delta := record.delta()) is not None:
                    yield delta
        finally:
            self._clear(running)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        stop: Sequence[str] = (),
        progress: bool = False,
    ) -> list[Output]:
        """Answer one conversation, or several together, through the model's chat template.

        A message is {"role": …, "content": …}. Raises RequestError when the model has no template.
        """
        from stoker_runtime.chat_template import ChatTemplate

        tokenizer = self.tokenizer
        template = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens, self._config.model)
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        texts = [template.render(cast("Sequence[Message]", each)) for each in conversations]
        # The template writes the special tokens itself.
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self.generate(prompts, params, stop=stop, progress=progress)

    def embed(
        self, texts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, normalize: bool | None = None
    ) -> list[list[float]]:
        """The vector of each text (or of its token ids), in their order.

        `dimensions` cuts the vectors of a Matryoshka model; `normalize` None does as the model says.
        Raises RequestError for a model that does not embed, and for a text that is empty or too long.
        """
        return self._pool.embed(as_prompts(texts), dimensions, normalize)

    def score(self, first: str | Sequence[str], second: str | Sequence[str]) -> list[float]:
        """How well texts go together: a cross-encoder's score of each pair, or the cosine of their embeddings.

        One `first` goes with every `second`, otherwise there are as many. Raises RequestError.
        """
        return self._pool.score(*([each] if isinstance(each, str) else list(each) for each in (first, second)))

    def generate_tokens(self, prompts: Sequence[Sequence[int]], params: Params = None) -> list[list[int]]:
        """Token ids in, generated token ids out, nothing in between: no tokenizer, no per-token Python work."""
        running = self._submit(prompts, params)
        self._run(running, lambda output: None)
        return [each.tokens[each.prompt_length :].tolist() for each in running]

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _detokenizer(self, stop: Sequence[str]) -> Detokenizer:
        from stoker_runtime.detokenizer import Detokenizer

        return Detokenizer(self.tokenizer, stop)

    def _submit(self, prompts: Sequence[Sequence[int]], params: Params) -> list[Running]:
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"There are {len(prompts)} prompts and {len(each)} parameters.", param="params")
        for constraint in {one.constraint for one in each if one.constraint is not None}:
            self._check(constraint)
        now = time.monotonic()
        running: list[Running] = []
        try:
            for prompt, one in zip(prompts, each, strict=True):
                request = Request(f"llm-{next(self._names)}", tuple(prompt), one.validate(), arrival=now)
                running.append(self._loop.add(request))
        except BaseException:
            self._clear(running)
            raise
        return running

    def _check(self, constraint: Constraint) -> None:
        from stoker_runtime.sampling import grammar

        if self._alphabet is None:
            self._alphabet = grammar.build_byte_tokenizer(self.tokenizer)
        grammar.check(constraint, self._alphabet)

    def _run(self, running: list[Running], take: Callable[[StepOutput], None]) -> None:
        try:
            while self._loop.has_work:
                take(self._step())
        finally:
            self._clear(running)

    def _step(self) -> StepOutput:
        try:
            return self._loop.step()
        except BaseException as error:
            # A step that was cut short, by Ctrl-C too, leaves nothing that could be continued.
            self._loop.fail(error)
            raise

    def _clear(self, running: list[Running]) -> None:
        """End what has not ended, and take in the step that is still in flight."""
        for sequence in running:
            self._loop.abort(sequence)
        while self._loop.has_work:
            self._loop.step()


class _Record:
    """What one sequence gave so far, as text too where that is asked for as it comes."""

    def __init__(self, sequence: Running, detokenizer: Detokenizer) -> None:
        self._sequence = sequence
        self._detokenizer = detokenizer
        self._text: list[str] = []
        self._read = 0
        self._shown = 0
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.over = False

    def read(self) -> bool:
        """Read the new tokens; whether a stop string was found in them."""
        sequence, detokenizer = self._sequence, self._detokenizer
        fresh = sequence.tokens[sequence.prompt_length + self._read :]
        spoken = fresh[:-1] if sequence.finish is FinishReason.STOP and not sequence.complete else fresh
        for token in spoken:
            self._read += 1
            self._text.append(detokenizer.push((token,), search=self._read >= sequence.params.min_tokens))
            if detokenizer.stopped_by is not None:
                break
        if sequence.finish is not None or detokenizer.stopped_by is not None:
            self._text.append(detokenizer.finish())
            self.over = True
        return detokenizer.stopped_by is not None

    def delta(self) -> Delta | None:
        """The text since the last delta; None when nothing is certain yet and it goes on."""
        text = "".join(self._text)
        self._text.clear()
        if not text and not self.over:
            return None
        start, self._shown = self._shown, len(self._token_ids)
        finish, stop_reason = self._finish() if self.over else (None, None)
        return Delta(text, self._token_ids[start:], finish, stop_reason)

    def output(self) -> Output:
        """The finished generation."""
        if not self.over:
            self.read()
        finish, stop_reason = self._finish()
        sequence = self._sequence
        return Output(
            prompt_token_ids=sequence.request.prompt_token_ids,
            token_ids=self._token_ids,
            text="".join(self._text),
            finish=finish,
            stop_reason=stop_reason,
            logprobs=tuple(self.logprobs[: len(self._token_ids)]),
            prompt_logprobs=tuple(self.prompt_logprobs),
            cached_tokens=sequence.cached_tokens,
        )

    @property
    def _token_ids(self) -> tuple[int, ...]:
        tokens = self._sequence.tokens[self._sequence.prompt_length :]
        return tuple(tokens)

    def _finish(self) -> tuple[FinishReason, str | int | None]:
        if self._detokenizer.stopped_by is not None:
            return FinishReason.STOP, self._detokenizer.stopped_by
        sequence = self._sequence
        assert sequence.finish is not None, "the sequence goes on"
        if sequence.finish is FinishReason.LENGTH and len(self._token_ids) < sequence.params.max_tokens:
            return sequence.finish, "max_model_len"
        return sequence.finish, sequence.stop_token


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, also when one was given: a text, or a sequence of ids."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def gather(output: StepOutput, records: Mapping[Running, _Record], *, search: bool) -> list[Running]:
    """Hand a step's outcome to its records; with `search`, the sequences whose text reached a stop string."""
    for sequence, entry in zip(output.sequences, output.logprobs, strict=bool(output.logprobs)):
        if entry is not None and sequence in records:
            records[sequence].logprobs.append(entry)
    for sequence, entries in output.prompt_logprobs:
        if sequence in records:
            records[sequence].prompt_logprobs += entries
    if not search:
        return []
    touched = dict.fromkeys((*output.sequences, *output.finished))
    return [each for each in touched if each in records and records[each].read()]
