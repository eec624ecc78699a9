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

import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.executor_protocol import Executor, PoolingExecutor
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import ConfigError, RequestError
from stoker_runtime.fetch.by_name import located
from stoker_runtime.inputs import PromptType, as_prompts, plain_prompt
from stoker_runtime.offline.lora import LoRARequest, LoraRequests, Loras
from stoker_runtime.offline.options import engine_options
from stoker_runtime.offline.progress_line import Progress, watched
from stoker_runtime.offline.record import Record, Rounds, as_output, gather
from stoker_runtime.offline.running import clear, run_to_end, step
from stoker_runtime.offline.sleep import Sleeps
from stoker_runtime.offline.task import AnyParams, Params, Task, TaskMaker, ranked
from stoker_runtime.outputs import BeamSearchOutput, Delta, EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from stoker_runtime.request import Constraint, Request, TokenLogprobs
from stoker_runtime.request import SamplingParams as EngineParams
from stoker_runtime.sampling_params import BeamSearchParams, PoolingParams, SamplingParams, model_params, sibling
from stoker_runtime.scheduler.draft import StepOutput
from stoker_runtime.scheduler.sequence import Sequence as Running

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from stoker_runtime.offline.chat import Messages
    from stoker_runtime.offline.pooling import LocalPooling
    from stoker_runtime.offline.tokenizer import ScriptTokenizer
    from stoker_runtime.text.tokenizer import Tokenizer

UNBOUNDED = 1 << 62


class LLM(Sleeps):
    """A model and its engine in this process."""

    def __init__(self, model: str, *, generation_config: str = "auto", **options: Any) -> None:
        """`model` is a folder, a .gguf file, or a name of the hub, whose `revision` is a branch, tag or commit.

        `options` are the fields of EngineConfig, or vLLM's names for them (see options.py).

        `generation_config` "auto": where no sampling parameters are given, those of the model's folder count; "vllm" or
        "none": those of SamplingParams do. Raises ConfigError (ModelError, KernelUnavailableError too).
        """
        from stoker_runtime.ranks.build import build_model

        config = located(EngineConfig(model=model, **engine_options(options, os.environ)).validate())
        if generation_config not in ("auto", "vllm", "none"):
            raise ConfigError(
                f"generation_config is {generation_config!r}; it must be auto, vllm or none.", param="generation_config"
            )
        executor = build_model(config)
        if isinstance(executor, PoolingExecutor):
            self._open_pooling(executor, config)
        else:
            self._open(executor, config)
        self._own_defaults = generation_config == "auto"

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
        from stoker_runtime.offline.pooling import LocalPooling

        self._generating = None
        self._pooling = LocalPooling(executor, replace(config, max_queued=UNBOUNDED), lambda: self.tokenizer)
        self._executor = executor
        self._keep(config)

    def _keep(self, config: EngineConfig) -> None:
        self._config = config
        self._own_defaults = True
        self._names = itertools.count()
        self._loras = LoraRequests()
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
            from stoker_runtime.text.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.load(self._config.tokenizer or self._config.model)
        return self._tokenizer

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        use_tqdm: bool | None = None,
        *,
        stop: Sequence[str] = (),
        priority: Sequence[int] | None = None,
        lora_request: Loras = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts (texts or token ids) together; outputs in their order.

        `sampling_params`: one for all, or one each; None: what the model's generation_config.json says. `stop`: strings
        that end a sequence besides those there. `priority`: a number for each prompt, the lowest runs first; it needs
        scheduling_policy="priority". `lora_request`: an adapter for all, or one (or None) each. `use_tqdm`, vLLM's
        name: a line of progress on standard error; by default where that is a terminal. Raises RequestError for a
        prompt that cannot be run; none has been started then.
        """
        tasks = self._adapted(self._make.tasks(as_prompts(prompts), sampling_params, stop), lora_request)
        if priority is not None:
            tasks = ranked(tasks, priority, self._config.scheduling_policy)
        running = self._submit(tasks)
        records = {each: self._record(each, task) for task, group in zip(tasks, running, strict=True) for each in group}
        search = any(task.stops for task in tasks)
        rounds = Rounds([] if search else list(records.values()))
        bar = Progress(len(records)) if watched(use_tqdm) and records else None

        def take(output: StepOutput) -> None:
            for sequence in gather(output, records, search=search):
                self._loop.abort(sequence)
            rounds.step()
            if bar is not None:
                bar.show(sum(each.finish is not None for each in records), len(output.tokens))

        run_to_end(self._loop, list(records), take)
        if bar is not None:
            bar.close()
        spell = lambda token: self.tokenizer.spell(token)  # noqa: E731 - the tokenizer is loaded when text is wanted
        return [
            as_output(task, [records[each] for each in group], spell)
            for task, group in zip(tasks, running, strict=True)
        ]

    def generate_stream(
        self, prompt: PromptType, sampling_params: AnyParams | None = None, *,
        stop: Sequence[str] = (), lora_request: LoRARequest | None = None,
    ) -> Iterator[Delta]:  # fmt: skip
        """Generate for one prompt and yield text as it becomes certain. Closing the iterator ends the sequence."""
        [task] = self._adapted(self._make.tasks([prompt], sampling_params, stop), lora_request)
        if task.n != 1:
            raise RequestError("A stream has one choice; n must be 1.", param="n")
        [[running]] = self._submit([task])
        record = self._record(running, task)
        try:
            while not record.over:
                if gather(step(self._loop), {running: record}, search=True):
                    self._loop.abort(running)
                if (delta := record.delta()) is not None:
                    yield delta
        finally:
            clear(self._loop, [running])

    def chat(
        self,
        messages: Messages,
        sampling_params: Params = None,
        use_tqdm: bool | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
        lora_request: Loras = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several together, through the model's chat template, or through `chat_template`.

        Messages and tools are those of the chat route. The answer is the text as the model wrote it. Raises
        RequestError when the model has no template, or none for tools.
        """
        from stoker_runtime.offline.chat import ChatOptions, Conversations, conversations

        chat = Conversations(self.tokenizer, self._config.model, chat_template)
        options = ChatOptions(tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        prompts: list[PromptType] = []
        for each in conversations(messages):
            text = chat.prompt(each, options)
            # The template writes the special tokens itself.
            prompts.append({"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)})
        return self.generate(prompts, sampling_params, use_tqdm, stop=stop, lora_request=lora_request)

    def beam_search(
        self, prompts: PromptType | Sequence[PromptType], params: BeamSearchParams, *, lora_request: Loras = None
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, best first; adapters as in generate. Raises RequestError."""
        from stoker_runtime.offline.beams import beam_output, search_beams

        given = [self._make.ids(prompt) for prompt in as_prompts(prompts)]
        longest, eos = self._loop.scheduler.config.max_tokens, self._loop.executor.eos_token_ids
        step = partial(self._likeliest, self._loras.numbers(self._loop, lora_request, len(given)))
        found = search_beams(given, params.validate(), longest, eos, step)
        return [beam_output(ids, beams, params, self.tokenizer) for ids, beams in zip(given, found, strict=True)]

    def _likeliest(
        self, adapters: Sequence[int], texts: Sequence[tuple[int, tuple[int, ...]]], params: EngineParams
    ) -> list[TokenLogprobs]:
        """What may follow each text, by one more token of it; `adapters` are the prompts'."""
        tasks = [
            Task(f"llm-{next(self._names)}", None, ids, params, detokenize=False, adapter=adapters[prompt])
            for prompt, ids in texts
        ]
        running = [each for group in self._submit(tasks) for each in group]
        records = {each: Record(each, None) for each in running}

        def take(output: StepOutput) -> None:
            gather(output, records, search=False)

        run_to_end(self._loop, running, take)
        return [records[each].logprobs[0] for each in running]

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json says, where it counts and says anything."""
        return model_params(self._config.model) if self._own_defaults else SamplingParams()

    def get_tokenizer(self) -> ScriptTokenizer:
        """The tokenizer under the names that scripts know from transformers."""
        from stoker_runtime.offline.tokenizer import ScriptTokenizer

        return ScriptTokenizer(self.tokenizer, self._config.model)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each text (or of its token ids), in their order, at `.outputs.embedding`.

        Raises RequestError for a model that does not embed, and for a text that is empty or too long.
        """
        params = pooling_params or PoolingParams()
        normalize = params.use_activation if params.normalize is None else params.normalize
        plain = [plain_prompt(each) for each in as_prompts(prompts)]
        return self._pool.embed(plain, params.dimensions, normalize, watched(use_tqdm))

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, use_tqdm: bool | None = None
    ) -> list[ScoringRequestOutput]:
        """How well texts go together, at `.outputs.score`: a cross-encoder's score, or the cosine of the embeddings.

        One text on the first side goes with every one on the second, otherwise there are as many. Raises RequestError.
        """
        first, second = ([each] if isinstance(each, str) else list(each) for each in (data_1, data_2))
        return self._pool.score(first, second, watched(use_tqdm))

    def generate_tokens(self, prompts: Sequence[Sequence[int]], sampling_params: Params = None) -> list[list[int]]:
        """Token ids in, generated token ids out, nothing in between: no tokenizer, no per-token Python work.

        With several choices a prompt, all of the first prompt's come first.
        """
        groups = self._submit(self._make.tasks(list(prompts), sampling_params, ()))
        running = [each for group in groups for each in group]
        run_to_end(self._loop, running, lambda output: None)
        return [each.tokens[each.prompt_length :].tolist() for each in running]

    @property
    def _make(self) -> TaskMaker:
        """Raises RequestError for a model that pools."""
        longest, defaults = self._loop.scheduler.config.max_tokens, self.get_default_sampling_params
        return TaskMaker(longest, lambda: self.tokenizer, defaults, self._names)

    def _adapted(self, tasks: list[Task], asked: Loras) -> list[Task]:
        """The tasks with the numbers of their adapters. Raises RequestError."""
        if asked is None:
            return tasks
        numbers = self._loras.numbers(self._loop, asked, len(tasks))
        return [replace(task, adapter=number) for task, number in zip(tasks, numbers, strict=True)]

    def _record(self, sequence: Running, task: Task) -> Record:
        from stoker_runtime.text.detokenizer import Detokenizer

        keep = task.include_stop
        detokenizer = (
            Detokenizer(self.tokenizer, task.stops, include_stop=keep, skip_special=task.skip_special)
            if task.detokenize
            else None
        )
        return Record(sequence, detokenizer, include_stop=keep)

    def _submit(self, tasks: Sequence[Task]) -> list[list[Running]]:
        """The sequences of each task, in the engine. Raises what the engine raises; none runs then."""
        for constraint in {task.params.constraint for task in tasks if task.params.constraint is not None}:
            self._check(constraint)
        now = time.monotonic()
        running: list[list[Running]] = []
        try:
            for task in tasks:
                running.append([])
                family = task.name if task.n > 1 else ""
                for at in range(task.n):
                    params = sibling(task.params, at)
                    request = Request(
                        f"{task.name}-{at}",
                        task.ids,
                        params,
                        arrival=now,
                        priority=task.priority,
                        cache_salt=task.salt,
                        family=family,
                        adapter=task.adapter,
                    )
                    running[-1].append(self._loop.add(request))
        except BaseException:
            clear(self._loop, [each for group in running for each in group])
            raise
        return running

    def _check(self, constraint: Constraint) -> None:
        from stoker_runtime.sampling import grammar

        if self._alphabet is None:
            self._alphabet = grammar.build_byte_tokenizer(self.tokenizer)
        grammar.check(constraint, self._alphabet)
