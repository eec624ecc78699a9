"""Draws a service's dashboard: its own JSON, with what a Prometheus answers to its queries, as Grafana would.

    python -m docs.picture --prometheus http://127.0.0.1:9090 --minutes 10 chat.yaml chat.png

The pictures in docs/operate.md are made by it: where there is no Grafana, a reader still sees what one would show.
Invariants: draws the panels that the operator writes, where it puts them, and no value that Prometheus did not answer.
Knows nothing of what the panels say.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from stoker_operator import manifests
from stoker_operator.spec.service import InferenceService, parse

Panel = Mapping[str, Any]
_POINTS = 200
# What Grafana makes of $__rate_interval: four scrapes, or what a point stands for.
_SCRAPES = 4
_COLUMNS = 24
_UNITS = {"s": "seconds", "percentunit": "share", "reqps": "requests/s", "ops": "per second"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a graph: (seconds since 1970, value) of each point."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Span:
    """What is drawn: seconds since 1970, and the seconds between two scrapes."""

    begin: float
    end: float
    scrape: float

    @property
    def step(self) -> float:
        """Seconds between two points."""
        return max((self.end - self.begin) / _POINTS, 1.0)

    @property
    def rate_interval(self) -> str:
        """The window over which rates are taken."""
        return f"{int(max(_SCRAPES * self.scrape, self.step + self.scrape))}s"


def panels(service: InferenceService, about: Collection[str] = ()) -> list[Panel]:
    """Those of a service's dashboard; with `about`, those alone whose title has one of these words, put together."""
    [text] = manifests.dashboard(service)["data"].values()
    found: list[Panel] = json.loads(text)["panels"]
    if not about:
        return found
    chosen = [panel for panel in found if any(word in panel["title"] for word in about)]
    places = [panel["gridPos"] for panel in found]
    return [{**panel, "gridPos": place} for panel, place in zip(chosen, places, strict=False)]


def lines(prometheus: str, panel: Panel, span: Span) -> Iterator[Line]:
    """What Prometheus answers to a panel's queries. Raises OSError where it does not."""
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", span.rate_interval)
        asked = {"query": query, "start": span.begin, "end": span.end, "step": span.step}
        with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{urllib.parse.urlencode(asked)}") as answer:
            series = json.loads(answer.read())["data"]["result"]
        for each in series:
            points = tuple((float(at), float(value)) for at, value in each["values"] if value != "NaN")
            yield Line(legend(target["legendFormat"], each["metric"]), points)


def legend(form: str, labels: Mapping[str, str]) -> str:
    """A line's name: `{{label}}` stands for the label's value."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), form)


def with_gaps(points: Sequence[tuple[float, float]], step: float) -> list[tuple[float, float]]:
    """The points with a NaN wherever some are missing: nobody was there to say anything."""
    found: list[tuple[float, float]] = []
    for at, value in points:
        if found and at - found[-1][0] > 1.5 * step:
            found.append((found[-1][0] + step, math.nan))
        found.append((at, value))
    return found


def draw(drawn: Sequence[tuple[Panel, Sequence[Line]]], span: Span, title: str, file: Path) -> None:
    """Write the picture, PNG or SVG by the file's name. Needs matplotlib, of the extra `bench`."""
    from matplotlib.dates import DateFormatter
    from matplotlib.figure import Figure

    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel, _ in drawn)
    figure = Figure(figsize=(13, rows * 0.29), layout="constrained", facecolor="#f4f5f5")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    grid = figure.add_gridspec(rows, _COLUMNS)
    for panel, found in drawn:
        place = panel["gridPos"]
        axes = figure.add_subplot(grid[place["y"] : place["y"] + place["h"], place["x"] : place["x"] + place["w"]])
        axes.set_title(panel["title"], loc="left", fontsize=9, fontweight="bold")
        for line in found:
            points = with_gaps(line.points, span.step)
            times = [datetime.fromtimestamp(at, UTC) for at, _ in points]
            axes.plot(times, [value for _, value in points], ".-", ms=2, lw=1, label=line.name)
        unit = panel["fieldConfig"]["defaults"]["unit"]
        axes.set_ylabel(_UNITS.get(unit, ""), fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_xlim(datetime.fromtimestamp(span.begin, UTC), datetime.fromtimestamp(span.end, UTC))
        axes.xaxis.set_major_formatter(DateFormatter("%H:%M"))
        axes.tick_params(labelsize=7)
        axes.grid(color="#dddddd", lw=0.5)
        if any(line.name for line in found):
            axes.legend(fontsize=7, loc="upper left", frameon=False, ncols=4)
    figure.savefig(file, dpi=80)


def main() -> None:
    """Ask, and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("manifest", type=Path, help="the service's")
    parser.add_argument("file", type=Path, help="the picture, .png or .svg")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="how long before the end (default: %(default)g)")
    parser.add_argument("--end", type=float, default=time.time(), help="seconds since 1970 (default: now)")
    parser.add_argument("--scrape", type=float, default=15, help="seconds between two scrapes (default: %(default)g)")
    parser.add_argument("--about", action="append", default=[], metavar="WORD", help="panels with it alone; repeatable")
    options = parser.parse_args()
    service = parse(yaml.safe_load(options.manifest.read_text(encoding="utf-8")))
    span = Span(options.end - 60 * options.minutes, options.end, options.scrape)
    drawn = [(panel, list(lines(options.prometheus, panel, span))) for panel in panels(service, options.about)]
    draw(drawn, span, f"Stoker / {service.namespace} / {service.name}", options.file)


if __name__ == "__main__":
    main()
