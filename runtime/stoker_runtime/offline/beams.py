"""Beam search in this process, behind `LLM.beam_search`: each step asks the engine for one token of every live beam.

Invariants: what the beams of a prompt have in common is computed once, as far as it fills pages of the prefix cache.
Knows nothing of how beams are ranked (sampling/beam.py), and nothing of how the engine is stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stoker_runtime.outputs import BeamSearchOutput, BeamSearchSequence, position_logprobs
from stoker_runtime.request import FinishReason, SamplingParams, TokenLogprobs
from stoker_runtime.sampling.beam import Beam, BeamSearch

if TYPE_CHECKING:
    from stoker_runtime.sampling_params import BeamSearchParams
    from stoker_runtime.text.tokenizer import Tokenizer

Ids = tuple[int, ...]
Step = Callable[[Sequence[tuple[int, Ids]], SamplingParams], list[TokenLogprobs]]
"""Continues each text, told with the number of its prompt, by one token and tells of the likeliest ones there."""


def search_beams(
    prompts: Sequence[Ids], params: BeamSearchParams, longest: int, eos: Sequence[int], step: Step
) -> list[list[Beam]]:
    """The best beams after each prompt, best first; prompt and beam have at most `longest` tokens."""
    stops: frozenset[int] = frozenset() if params.ignore_eos else frozenset(eos)
    searches = [
        BeamSearch(
            len(prompt),
            params.beam_width,
            max(min(params.max_tokens, longest - len(prompt)), 1),
            length_penalty=params.length_penalty,
            stops=stops,
        )
        for prompt in prompts
    ]
    while going := [at for at, search in enumerate(searches) if not search.done]:
        texts = [(at, prompts[at] + beam.tokens) for at in going for beam in searches[at].live]
        asked = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2 * params.beam_width, ignore_eos=True)
        found = step(texts, asked)
        for at in going:
            size = len(searches[at].live)
            searches[at].take(found[:size])
            found = found[size:]
    return [search.best() for search in searches]


def beam_output(prompt: Ids, beams: Sequence[Beam], params: BeamSearchParams, tokenizer: Tokenizer) -> BeamSearchOutput:
    """The beams of one prompt, as vLLM shows them."""
    return BeamSearchOutput([_sequence(prompt, beam, params, tokenizer) for beam in beams])


def _sequence(prompt: Ids, beam: Beam, params: BeamSearchParams, tokenizer: Tokenizer) -> BeamSearchSequence:
    ended = beam.ended_by is not None
    shown = beam.tokens[:-1] if ended and not params.include_stop_str_in_output else beam.tokens
    return BeamSearchSequence(
        tokens=[*prompt, *shown],
        logprobs=position_logprobs(beam.tokens, beam.logprobs, tokenizer.spell),
        cum_logprob=beam.total,
        text=tokenizer.decode([*prompt, *shown]),
        finish_reason=(FinishReason.STOP if ended else FinishReason.LENGTH).value,
        stop_reason=beam.ended_by,
    )
