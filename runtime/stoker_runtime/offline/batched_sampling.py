"""Sampling without a model: `sample` chooses the next token of each row of logits, as the engine would.

    from stoker_runtime import SamplingParams, sample
    tokens = sample(logits, SamplingParams(temperature=0.7, top_p=0.9, seed=1))

Invariants: the engine's own sampler does it, on the device where the logits are; a row's token depends on its own
logits, parameters and texts alone, so a seed gives the same token in any company.
Knows nothing of models and text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from stoker_runtime.errors import RequestError
from stoker_runtime.request import SamplingParams as EngineParams
from stoker_runtime.sampling.sampler import Sampler
from stoker_runtime.sampling.token_rules import TokenRules
from stoker_runtime.sampling_params import SamplingParams
from stoker_runtime.step.batch import SlotAssign

Texts = Sequence[Sequence[int]]


def sample(
    logits: Tensor,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    prompts: Texts | None = None,
    outputs: Texts | None = None,
) -> list[int]:
    """A token for each row of `logits [rows, vocabulary]`, which stay as they are.

    `sampling_params`: one for all, or one each. `prompts` and `outputs` are the tokens before, row by row; penalties,
    bad words, `min_tokens` and seeds go by them. `n`, stops and log-probabilities are for whole generations and do not
    matter here. Raises RequestError for numbers that do not agree, for what no engine would take, and for constraints,
    which need a tokenizer.
    """
    rows, vocab = logits.shape
    if rows == 0:
        return []
    listed = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params or SamplingParams()] * rows
    before, after = prompts or [()] * rows, outputs or [()] * rows
    for name, given in (("sampling_params", listed), ("prompts", before), ("outputs", after)):
        if len(given) != rows:
            raise RequestError(f"There are {rows} rows of logits and {len(given)} {name}.", param=name)
    params = [_resolve(each, len(output)) for each, output in zip(listed, after, strict=True)]
    masked = _mask(logits.float().clone(), params, after)
    plain = [replace(each, allowed_token_ids=(), bad_words=tuple((one,) for one in each.bad_tokens)) for each in params]
    sampler = Sampler(rows, vocab, logits.device)
    sampler.assign([_assign(row, each, before[row], after[row]) for row, each in enumerate(plain)])
    slots = torch.arange(rows, dtype=torch.int32, device=logits.device)
    last = [max(len(prompt) + len(output) - 1, 0) for prompt, output in zip(before, after, strict=True)]
    positions = torch.tensor(last, dtype=torch.int32, device=logits.device)
    found: list[int] = sampler(masked, slots, positions, sampler.mode_of(range(rows))).tolist()
    return found


def _resolve(params: SamplingParams, said: int) -> EngineParams:
    """What the engine gets. Raises RequestError."""
    room = max(said + 1, params.min_tokens, params.max_tokens or 0)

    def no_tokenizer() -> None:
        raise RequestError("Bad words as text, and constraints, need a model's tokenizer; use LLM.generate.")

    found = params.resolve(room, no_tokenizer)  # type: ignore[arg-type]
    if found.constraint is not None:
        no_tokenizer()
    return found


def _mask(logits: Tensor, params: Sequence[EngineParams], outputs: Texts) -> Tensor:
    """`logits` with what the rules of allowed tokens and bad words take away at minus infinity."""
    vocab = logits.shape[1]
    for row, each in enumerate(params):
        if each.masked:
            words = np.full(-(-vocab // 32), -1, dtype=np.int32)
            TokenRules(each, vocab).apply(words, outputs[row])
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab]
            logits[row].masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)
    return logits


def _assign(row: int, params: EngineParams, prompt: Sequence[int], output: Sequence[int]) -> SlotAssign:
    seed = random.getrandbits(63) if params.seed is None else params.seed & (2**63 - 1)
    return SlotAssign(row, params, seed, params.stop_token_ids, (*prompt, *output), len(prompt))
