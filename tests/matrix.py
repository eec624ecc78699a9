"""Large matrices of cases, of which an ordinary run takes a part that a seed draws; `--matrix=all` takes the whole.

`@pytest.mark.matrix("model", take=2)` says that of each `model` two cases are taken, whatever else they are
parametrized by; without a name, that so many are taken of all of the test's. `pytest.param(..., marks=ALWAYS)`, with
`ALWAYS = pytest.mark.always`, is a case that alone proves something and is taken by every run.

Invariants: the same seed takes the same cases, however tests are selected otherwise; every group keeps at least one
case that is not skipped; what the command line names by `::`, and with `--lf` what failed, runs though it was not
drawn. Each commit has a seed of its own, so that a red one stays red; the header and the line of each failure show it.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

# Cases with these marks are not drawn from: a GPU is quick, and what it runs is shown nowhere else.
WHOLE = ("skip", "always", "gpu")
DRAWN = pytest.StashKey[tuple[int, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("matrices of cases")
    group.addoption("--matrix", choices=("drawn", "all"), default="drawn", help="take a part of each matrix, or all")
    group.addoption("--matrix-seed", type=int, help="what draws the part; the commit's own where it is not said")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "matrix(*names, take=1): take so many cases of each value of these parameters")
    config.addinivalue_line("markers", "always: a case of a matrix that every run takes")
    if config.option.matrix_seed is None:
        config.option.matrix_seed = seed_of_commit(config.rootpath)


def seed_of_commit(folder: Path) -> int:
    """A number for the commit that is checked out in `folder`; for the day, where there is no git or no commit."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return int(datetime.now(UTC).strftime("%Y%m%d"))
    return int(commit.stdout[:7], 16)


def options(config: pytest.Config) -> list[str]:
    """What has another pytest draw the same cases."""
    return [f"--matrix={config.option.matrix}", f"--matrix-seed={config.option.matrix_seed}"]


def pytest_report_header(config: pytest.Config) -> str:
    return "matrices: " + " ".join(options(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not drawn. Marks and skips are known by now, and `--lf` chooses among what is left."""
    groups: dict[object, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("matrix")) is not None:
            groups[group_of(item, mark)].append(item)
    if config.option.matrix == "all" or not groups:
        return
    asked = named(config)
    left_out = set()
    for group in groups.values():
        [take] = {item.get_closest_marker("matrix").kwargs.get("take", 1) for item in group}  # type: ignore[union-attr]
        drawn = [item for item in group if not any(map(item.get_closest_marker, WHOLE))]
        drawn.sort(key=lambda item: place(config.option.matrix_seed, item.nodeid))
        left_out |= {item for item in drawn[take:] if not asked(item.nodeid)}
    config.stash[DRAWN] = (sum(map(len, groups.values())) - len(left_out), sum(map(len, groups.values())))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def group_of(item: pytest.Item, mark: pytest.Mark) -> object:
    """Cases with equal groups are drawn from together. Raises UsageError for a mark that has nothing to draw from."""
    params: dict[str, Any] | None = getattr(getattr(item, "callspec", None), "params", None)
    if params is None or not set(mark.args) <= set(params) or not set(mark.kwargs) <= {"take"}:
        raise pytest.UsageError(f"{item.nodeid} is parametrized by {[*(params or ())]}, and not as its {mark} says")
    return item.nodeid.partition("[")[0], tuple(repr(params[name]) for name in mark.args)


def drawn(config: pytest.Config, names: Iterable[str], take: int) -> list[str]:
    """So many of `names` as a test takes that walks through them itself; with `--matrix=all` all of them."""
    seed = config.option.matrix_seed
    ordered = sorted(names, key=lambda name: place(seed, name))
    return ordered if config.option.matrix == "all" else ordered[:take]


def place(seed: int, case: str) -> bytes:
    """Where a case stands in the order of the seed; it does not depend on which other cases there are."""
    return hashlib.sha256(f"{seed} {case}".encode()).digest()


def named(config: pytest.Config) -> Callable[[str], bool]:
    """Whether a case was asked for by itself: its name, or its test's, stands on the command line, or --lf runs it."""
    names = [argument.partition("::") for argument in config.args if "::" in argument]
    whole = [f"{(config.invocation_params.dir / file).resolve()}::{rest}" for file, _, rest in names]
    # Where the plugin is left out that knows what failed, its options are not there either.
    again = any(getattr(config.option, name, False) for name in ("lf", "failedfirst"))
    failed = config.cache.get("cache/lastfailed", {}) if again and config.cache else {}

    def asked(nodeid: str) -> bool:
        case = str(config.rootpath / nodeid)
        return nodeid in failed or any(case == name or case.startswith((f"{name}[", f"{name}::")) for name in whole)

    return asked


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A drawn case that fails says so in its line of the summary."""
    report = yield
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.failed and crash is not None and item.get_closest_marker("matrix"):
        crash.message = f"(--matrix-seed={item.config.option.matrix_seed}) {crash.message}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    taken, of = config.stash.get(DRAWN, (0, 0))
    if taken < of:
        terminalreporter.write_line(f"matrices: {taken} of {of} cases, by --matrix-seed={config.option.matrix_seed}")
