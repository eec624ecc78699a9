"""What `stoker bench profile` says of recorded launches; recording them takes a GPU."""

from __future__ import annotations

import pytest

from stoker_runtime.bench import profile_step
from stoker_runtime.bench.profile_step import Launch, show, timeline


def step(begin: float, layers: int) -> list[Launch]:
    """A step of `layers` layers of 10 us: attention, and a product that starts 1 us before attention ends."""
    launches = [Launch(begin, begin + 2, "_prepare_decode_kernel")]
    for i in range(layers):
        at = begin + 3 + 10 * i
        launches += [Launch(at, at + 4, "sm90_bf16_decode"), Launch(at + 3, at + 10, f"gemm of layer {i}")]
    return [*launches, Launch(begin + 4 + 10 * layers, begin + 6 + 10 * layers, "argmax")]


def test_the_middle_of_a_step_stands_for_its_layers() -> None:
    lines = timeline([*step(0, 9), *step(100, 9), *step(200, 9)])
    names = [line.split("  ")[-1].strip() for line in lines[1:]]
    assert names == [
        *("_prepare_decode_kernel", "sm90_bf16_decode", "..."),
        *("gemm of layer 3", "sm90_bf16_decode", "..."),
        *("sm90_bf16_decode", "gemm of layer 8", "argmax"),
    ]


def test_gaps_are_to_the_end_of_all_before() -> None:
    cells = [line.split()[:3] for line in timeline([*step(0, 2), *step(30, 2)])[1:]]
    assert cells == [
        ["0.0", "2.0", "0.0"],
        *(["3.0", "4.0", "1.0"], ["6.0", "7.0", "-1.0"]),
        *(["13.0", "4.0", "0.0"], ["16.0", "7.0", "-1.0"]),
        ["24.0", "2.0", "1.0"],
    ]


def test_half_a_step_has_no_timeline() -> None:
    assert timeline(step(0, 3)) == ["  no whole step was recorded"]


def test_kernels_are_shown_by_their_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile_step, "RECORDED_STEPS", 2)
    show(64, [*step(0, 3), *step(40, 3)], 2)
    assert capsys.readouterr().out.splitlines() == [
        "N=64: 0.038 ms a step, 0.037 ms in kernels",
        "     0.012 ms     3.0 x     4.00 us  sm90_bf16_decode",
        "     0.007 ms     1.0 x     7.00 us  gemm of layer 0",
    ]
