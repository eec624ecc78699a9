"""What `LLM` is to do for each prompt: ids, and parameters in the engine's words.

Invariants: parameters that stand for many prompts are resolved once; nothing here has begun when an error is raised.
Knows nothing of sequences, batches or adapters' folders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stoker_runtime.errors import RequestError
from stoker_runtime.inputs import PromptType, plain_prompt, salt_of, text_of
from stoker_runtime.request import SamplingParams as EngineParams
from stoker_runtime.sampling_params import SamplingParams
from stoker_runtime.text.tokenizer import Tokenizer

AnyParams = SamplingParams | EngineParams
Params = AnyParams | Sequence[AnyParams] | None


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be done for one prompt: `n` sequences, and how their tokens become text."""

    name: str
    text: str | None
    ids: tuple[int, ...]
    params: EngineParams
    n: int = 1
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    detokenize: bool = True
    salt: str = ""
    priority: int = 0
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class TaskMaker:
    """Makes tasks for one model.

    `longest`: the most tokens of a sequence; `tokenizer` gives what the model has; `defaults` are the parameters where
    none are given; `numbers` are those of the tasks' names.
    """

    longest: int
    tokenizer: Callable[[], Tokenizer]
    defaults: Callable[[], SamplingParams]
    numbers: itertools.count[int]

    def ids(self, prompt: PromptType) -> tuple[int, ...]:
        """The ids of a prompt. Raises RequestError."""
        plain = plain_prompt(prompt)
        return tuple(self.tokenizer().encode(plain) if isinstance(plain, str) else plain)

    def tasks(self, prompts: Sequence[PromptType], params: Params, stop: Sequence[str]) -> list[Task]:
        """What is to be done for each prompt. Raises RequestError."""
        each = list(params) if isinstance(params, Sequence) else [params or self.defaults()] * len(prompts)
        if len(each) != len(prompts):
            raise RequestError(f"There are {len(prompts)} prompts and {len(each)} parameters.", param="params")
        known: dict[tuple[int, int | None], EngineParams] = {}
        return [self._task(prompt, one, tuple(stop), known) for prompt, one in zip(prompts, each, strict=True)]

    def _task(
        self,
        prompt: PromptType,
        params: AnyParams,
        stop: tuple[str, ...],
        known: dict[tuple[int, int | None], EngineParams],
    ) -> Task:
        """`known` is what parameters of the same call became, by their identity and the room that they fill."""
        ids = self.ids(prompt)
        name, text, salt = f"llm-{next(self.numbers)}", text_of(prompt), salt_of(prompt)
        if isinstance(params, EngineParams):
            return Task(name, text, ids, params.validate(), stops=stop, salt=salt)
        ids = params.cut(ids, self.longest)
        key = id(params), len(ids) if params.max_tokens is None else None
        found = known.get(key)
        if found is None:
            found = known[key] = params.resolve(self.longest - len(ids), self.tokenizer)
        shown = (params.include_stop_str_in_output, params.skip_special_tokens, params.detokenize)
        return Task(name, text, ids, found, params.n, (*params.stops, *stop), *shown, salt=salt)


def ranked(tasks: list[Task], priority: Sequence[int], policy: str) -> list[Task]:
    """The tasks with their priorities, under the scheduler's `policy`. Raises RequestError."""
    if len(priority) != len(tasks):
        raise RequestError(f"There are {len(tasks)} prompts and {len(priority)} priorities.", param="priority")
    if any(priority) and policy != "priority":
        raise RequestError("priority needs scheduling_policy='priority'.", param="priority")
    return [replace(task, priority=one) for task, one in zip(tasks, priority, strict=True)]
