"""What a step's output is to each API process: its own part, as a message.

Knows nothing of sockets and of who sends what.
"""

from __future__ import annotations

from array import array

from stoker_runtime.engine.messages import Finished, Started, Step
from stoker_runtime.request import EngineStats
from stoker_runtime.scheduler.draft import StepOutput
from stoker_runtime.scheduler.sequence import Sequence


def step_message(output: StepOutput, stats: EngineStats, received: int) -> Step:
    """A step's output for one client."""
    return Step(
        stats=stats,
        received=received,
        handles=array("q", [sequence.handle for sequence in output.sequences]),
        tokens=array("i", output.tokens),
        started=[
            Started(each.handle, each.cached_tokens, max(0.0, (each.admitted or 0.0) - each.request.arrival))
            for each in output.started
        ],
        finished=[
            Finished(each.handle, each.finish, each.stop_token, each.error, each.complete)
            for each in output.finished
            if each.finish is not None
        ],
        logprobs=output.logprobs,
        prompt_logprobs=[(sequence.handle, entries) for sequence, entries in output.prompt_logprobs],
        vectors=[(sequence.handle, vector) for sequence, vector in output.vectors],
    )


def split_by_client(output: StepOutput) -> dict[int, StepOutput]:
    """A step's output, one part per client index."""
    parts: dict[int, StepOutput] = {}

    def part(sequence: Sequence) -> StepOutput:
        return parts.setdefault(sequence.client, StepOutput())

    for row, sequence in enumerate(output.sequences):
        mine = part(sequence)
        mine.sequences.append(sequence)
        mine.tokens.append(output.tokens[row])
        if output.logprobs:
            mine.logprobs.append(output.logprobs[row])
    for sequence, entries in output.prompt_logprobs:
        part(sequence).prompt_logprobs.append((sequence, entries))
    for sequence, vector in output.vectors:
        part(sequence).vectors.append((sequence, vector))
    for sequence in output.started:
        part(sequence).started.append(sequence)
    for sequence in output.finished:
        part(sequence).finished.append(sequence)
    return parts
