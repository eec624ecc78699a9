"""A benchmark's row, and how rows are shown: a table beside the peer's figures, and a plot.

Invariants: a ratio is shown only beside a row whose output was verified. Knows nothing of how rows are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker_runtime.bench.figure import new_figure
from stoker_runtime.bench.verify import UNCHECKED, Verdict

COLUMNS = (
    "N", "tok/s", "vLLM", "ratio", "goal", "TPOT ms", "vLLM", "limit", "goal", "prefill ms", "ptok/s", "p50 s",
    "P95-P50", "output",
)  # fmt: skip
WIDTHS = (5, 9, 8, 6, 8, 8, 6, 6, 6, 10, 8, 7, 8, 64)


@dataclass(frozen=True, slots=True)
class ExpertsTouched:
    """Distinct experts that a step read, of `experts` a layer: a random router's say little if few.

    `least`, `mean` and `most` are over the layers that have experts; `tokens` is how many the step had.
    """

    tokens: int
    experts: int
    least: int
    mean: float
    most: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """What drafts brought in a round: tokens that were verified and accepted, and sequences' tokens in each step."""

    offered: int
    accepted: int
    tokens_per_step: float


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Of a round whose prompts begin with `tokens` tokens alike: steps, and those that attended them once for all."""

    tokens: int
    steps: int
    shared: int


@dataclass(frozen=True, slots=True)
class Row:
    """One measured row; seconds and milliseconds as named. `peer` is the row of peers.json, where there is one."""

    key: str
    n: int
    tok_s: float
    tpot_ms: float
    wall_s: float
    prefill_ms: float
    prefill_tok_s: float
    p50_s: float
    spread: float
    verdict: Verdict
    peer: dict[str, float]
    experts: ExpertsTouched | None = None
    drafted: Drafted | None = None
    prefix: SharedPrefix | None = None


def _cell(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def cells(row: Row) -> list[str]:
    """One row's cells, as text."""
    peer, verdict = row.peer, row.verdict
    vllm = peer.get("vllm_tok_s") or peer.get("vllm_prefill_tok_s")
    ours = row.prefill_tok_s if "vllm_prefill_tok_s" in peer else row.tok_s
    ratio = ours / vllm if vllm else None
    if "vllm_prefill_ms" in peer:
        ratio, vllm = peer["vllm_prefill_ms"] / row.prefill_ms, peer["vllm_prefill_ms"]
    checked = f"{verdict.sequences} of {row.n} requests, {verdict.positions} tokens"
    said = f"{checked}, {verdict.ties} ties <= {verdict.worst:.2f}, mean {verdict.mean:.3f} <= {verdict.most_mean:.3f}"
    output = f"right ({said})" if verdict.passed else f"WRONG ({verdict.wrong} of {said})"
    if verdict == UNCHECKED:
        output = "not checked"
    goal = peer.get("goal_tok_s") or peer.get("goal_prefill_tok_s") or peer.get("goal_prefill_ms")
    return [
        str(row.n), _cell(row.tok_s), _cell(vllm), _cell(ratio if verdict.passed else None, 2), _cell(goal),
        _cell(row.tpot_ms, 3), _cell(peer.get("vllm_tpot_ms"), 2), _cell(peer.get("limit_tpot_ms"), 2),
        _cell(peer.get("goal_tpot_ms"), 2), _cell(row.prefill_ms, 2), _cell(row.prefill_tok_s), _cell(row.p50_s, 3),
        f"{row.spread:.1%}", output,
    ]  # fmt: skip


def print_line(cells: Sequence[object], widths: Sequence[int]) -> None:
    """A line of a table, its cells to the right of columns of these widths."""
    print("  ".join(str(cell).rjust(width) for cell, width in zip(cells, widths, strict=True)), flush=True)


def print_table(rows: Sequence[Row], *, header: bool) -> None:
    """Print rows, with the header when asked."""
    if header:
        print_line(COLUMNS, WIDTHS)
    for row in rows:
        print_line(cells(row), WIDTHS)
        if row.experts is not None:
            seen = row.experts
            print(
                f"#  N={row.n}: a step of {seen.tokens} tokens reads {seen.mean:.1f} of {seen.experts} experts a layer "
                f"({seen.least} to {seen.most})", flush=True,
            )  # fmt: skip
        if row.drafted is not None:
            seen_drafts = row.drafted
            share = seen_drafts.accepted / max(seen_drafts.offered, 1)
            print(
                f"#  N={row.n}: {seen_drafts.accepted} of {seen_drafts.offered} drafted tokens accepted ({share:.0%}), "
                f"{seen_drafts.tokens_per_step:.2f} tokens a sequence and step", flush=True,
            )  # fmt: skip
        if row.prefix is not None:
            alike = row.prefix
            print(
                f"#  N={row.n}: {alike.shared} of {alike.steps} steps attended the {alike.tokens:,} tokens that all "
                "prompts begin with once for all rows", flush=True,
            )  # fmt: skip


def save_plot(rows: Sequence[Row], path: Path) -> None:
    """Draw tok/s over N with the peer's and the goal's points.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    axes.plot([row.n for row in rows], [row.tok_s for row in rows], marker="o", label="Stoker")
    peers = [(row.n, row.peer["vllm_tok_s"]) for row in rows if "vllm_tok_s" in row.peer]
    if peers:
        axes.plot([n for n, _ in peers], [value for _, value in peers], marker="s", label="vLLM")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("requests submitted together")
    axes.set_ylabel("generated tokens per second")
    axes.set_title(rows[0].key)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path)
