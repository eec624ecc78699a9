"""Which cases of a matrix a run takes, by runs of another pytest on matrices of sizes drawn at random."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SEED = random.randrange(1 << 30)
# Nothing but pytest and the plugin: others are installed, whose imports take seconds.
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path)), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "200",
}  # fmt: skip
# A matrix with a case that is always taken, one of a GPU and one that is skipped, and a test of a single case.
MATRIX = """
import pytest

ROWS, COLUMNS, FAILING = {rows}, {columns}, {failing}
WHOLE = "always", "skip", "gpu"


@pytest.mark.matrix("row", take={take})
@pytest.mark.parametrize("column", range(COLUMNS))
@pytest.mark.parametrize("row", range(ROWS))
def test_drawn(row, column):
    assert (row, column) not in FAILING


@pytest.mark.matrix
@pytest.mark.parametrize(
    "case",
    [*range(COLUMNS), *(pytest.param(100 + at, marks=getattr(pytest.mark, mark)) for at, mark in enumerate(WHOLE))],
)
def test_whole(case):
    pass


def test_single():
    pass
"""


class Matrix:
    """A folder with those tests, and what pytest takes of them."""

    def __init__(self, folder: Path) -> None:
        print(f"seed {SEED}")
        rng = random.Random(SEED)
        self.folder, self.take = folder, rng.randint(1, 3)
        self.rows, self.columns = rng.randint(3, 6), rng.randint(6, 12)
        (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -ra\nmarkers = gpu\n")
        self.write()

    def write(self, failing: set[tuple[int, int]] | None = None) -> None:
        text = MATRIX.format(rows=self.rows, columns=self.columns, take=self.take, failing=failing or set())
        (self.folder / "test_cases.py").write_text(text)

    def run(self, *arguments: str, place: Path | None = None) -> str:
        command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.matrix", *arguments]
        run = subprocess.run(
            command, cwd=place or self.folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        assert run.returncode in (0, 1), run.stdout + run.stderr
        return run.stdout

    def taken(self, *arguments: str) -> set[str]:
        return set(re.findall(r"::(test_\S+) (?:PASSED|FAILED|SKIPPED)", self.run(*arguments)))


@pytest.fixture
def matrix(tmp_path: Path) -> Matrix:
    return Matrix(tmp_path)


def test_of_every_row_so_many_cases_are_taken_and_a_seed_says_which(matrix: Matrix) -> None:
    seeds = [str(SEED + number) for number in range(3)]
    runs = [matrix.taken("--matrix-seed", seed) for seed in seeds]
    for run in runs:
        for row in range(matrix.rows):
            assert sum(case.startswith(f"test_drawn[{row}-") for case in run) == matrix.take
        # One that was drawn, and those that are not drawn from, of which the skipped one counts for nothing.
        assert {"test_whole[100]", "test_whole[101]", "test_whole[102]", "test_single"} <= run
        assert sum(case.startswith("test_whole") for case in run) == 4
    assert len(set(map(frozenset, runs))) > 1
    assert matrix.taken("--matrix-seed", seeds[0], "-p", "no:cacheprovider") == runs[0]
    # The cases of a row are the same where others are not collected.
    part = matrix.taken("--matrix-seed", seeds[0], "-k", "test_drawn and not test_drawn[0-")
    assert part == {case for case in runs[0] if re.match(r"test_drawn\[[^0]-", case)}


def test_the_whole_is_taken_on_demand(matrix: Matrix) -> None:
    assert len(matrix.taken("--matrix=all")) == matrix.rows * matrix.columns + matrix.columns + 4


def test_what_is_named_runs(matrix: Matrix) -> None:
    names = [f"test_drawn[{row}-{column}]" for row in range(matrix.rows) for column in range(matrix.columns)]
    assert matrix.taken(*(f"test_cases.py::{name}" for name in names[:9])) == set(names[:9])
    assert matrix.taken("test_cases.py::test_drawn") == set(names)
    # From another folder, and by a path from the root.
    below = matrix.folder / "below"
    below.mkdir()
    assert "9 passed" in matrix.run(*(f"../test_cases.py::{name}" for name in names[:9]), place=below)
    assert "9 passed" in matrix.run(*(f"{matrix.folder}/test_cases.py::{name}" for name in names[-9:]), place=below)


def test_what_failed_runs_again_under_any_seed(matrix: Matrix) -> None:
    everything = {(row, column) for row in range(matrix.rows) for column in range(matrix.columns)}
    matrix.write(failing=everything)
    output = matrix.run("--matrix-seed", str(SEED))
    assert f"matrices: --matrix=drawn --matrix-seed={SEED}" in output
    failed = set(re.findall(rf"^FAILED \S+::(\S+) - \(--matrix-seed={SEED}\) assert", output, re.MULTILINE))
    assert len(failed) == matrix.rows * matrix.take
    for other in range(2):
        assert matrix.taken("--lf", "--lfnf=none", "--matrix-seed", str(SEED + 1 + other)) == failed


def test_each_commit_has_a_seed_of_its_own(matrix: Matrix) -> None:
    def seed() -> str:
        return re.findall(r"--matrix-seed=(\d+)", matrix.run("--collect-only"))[0]

    def commit(message: str) -> None:
        git = ["git", "-c", "user.name=T", "-c", "user.email=t@example.com"]
        for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", message]):
            subprocess.run([*git, *words], cwd=matrix.folder, check=True)

    days = seed()
    assert len(days) == len("20260101")
    commit("one")
    first = seed()
    assert seed() == first != days
    commit("two")
    assert seed() != first


@pytest.mark.parametrize("mark", ['matrix("colour")', "matrix(share=2)"])
def test_a_mark_that_draws_from_nothing_is_refused(mark: str, matrix: Matrix) -> None:
    file = matrix.folder / "test_cases.py"
    file.write_text(file.read_text().replace("mark.matrix\n", f"mark.{mark}\n"))
    command = [sys.executable, "-m", "pytest", "-p", "tests.matrix"]
    run = subprocess.run(command, cwd=matrix.folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_cases.py::test_whole[0] is parametrized by ['case'], and not as its " in run.stderr + run.stdout
