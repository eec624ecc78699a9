"""How many drafts the next step verifies, by what drafts of these sequences brought so far and what steps cost.

A step of R sequences with k drafts each takes `cost(R, k)` plain steps and gives R tokens and those of the drafts that
are accepted. Per sequence two figures are kept: how often there is a draft at all, and how often a draft whose
predecessors were accepted is accepted, too. A sequence that was seen in few steps is taken for one like the others. The
k with the most tokens a second is taken, 0 among them; where it is 0 a narrow step now and then looks whether that has
changed, so seldom that it costs half a percent.

A draft model has to compute what it lacks of a sequence before it drafts. That is done where it promises to pay, or
where so many steps went by that it is within the same half percent.

Both figures can be read (`costs`, `gains`): whoever runs a server shall know what a rejected draft costs there.

Invariants: no k is taken that has proved slower than none; decisions change no token, only when it comes. Costs are
compared at one padded size. Knows nothing of tokens and devices; does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker_runtime.drafts.settings import DraftCosts

Costs = tuple[tuple[int, int, float, bool], ...]
Gains = tuple[tuple[int, float], ...]

LADDER = (1, 2, 3, 4, 6, 8, 12, 16)
LEARNING = 0.125
"""Weight of a sequence's newest step in its figures, which are means before it had so many steps."""
ALL_LEARNING = 0.125
"""The same in the figures of all, for each sequence of a step: where all texts change, one step of many tells it."""
OTHERS = 2
"""Steps of its own that weigh as much as the figures of all."""
WELL_KNOWN = 1024
"""Steps after which the figures of all say next to nothing of a sequence."""
FIRST_FOUND, FIRST_ACCEPTED = 0.6, 0.6
COST_OF_DRAFT = 0.1
"""Of a plain step, for each draft a sequence, until it was measured."""
FEWEST_TIMINGS = 3
"""Steps of a kind that have to be timed before their cost is believed."""
STALE = 4096
"""Steps after which the cost of a k that nobody took meanwhile is found out anew."""
WORTH = 1.03
"""A verification has to promise so much more than a plain step: figures are noisy."""
HOPELESS = 0.05
PROBE_LOSS = 0.005
FEWEST_BETWEEN_PROBES, MOST_BETWEEN_PROBES = 16, 128
MOST_CREDIT = 40.0
"""Plain steps that a draft model's catching up may cost, which promises nothing, after a long while without any."""
CAUTION = 4
"""What is to be gained by catching up has to be so much more than it costs: nobody knows how long a text gets."""
FIGURES_EVERY = 128
"""Steps for which figures that are told stand: they go with each step, and take as long to work out as a short one."""
REVIEW = 8
"""Steps for which a decision stands, unless sequences come or go, or a step brought less than its drafts cost."""


class RowPace:
    """What drafts bring for one sequence: how often there is one, and how often one is accepted.

    `_seen` and `_judged` are the steps that told the one and the other.
    """

    __slots__ = ("_judged", "_seen", "accepted", "found")

    def __init__(self, found: float, accepted: float, steps: int = WELL_KNOWN) -> None:
        """Figures that `steps` steps told."""
        self.found = found
        self.accepted = accepted
        self._seen = self._judged = steps

    def learn(self, offered: int, taken: int, weight: float) -> None:
        """A step verified `offered` drafts and accepted the first `taken`."""
        self._seen += 1
        self.found += max(weight, 1 / self._seen) * ((offered > 0) - self.found)
        if offered:
            self._judged += 1
            accepted = taken / min(offered, taken + 1)
            self.accepted += max(weight, 1 / self._judged) * (accepted - self.accepted)

    def among(self, others: RowPace) -> RowPace:
        """The same, leaning to `others` as far as few steps told it."""
        found, accepted = OTHERS / (OTHERS + self._seen), OTHERS / (OTHERS + self._judged)
        return RowPace(
            self.found + found * (others.found - self.found),
            self.accepted + accepted * (others.accepted - self.accepted),
        )

    def gain(self, k: int) -> float:
        """Tokens that `k` drafts bring beyond the one that a plain step gives."""
        rate = min(self.accepted, 0.995)
        return self.found * rate * (1 - rate**k) / (1 - rate)


class Timing:
    """What a kind of step takes, leaning to its quick ones: a slow one may have been held up by something else."""

    __slots__ = ("at", "samples", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.samples = 0
        self.at = 0

    def learn(self, seconds: float, at: int) -> None:
        """A step took `seconds`; it is the `at`-th of all."""
        if self.samples < FEWEST_TIMINGS:
            self.seconds = min(seconds, self.seconds)
        else:
            weight = 0.5 if seconds < self.seconds else 0.1
            self.seconds += weight * (min(seconds, 2 * self.seconds) - self.seconds)
        self.samples, self.at = self.samples + 1, at


class Pace:
    """The figures of all sequences, the costs of steps, and the decision that stands."""

    def __init__(
        self, most: int, verify_tokens: int, batch_limit: int = 0, model: DraftCosts | None = None
    ) -> None:
        """At most `most` drafts a sequence, `verify_tokens` tokens a step, from `batch_limit` sequences on none.

        `model`: what a draft model's passes cost, where one drafts.
        """
        self.ladder = tuple(sorted({k for k in LADDER if k < most} | {most}))
        self._verify_tokens = verify_tokens
        self._batch_limit = batch_limit or 1 << 30
        self._all = RowPace(FIRST_FOUND, FIRST_ACCEPTED)
        self._timings: dict[tuple[int, int], Timing] = {}
        self._steps = 0
        self._decision: tuple[int, ...] = ()
        self._k = 0
        self._steps_left = 0
        self._since_probe = 0
        self._model = model
        self._cost_of_draft = COST_OF_DRAFT + (model.draft if model else 0.0)
        self._credit = 0.0
        self._accepted = 0
        self._figures: tuple[Costs, Gains] = (), ()
        self._figures_at = -FIGURES_EVERY

    def new_row(self) -> RowPace:
        """The figures of a sequence of which nothing is known: those of the others."""
        return RowPace(self._all.found, self._all.accepted, 0)

    def learn(self, row: RowPace, offered: int, taken: int) -> None:
        """A step verified `offered` drafts of a sequence and accepted the first `taken`."""
        row.learn(offered, taken, LEARNING)
        self._all.learn(offered, taken, ALL_LEARNING)
        self._accepted += taken

    def spent(self, rows: int, k: int, seconds: float) -> None:
        """A step of `rows` sequences with `k` drafts each took `seconds`, among others of its kind."""
        timing = self._timings.get((_size(rows), k))
        if timing is None or self._steps - timing.at > STALE:
            timing = self._timings[_size(rows), k] = Timing(seconds)
        timing.learn(seconds, self._steps)

    def cost(self, rows: int, k: int) -> float:
        """Plain steps that one with `k` drafts is worth in time; from its neighbours where it was not measured."""
        size = _size(rows)
        plain = self._timings.get((size, 0))
        if k == 0 or plain is None or plain.samples < FEWEST_TIMINGS:
            return 1 + self._cost_of_draft * k
        timed = ((other, self._timings.get((size, other))) for other in self.ladder)
        known = [(other, found.seconds / plain.seconds) for other, found in timed if found and self._believed(found)]
        if not known:
            return 1 + self._cost_of_draft * k
        nearest, ratio = min(known, key=lambda each: abs(each[0] - k))
        return 1 + (ratio - 1) * k / nearest

    def figures(self) -> tuple[Costs, Gains]:
        """What steps cost, and what drafts bring, as of the last `FIGURES_EVERY` steps.

        Costs are of every size of batch that was seen, and of one sequence: (sequences at most, k, plain steps that a
        step with k drafts each takes, whether that was timed). What was not is assumed, or goes by its neighbours.
        Gains are of each k: (k, tokens beyond one that k drafts bring a sequence), by what was accepted lately.
        """
        if self._steps - self._figures_at >= FIGURES_EVERY:
            self._figures_at = self._steps
            sizes = sorted({0} | {size for size, _ in self._timings})
            costs = tuple(
                (1 << size, k, self.cost(1 << size, k), self._timed(size, k))
                for size in sizes
                for k in self.ladder
                if self._fits((1 << size >> 1) + 1, k)
            )
            self._figures = costs, tuple((k, self._all.gain(k)) for k in self.ladder)
        return self._figures

    def choose(self, rows: Sequence[RowPace | None], *, changed: bool) -> tuple[int, tuple[int, ...]]:
        """k of the next step, and each sequence's bound on its own drafts; None are sequences that may have none.

        `changed`: sequences came or went since the last call.
        """
        self._steps += 1
        self._since_probe += 1
        self._credit = min(self._credit + PROBE_LOSS, MOST_CREDIT)
        if changed or self._steps_left <= 0 or len(self._decision) != len(rows) or self._disappoints(len(rows)):
            self._steps_left = REVIEW
            self._decide(rows)
        self._steps_left -= 1
        self._accepted = 0
        interval = self._between_probes(len(rows))
        if self._since_probe > interval and self._fits(len(rows), 1) and any(rows):
            self._since_probe = 0
            k = max(self._k, 1)
            return k, tuple(k if row else 0 for row in rows)
        return self._k, self._decision

    def catching_up(self, lacking: int) -> float:
        """Plain steps that it costs to have a draft model compute `lacking` tokens."""
        return lacking * self._model.token if self._model is not None else 0.0

    def catches_up(self, row: RowPace, lacking: int, left: int, rows: int) -> bool:
        """Whether to have a draft model compute `lacking` tokens of a sequence among `rows`, with `left` yet to come.

        What does not promise to pay is taken off the steps that may be lost.
        """
        if self._model is None:
            return True
        cost, gain = self.catching_up(lacking), row.among(self._all).gain(self._k)
        # All rows wait for it, and one gains; half of what may come is what comes, for want of knowledge.
        if CAUTION * cost * rows <= left / 2 * gain / (1 + gain):
            return True
        if cost > self._credit:
            return False
        self._credit -= cost
        return True

    def _timed(self, size: int, k: int) -> bool:
        plain, found = (self._timings.get((size, each)) for each in (0, k))
        return plain is not None and plain.samples >= FEWEST_TIMINGS and found is not None and self._believed(found)

    def _believed(self, timing: Timing) -> bool:
        return timing.samples >= FEWEST_TIMINGS and self._steps - timing.at <= STALE

    def _disappoints(self, rows: int) -> bool:
        """Whether the drafts of the step that was read last brought less than they cost, as far as that is known."""
        timing = self._timings.get((_size(rows), self._k))
        known = timing is not None and self._believed(timing)
        return self._k > 0 and known and self._accepted < (self.cost(rows, self._k) - 1) * rows

    def _decide(self, rows: Sequence[RowPace | None]) -> None:
        count, best, self._k = len(rows), WORTH, 0
        known = [row.among(self._all) if row is not None else None for row in rows]
        hopeful = [row is not None and row.found * row.accepted > HOPELESS for row in known]
        paying = [row for row, hopes in zip(known, hopeful, strict=True) if row is not None and hopes]
        if paying:
            for k in self.ladder:
                if self._fits(count, k):
                    worth = (count + sum(row.gain(k) for row in paying)) / count / self.cost(count, k)
                    if worth > best:
                        best, self._k = worth, k
        self._decision = tuple(self._k if hopes else 0 for hopes in hopeful)

    def _fits(self, rows: int, k: int) -> bool:
        return rows < self._batch_limit and rows * (k + 1) <= self._verify_tokens

    def _between_probes(self, rows: int) -> int:
        loss = (self.cost(rows, self.ladder[0]) - 1) / PROBE_LOSS
        return int(min(max(loss, FEWEST_BETWEEN_PROBES), MOST_BETWEEN_PROBES))


def _size(rows: int) -> int:
    return (rows - 1).bit_length()
