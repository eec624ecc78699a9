"""A soak's memory and gaps, drawn over its time.

Knows nothing of verdicts.
"""

from __future__ import annotations

from pathlib import Path

from stoker_runtime.bench.figure import new_figure
from stoker_runtime.bench.soak.tally import TENTHS, Tally


def save_plot(tally: Tally, path: Path) -> None:
    """Draw memory by sample and the P99 gap by tenth.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure(7, 5)
    memory, gaps = figure.subplots(2, 1, sharex=True)
    places = [100 * sample.at for sample in tally.samples]
    memory.plot(places, [sample.rss_mib for sample in tally.samples], label="resident, all processes")
    device = [(100 * sample.at, sample.device_mib) for sample in tally.samples if sample.device_mib is not None]
    if device:
        memory.plot([at for at, _ in device], [value for _, value in device], label="device")
    memory.set_ylabel("MiB")
    memory.set_ylim(bottom=0)
    memory.legend()
    middles = [100 * (tenth + 0.5) / TENTHS for tenth in range(TENTHS)]
    gaps.plot(middles, [each.quantile(0.99) * 1e3 for each in tally.gaps], marker="o")
    gaps.set_ylabel("P99 between events, ms")
    gaps.set_ylim(bottom=0)
    gaps.set_xlabel("percent of the load")
    for axes in (memory, gaps):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path)
