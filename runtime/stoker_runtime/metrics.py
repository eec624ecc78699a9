"""Every Prometheus metric of the server, defined once, under the names that vLLM's dashboards and autoscalers read.

Invariants: observing costs a bisection and two additions (no locks, no label look-ups), because it happens for
every token; exposition is built at scrape time from these plain numbers and the engine's newest heartbeat. All
observations of a process come from one thread, the event loop's. They stand on a board that all API processes share,
so a scrape of any of them shows the whole server.
Knows nothing of HTTP. Units: seconds, tokens, fractions of 1.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from stoker_runtime.process.board import Board
from stoker_runtime.request import EngineStats, FinishReason

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


class Histogram:
    """Counts per bucket, and the sum of what was observed, on a board."""

    __slots__ = ("_board", "_bounds", "_cells", "_first", "_sum", "help", "name")

    def __init__(self, board: Board, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = help_text
        self._bounds = tuple(map(float, bounds))
        self._board = board
        self._cells = board.cells
        self._first = board.take(len(bounds) + 2)
        self._sum = self._first + len(bounds) + 1

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        cells = self._cells
        cells[self._first + bisect_left(self._bounds, value)] += times
        cells[self._sum] += value * times

    def family(self, model: str) -> Metric:
        """The metric as it is exposed: cumulative buckets."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for at, bound in enumerate((*map(str, self._bounds), "+Inf")):
            total += int(self._board.total(self._first + at))
            buckets.append((bound, total))
        family = HistogramMetricFamily(self.name, self.help, labels=["model_name"])
        family.add_metric([model], buckets, self._board.total(self._sum))
        return family


class EngineGauge(NamedTuple):
    """A gauge or counter that is read off the engine's heartbeat."""

    name: str
    help: str
    read: Callable[[EngineStats], float]


GAUGES = (
    EngineGauge("vllm:num_requests_running", "Sequences in the running batch", lambda s: s.running),
    EngineGauge("vllm:num_requests_waiting", "Sequences that wait for a place in the batch", lambda s: s.waiting),
    EngineGauge(
        "vllm:kv_cache_usage_perc",
        "KV cache in use, 1 is full",
        lambda s: s.pages_used / s.pages_total if s.pages_total else 0.0,
    ),
    EngineGauge(
        "vllm:num_requests_swapped",
        "Sequences among the waiting whose KV rests in host memory",
        lambda s: s.swapped,
    ),
    EngineGauge(
        "vllm:cpu_cache_usage_perc",
        "Host pool held by preempted sequences, 1 is full",
        lambda s: s.host_pages_used / s.host_pages_total if s.host_pages_total else 0.0,
    ),
    EngineGauge("stoker:step_seconds", "Duration of the engine's newest step", lambda s: s.step_seconds),
    EngineGauge(
        "stoker:step_age_seconds",
        "Time that the step which this process waits for has taken, as long as its slowest rank; 0 without one",
        lambda s: s.step_age,
    ),
    EngineGauge("stoker:sleep_freed_bytes", "Bytes of the device given back while asleep", lambda s: s.bytes_freed),
    EngineGauge("stoker:sleep_host_bytes", "Bytes of weights in host memory", lambda s: s.host_weight_bytes),
    EngineGauge("stoker:batch_tokens", "Tokens of the engine's newest step", lambda s: s.batch_tokens),
)
COUNTERS = (
    EngineGauge("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", lambda s: s.prefix_queries),
    EngineGauge("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", lambda s: s.prefix_hits),
    EngineGauge(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens not cached on the device, looked up in the host pool",
        lambda s: s.host_queries,
    ),
    EngineGauge("vllm:external_prefix_cache_hits", "Prompt tokens found in the host pool alone", lambda s: s.host_hits),
    EngineGauge("stoker:kv_pages_swapped_out", "KV pages copied to host memory", lambda s: s.pages_swapped_out),
    EngineGauge("stoker:kv_pages_swapped_in", "KV pages copied back from host memory", lambda s: s.pages_swapped_in),
    EngineGauge("vllm:num_preemptions", "Sequences that gave up their pages to others", lambda s: s.preemptions),
    EngineGauge("vllm:prompt_tokens", "Prompt tokens processed", lambda s: s.prompt_tokens),
    EngineGauge("vllm:generation_tokens", "Tokens generated", lambda s: s.generation_tokens),
    EngineGauge(
        "stoker:kv_event_messages", "Messages of what the prefix cache gained and lost", lambda s: s.kv_event_messages
    ),
    EngineGauge(
        "stoker:kv_event_messages_lost",
        "Of them, those that were never sent because too many waited",
        lambda s: s.kv_event_messages_lost,
    ),
    EngineGauge("stoker:engine_steps", "Steps the engine took", lambda s: s.steps),
    EngineGauge(
        "stoker:shared_prefix_steps",
        "Of them, decode steps that attended what all rows begin with once for all",
        lambda s: s.shared_prefix_steps,
    ),
)
SPECULATION = (
    EngineGauge(
        "vllm:spec_decode_num_drafts", "Drafts that were verified, each of one or several tokens", lambda s: s.drafts
    ),
    EngineGauge("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted and verified", lambda s: s.draft_tokens),
    EngineGauge(
        "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted", lambda s: s.accepted_tokens
    ),
    EngineGauge(
        "stoker:spec_decode_cost_tokens",
        "Tokens that plain steps would have given in the time that drafts took: what accepted ones have to exceed",
        lambda s: s.draft_cost_tokens,
    ),
)
"""Counters of a server that verifies drafts."""


SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's words, by level."""


class EngineView(NamedTuple):
    """What of an engine its metrics are made of: its newest heartbeat, tokens of a page, and pages."""

    stats: Callable[[], EngineStats]
    page_size: int
    num_pages: int


class ServerMetrics(Collector):
    """The numbers of one server. `model_name` labels every series."""

    def __init__(self, model_name: str, board: Board | None = None) -> None:
        self.model_name = model_name
        self.board = board = board or Board()
        self._engines: tuple[EngineView, ...] = (EngineView(EngineStats, 0, 0),)
        self._max_loras = 0
        self._finished = {reason: board.take(1) for reason in FinishReason}
        self._rejected = board.take(1)
        self._rate_limited = {kind: board.take(1) for kind in ("requests", "tokens")}
        self._spans_sent, self._spans_lost = board.take(1), board.take(1)
        self._first_token = Histogram(board, "vllm:time_to_first_token_seconds", "Arrival to first token", _FIRST)
        self._inter_token = Histogram(board, "vllm:inter_token_latency_seconds", "Time between tokens", _TOKEN)
        self._end_to_end = Histogram(board, "vllm:e2e_request_latency_seconds", "Arrival to last token", _LATENCY)
        self._queue = Histogram(board, "vllm:request_queue_time_seconds", "Arrival to a place in the batch", _LATENCY)
        self._per_token = Histogram(
            board,
            "vllm:request_time_per_output_token_seconds",
            "A request's mean time per token after the first",
            _TOKEN,
        )
        self._prompt = Histogram(board, "vllm:request_prompt_tokens", "Prompt tokens of a request", _SIZES)
        self._generated = Histogram(board, "vllm:request_generation_tokens", "Tokens generated for a request", _SIZES)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def attach(self, engines: Sequence[EngineView]) -> None:
        """Read gauges and counters from these engines from now on. Several have a label `engine`, their number."""
        self._engines = tuple(engines)

    def attach_adapters(self, max_loras: int) -> None:
        """Tell of adapters too, of which a step may use `max_loras`."""
        self._max_loras = max_loras

    def first_token(self, seconds: float, queued: float | None = None) -> None:
        """A sequence's first token came `seconds` after its request; it `queued` seconds of them, if known."""
        self._first_token.observe(seconds)
        if queued is not None:
            self.queued(queued)

    def queued(self, seconds: float) -> None:
        """A sequence, or a text to pool, waited `seconds` for its place in a batch."""
        self._queue.observe(seconds)

    def inter_token(self, seconds: float, tokens: int) -> None:
        """`tokens` came, each `seconds` after the one before it."""
        self._inter_token.observe(seconds, tokens)

    def request_finished(
        self, reason: FinishReason, seconds: float, decode_seconds: float, prompt_tokens: int, tokens: int
    ) -> None:
        """A sequence ended `seconds` after its request; its tokens after the first took `decode_seconds`."""
        self.board.cells[self._finished[reason]] += 1
        self._end_to_end.observe(seconds)
        self._prompt.observe(prompt_tokens)
        self._generated.observe(tokens)
        if tokens > 1:
            self._per_token.observe(decode_seconds / (tokens - 1))

    def request_rejected(self) -> None:
        """A request was turned away because the queue was full."""
        self.board.cells[self._rejected] += 1

    def rate_limited(self, kind: str) -> None:
        """A request was turned away by a rate limit, of `requests` or of `tokens`."""
        self.board.cells[self._rate_limited[kind]] += 1

    def spans(self, sent: int, lost: int) -> None:
        """So many spans went to the collector, and so many could not. By one thread, which no other cell is of."""
        self.board.cells[self._spans_sent] += sent
        self.board.cells[self._spans_lost] += lost

    def expose(self) -> bytes:
        """The text that a scrape reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every metric, for prometheus_client."""
        every, labels = [each.stats() for each in self._engines], ["model_name"]
        several = len(every) > 1
        own = [*labels, "engine"] if several else labels
        values = [[self.model_name, str(number)] if several else [self.model_name] for number in range(len(every))]
        counters = (*COUNTERS, *(SPECULATION if every[0].accepted_by_position else ()))
        for kind, family in ((GAUGES, GaugeMetricFamily), (counters, CounterMetricFamily)):
            for gauge in kind:
                found = family(gauge.name, gauge.help, labels=own)
                for value, stats in zip(values, every, strict=True):
                    found.add_metric(value, gauge.read(stats))
                yield found
        yield _sleep_state(own, values, every)
        if every[0].accepted_by_position:
            yield self._accepted_by_position(own, values, every)
            yield _draft_costs(own, values, every)
            yield _draft_gains(own, values, every)
        idle = GaugeMetricFamily("stoker:idle_seconds", "Time since the last request; 0 while one runs", labels=labels)
        idle.add_metric([self.model_name], self.board.idle_seconds(time.monotonic()))
        yield idle
        yield self._success()
        rejected = CounterMetricFamily("stoker:requests_rejected", "Requests refused by a full queue", labels=labels)
        rejected.add_metric([self.model_name], self.board.total(self._rejected))
        yield rejected
        yield self._turned_away()
        for name, said, at in (
            ("stoker:spans_sent", "Spans of traces that a collector took", self._spans_sent),
            ("stoker:spans_lost", "Spans of traces that no collector took", self._spans_lost),
        ):
            spans = CounterMetricFamily(name, said, labels=labels)
            spans.add_metric([self.model_name], self.board.total(at))
            yield spans
        if self._engines[0].page_size:
            names = ("block_size", "num_gpu_blocks", "num_cpu_blocks")
            info = GaugeMetricFamily("vllm:cache_config_info", "KV cache configuration", labels=[*own, *names])
            for value, each, stats in zip(values, self._engines, every, strict=True):
                sizes = (each.page_size, each.num_pages, stats.host_pages_total)
                info.add_metric([*value, *map(str, sizes)], 1.0)
            yield info
        if self._max_loras:
            yield self._lora_info(every[0])
        histograms = (self._first_token, self._inter_token, self._end_to_end, self._queue, self._per_token)
        for histogram in (*histograms, self._prompt, self._generated):
            yield histogram.family(self.model_name)

    def _lora_info(self, stats: EngineStats) -> Metric:
        """Which adapters run and wait now, in labels, as vLLM tells it; the value is the time."""
        labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and of waiting requests; the value is the time",
            labels=labels,
        )
        # Two of a name are one that was replaced under its requests, and the one in its place.
        listed = (",".join(sorted(set(names))) for names in (stats.running_adapters, stats.waiting_adapters))
        family.add_metric([str(self._max_loras), *listed], time.time())
        return family

    def _accepted_by_position(
        self, labels: Sequence[str], values: Sequence[list[str]], every: Sequence[EngineStats]
    ) -> Metric:
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by their place in the draft",
            labels=[*labels, "position"],
        )
        for value, stats in zip(values, every, strict=True):
            for position, accepted in enumerate(stats.accepted_by_position):
                family.add_metric([*value, str(position)], accepted)
        return family

    def _turned_away(self) -> Metric:
        family = CounterMetricFamily(
            "stoker:requests_rate_limited", "Requests refused by a rate limit", labels=["model_name", "limit"]
        )
        for kind, at in self._rate_limited.items():
            family.add_metric([self.model_name, kind], self.board.total(at))
        return family

    def _success(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Sequences that ended, by reason", labels=["model_name", "finished_reason"]
        )
        for reason, at in self._finished.items():
            family.add_metric([self.model_name, reason.value], self.board.total(at))
        return family


def _draft_costs(labels: Sequence[str], values: Sequence[list[str]], every: Sequence[EngineStats]) -> Metric:
    """What verifying costs, by size of batch and k."""
    family = GaugeMetricFamily(
        "stoker:spec_decode_step_cost",
        "Plain decode steps that a step of up to so many sequences takes in time which verifies so many drafts of each",
        labels=[*labels, "batch_size", "num_speculative_tokens", "source"],
    )
    for value, stats in zip(values, every, strict=True):
        for size, k, cost, timed in stats.draft_costs:
            family.add_metric([*value, str(size), str(k), "measured" if timed else "assumed"], cost)
    return family


def _draft_gains(labels: Sequence[str], values: Sequence[list[str]], every: Sequence[EngineStats]) -> Metric:
    """What drafts bring, by k."""
    family = GaugeMetricFamily(
        "stoker:spec_decode_expected_tokens",
        "Tokens that so many drafts bring a sequence beyond the one of a plain step, by what was accepted lately",
        labels=[*labels, "num_speculative_tokens"],
    )
    for value, stats in zip(values, every, strict=True):
        for k, gain in stats.draft_gains:
            family.add_metric([*value, str(k)], gain)
    return family


def _sleep_state(labels: Sequence[str], values: Sequence[list[str]], every: Sequence[EngineStats]) -> Metric:
    """1 for the state that each engine is in, as vLLM tells it."""
    family = GaugeMetricFamily(
        "vllm:engine_sleep_state",
        "1 for awake, or for where the weights of a sleeper are; 0 for the others",
        labels=[*labels, "sleep_state"],
    )
    for value, stats in zip(values, every, strict=True):
        now = SLEEP_STATES[stats.sleep_level if stats.asleep else 0]
        for state in SLEEP_STATES:
            family.add_metric([*value, state], state == now)
    return family
