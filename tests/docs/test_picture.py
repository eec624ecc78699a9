"""docs/picture.py: what it asks Prometheus for, and what becomes of the answers; the picture itself is for eyes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from docs.picture import Span, draw, lines, panels, with_gaps
from tests.serving import serving

from stoker_operator.spec.service import InferenceService, parse

SLEEPS = {"autoscaling": {"min": 0, "max": 1, "scaleToZero": {}}}
TRIES = {"canary": {"weight": 4, "runtime": {"args": ["--seed", "3"]}}}
SPAN = Span(1_700_000_000.0, 1_700_003_600.0, 7.0)
ASKED: list[dict[str, list[str]]] = []


def service(**spec: object) -> InferenceService:
    head = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService"}
    meta, least = {"namespace": "spaces", "name": "nap"}, {"model": {"uri": "hf://o/m"}, "resources": {"gpus": 1}}
    return parse({**head, "metadata": meta, "spec": {**least, **spec}})


class Prometheus(BaseHTTPRequestHandler):
    """Answers each query with two series, one of which says nothing at one moment."""

    def do_GET(self) -> None:
        ASKED.append(parse_qs(urlsplit(self.path).query))
        values = [[1_700_000_000.0, "1.5"], [1_700_000_018.0, "NaN"], [1_700_000_036.0, "2"]]
        result = [{"metric": {"result": name}, "values": values} for name in ("full", "left")]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": {"result": result}}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def prometheus() -> Iterator[str]:
    ASKED.clear()
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Prometheus)) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}"


def test_every_panel_is_asked_for_as_grafana_would(prometheus: str) -> None:
    found = panels(service(**SLEEPS))
    drawn = [(panel, list(lines(prometheus, panel, SPAN))) for panel in found]
    assert len(ASKED) == sum(len(panel["targets"]) for panel in found)
    assert not [asked for asked in ASKED if "$" in asked["query"][0] or asked["step"] != ["18.0"]]
    assert [asked for asked in ASKED if "[28s]" in asked["query"][0]], "four scrapes"
    [became] = [shown for panel, shown in drawn if panel["title"].endswith("by what became of them")]
    assert [line.name for line in became] == ["full", "left"]
    assert became[0].points == ((1_700_000_000.0, 1.5), (1_700_000_036.0, 2.0))


def test_a_picture_is_drawn(prometheus: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra bench draws")
    draw([(panel, list(lines(prometheus, panel, SPAN))) for panel in panels(service(**SLEEPS))], SPAN, "nap",
         tmp_path / "nap.png")  # fmt: skip
    assert (tmp_path / "nap.png").stat().st_size > 10_000


def test_a_part_of_a_dashboard_has_no_holes() -> None:
    found = panels(service(**SLEEPS, **TRIES), ["Canary", "Whole request"])
    assert [panel["title"].partition(":")[0] for panel in found] == ["Whole request", *["Canary"] * 5]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in found]
    assert places == [(0, 0), (12, 0), (0, 8), (12, 8), (0, 16), (12, 16)]


def test_where_nobody_said_anything_no_line_is_drawn() -> None:
    found = with_gaps([(0.0, 4.0), (5.0, 5.0), (20.0, 6.0)], 5.0)
    assert [at for at, _ in found] == [0.0, 5.0, 10.0, 20.0]
    assert math.isnan(found[2][1])
