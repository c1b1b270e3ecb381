"""What fails by chance and what does not: planted tests, in real runs of pytest and test.sh."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from apart import apart
from chance import MOST, RUNS, History, forget, judge
from fakes.controlled_cuda import gpu
from patience import TooLate, decided, in_time

pytestmark = pytest.mark.cold  # dozens of runs of pytest
TESTS = Path(__file__).parent
CONFTEST = """
pytest_plugins = ["chance"]

def pytest_addoption(parser):
    for mode in ("--quick", "--full"):
        parser.addoption(mode, action="store_true")
"""
SETTINGS = """[pytest]
testpaths = tests
addopts = -rfE -p no:hypothesispytest
markers =
  vm
  timing
  crowd
  quiet
"""
LIBRARY = "make_venv() { :; }\n"  # there is an environment
PLANTED = """
import os
import threading
from pathlib import Path
import pytest
from patience import TooLate, decided, in_time

def late(times, request):
    '''Later than its limit in the first `times` runs of a test.'''
    seen = Path(__file__).with_name(request.node.name)
    run = seen.stat().st_size + 1 if seen.exists() else 1
    seen.write_text("x" * run)
    print(f"run {run} has printed this")
    in_time("the answer", 3.0 if run <= times else 1.0, 2.0)

def marked(mark):
    return pytest.param(mark, marks=getattr(pytest.mark, mark))

@pytest.mark.parametrize("mark", map(marked, ["vm", "timing", "crowd"]))
def test_once(mark, request):
    late(1, request)

@pytest.fixture
def what_is_shared(request):
    late(1, request)

@pytest.mark.timing
def test_once_in_a_fixture(what_is_shared):
    pass

@pytest.mark.timing
def test_once_decided_otherwise(request):
    seen = Path(__file__).with_name(request.node.name)
    again = seen.exists()
    seen.touch()
    print(f"run {1 + again} has printed this")
    decided("one plan", again, ("the answer", 3.0, 2.0))

@pytest.mark.timing
@pytest.mark.parametrize("number", range(4))
def test_four(number, request):
    late(1, request)

@pytest.mark.timing
def test_red_twice(request):
    late(2, request)

def test_red_unmarked(request):
    late(1, request)

@pytest.mark.timing
def test_red_wrong(request):
    late(0, request)
    assert 2 + 2 == 5, "took too long"

@pytest.mark.timing
def test_red_decided_otherwise_in_time(request):
    late(0, request)
    decided("one plan", False, ("an iteration", 1.0, 2.0))

@pytest.mark.timing
def test_red_wrong_and_late(request):
    try:
        assert 2 + 2 == 5
    finally:
        late(1, request)

@pytest.fixture
def what_is_left():
    yield
    assert not "a process"

@pytest.mark.timing
def test_red_late_and_leaves_something(request, what_is_left):
    late(1, request)

@pytest.mark.timing
@pytest.mark.timeout(1)
def test_red_hangs(request):
    late(0, request)
    threading.Event().wait()

@pytest.mark.timing
def test_red_is_left_out_alone(request):
    late(1, request)
    pytest.skip("not here")

def test_green():
    assert "PYTEST_XDIST_WORKER" in os.environ  # beside others, by scripts/test.sh

@pytest.mark.timing
@pytest.mark.quiet
def test_green_alone():
    assert "PYTEST_XDIST_WORKER" not in os.environ

@pytest.mark.timing
def test_crashes(request):
    late(0, request)
    os.abort()
"""
workers = pytest.mark.parametrize("workers", [0, 2])


class Suite:
    """A folder with the planted tests, the plugin and scripts/test.sh."""

    def __init__(self, root: Path) -> None:
        self.root, self.by_chance = root, root / "by chance"
        self.tests = root / "tests"
        for name, text in {
            "tests/conftest.py": CONFTEST, "tests/test_planted.py": PLANTED, "pytest.ini": SETTINGS,
            "scripts/lib.sh": LIBRARY,
        }.items():  # fmt: skip
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text)
        shutil.copy(TESTS.parent / "scripts" / "test.sh", root / "scripts")
        for tool in ("ruff", "mypy", "lint-imports"):
            (root / "bin").mkdir(exist_ok=True)
            (root / "bin" / tool).symlink_to("/bin/true")
        (root / "bin" / "python").write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
        )
        (root / "bin" / "python").chmod(0o755)
        for name in ("chance.py", "patience.py"):
            shutil.copy(TESTS / name, self.tests)

    def run(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **{name: value for name, value in os.environ.items() if name[:7] != "PYTEST_"},
            "XDG_CACHE_HOME": str(self.root / "cache"), "COLUMNS": "200",
            "PYTHONDONTWRITEBYTECODE": "1", **variables,
        }  # fmt: skip
        return subprocess.run(
            words, cwd=self.root, env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip

    def pytest(self, chosen: str, workers: int) -> subprocess.CompletedProcess[str]:
        apart = ["-n", str(workers)] if workers else []
        words = ["-m", "pytest", "tests", "-k", chosen, "--chance", str(self.by_chance), *apart]
        return self.run(sys.executable, *words)

    def all(self, chosen: str, *mode: str) -> subprocess.CompletedProcess[str]:
        """scripts/test.sh, of the first line."""
        return self.run(
            "bash", self.root / "scripts" / "test.sh", *mode, PYTEST_ADDOPTS=f"-k {chosen!r}",
            ADAPTRA_VENV=str(self.root), ADAPTRA_TEST_NEWEST="0",
        )  # fmt: skip

    def judged(self) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, self.tests / "chance.py", self.by_chance)

    def runs_of(self, test: str) -> int:
        return (self.tests / test).stat().st_size


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


@workers
def test_too_late_once_is_chance(workers: int, suite: Suite) -> None:
    done = suite.pytest("test_once", workers)
    assert done.returncode == 0, done.stdout
    assert "5 failed by chance" in done.stdout.splitlines()[-1]
    names = suite.by_chance.read_text().splitlines()
    assert len(names) == 5
    for name in names:
        _, _, shown = done.stdout.partition(f"\nfailed by chance: {name}\n")
        first, _, second = shown.partition("\n  the second run, alone:\n")
        assert "TooLate: " in first
        assert "the answer: took 3, has to be below 2" in first
        assert "run 1 has printed this" in first
        assert "run 2 has printed this" in second.partition("\nfailed by chance: ")[0]
    assert "\nFAILED " not in done.stdout
    assert "\nERROR " not in done.stdout


@workers
def test_nothing_else_is_chance(workers: int, suite: Suite) -> None:
    done = suite.pytest("test_red", workers)
    assert done.returncode == 1
    assert suite.by_chance.read_text() == ""
    failed = {line.split(" - ")[0] for line in done.stdout.splitlines() if line[:7] == "FAILED "}
    runs = {
        "test_red_twice": 2, "test_red_unmarked": 1, "test_red_wrong": 1,
        "test_red_decided_otherwise_in_time": 1, "test_red_wrong_and_late": 1,
        "test_red_late_and_leaves_something": 1, "test_red_hangs": 1,
        "test_red_is_left_out_alone": 2,
    }  # fmt: skip
    assert {name.rpartition("::")[2] for name in failed} == set(runs)
    assert {name: suite.runs_of(name) for name in runs} == runs
    assert "Run once more, alone" in done.stdout
    assert "run 2 has printed this" in done.stdout


def test_a_crash_is_no_chance(suite: Suite) -> None:
    done = suite.pytest("test_crashes or (test_once and vm)", 2)
    assert done.returncode == 1
    assert suite.runs_of("test_crashes") == 1
    assert suite.by_chance.read_text().splitlines() == ["tests/test_planted.py::test_once[vm]"]
    assert "FAILED tests/test_planted.py::test_crashes" in done.stdout


def test_without_the_option_all_is_red_at_once(suite: Suite) -> None:
    done = suite.run(sys.executable, "-m", "pytest", "tests", "-k", "test_once and vm")
    assert done.returncode == 1
    assert suite.runs_of("test_once[vm]") == 1


@workers
def test_four_by_chance_are_a_failure(workers: int, suite: Suite) -> None:
    assert suite.pytest("test_four", workers).returncode == 0
    judged = suite.judged()
    assert judged.returncode == 1
    assert judged.stdout.count("\n  failed by chance: tests/test_planted.py::test_four") == 4
    assert f"more than {MOST} failed by chance" in judged.stdout


# --- what is remembered --------------------------------------------------------------------------


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path)


def test_three_are_none(history: History) -> None:
    assert judge(["a", "b", "c"], history) == 0


def test_twice_in_ten_runs_is_red_whenever_it_is_seen_again(
    history: History, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judge(["a", "a"], history) == 0, "on both lines of one run"
    assert forget("a", history) == 0
    assert judge(["a"], history) == 0
    for _ in range(RUNS - 2):
        assert judge(["b"][: _ == 3], history) == 0
    assert judge(["a"], history) == 1
    assert judge([], history) == 0, "the first was eleven runs ago"
    assert judge(["b"], history) == 1
    printed = capsys.readouterr().out
    assert "adaptra: b failed by chance 2 times in 10 runs" in printed
    assert str(history.path) in printed
    assert judge(["c"], history) == 0, "the cause of b may be mended"
    assert judge(["b"], history) == 1
    assert forget("b", history) == 0
    assert judge(["b"], history) == 0
    assert forget("d", history) == 1


@pytest.mark.parametrize("damage", ["", "[", "{}", "[1]", '[{"names": 3}]', "\udcff"])
def test_a_damaged_memory_is_begun_anew(damage: str, history: History) -> None:
    history.path.write_bytes(damage.encode(errors="surrogateescape"))
    assert judge(["a"], history) == 0
    assert judge(["a"], history) == 1


def test_without_a_memory_the_run_itself_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    nowhere = History(tmp_path / "file")
    assert judge(["a"], nowhere) == 0
    assert judge(["a", "b", "c", "d"], nowhere) == 1
    assert "this run could not be noted" in capsys.readouterr().out


def test_suites_that_end_together_are_all_noted(suite: Suite) -> None:
    def ends(number: int) -> int:
        file = suite.root / f"{number}"
        file.write_text(f"test_{number}\n")
        return suite.run(sys.executable, suite.tests / "chance.py", file).returncode

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ends, range(8))) == [0] * 8
    with History(suite.root / "cache" / "adaptra-tests").runs() as runs:
        assert sorted(run["names"] for run in runs) == [[f"test_{n}"] for n in range(8)]


# --- from other processes ------------------------------------------------------------------------


def is_late(_: object) -> None:
    in_time("the answer", 3.0, 2.0)


def is_wrong_and_late(_: object) -> None:
    try:
        raise ValueError(3)
    finally:
        in_time("the answer", 3.0, 2.0)


@pytest.mark.parametrize("elsewhere", [gpu.run, lambda body: apart(body, None)])
def test_late_elsewhere_is_late_here(elsewhere: Callable[..., None]) -> None:
    with pytest.raises(TooLate, match="the answer: took 3, has to be below 2"):
        elsewhere(is_late)
    with pytest.raises(AssertionError, match="the answer: took 3") as found:
        elsewhere(is_wrong_and_late)
    assert not isinstance(found.value, TooLate)


def test_no_number_is_not_late() -> None:
    for took, limit in ((math.nan, 1.0), (1.0, math.nan)):
        with pytest.raises(AssertionError, match="not a number") as found:
            in_time("the answer", took, limit)
        assert not isinstance(found.value, TooLate)


KEPT, MISSED = ("an iteration", 1.0, 2.0), ("a message", 3.0, 2.0)


def test_what_was_decided_otherwise_is_late_unless_all_kept_time() -> None:
    decided("one plan", True)
    decided("one plan", True, KEPT, MISSED)
    for meanwhile in ((), (MISSED,), (KEPT, MISSED)):
        with pytest.raises(TooLate, match="one plan: not so"):
            decided("one plan", False, *meanwhile)
    for kept in ((KEPT,), (KEPT, KEPT), (KEPT, ("a message", math.nan, 2.0))):
        with pytest.raises(AssertionError, match="one plan: not so") as found:
            decided("one plan", False, *kept)
        assert not isinstance(found.value, TooLate)


# --- scripts/test.sh -----------------------------------------------------------------------------


def in_short(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.partition("\n== in short\n")[2]


def test_a_run_with_one_is_green_and_the_next_with_the_same_is_red(suite: Suite) -> None:
    name = "tests/test_planted.py::test_once[vm]"
    first = suite.all("test_once and vm")
    assert first.returncode == 0, first.stdout
    assert f"adaptra: 1 failed by chance; the last {RUNS} runs are in " in in_short(first)
    assert f"\n  failed by chance: {name}\n" in in_short(first)
    assert "adaptra: all tests passed" in in_short(first)
    (suite.tests / "test_once[vm]").unlink()
    second = suite.all("test_once and vm")
    assert second.returncode == 1
    assert f"adaptra: {name} failed by chance 2 times in 2 runs" in in_short(second)
    assert "all tests passed" not in second.stdout
    quick = suite.all("test_green and not alone", "--quick")
    assert quick.returncode == 0, quick.stdout
    assert "by chance" not in in_short(quick)


def test_a_run_says_all_that_makes_it_red(suite: Suite) -> None:
    done = suite.all("test_four or test_red_wrong or test_green")
    assert done.returncode == 1
    assert "test_green" not in in_short(done)
    assert " 1 passed, " in done.stdout.partition("\n== in short\n")[0].splitlines()[-1]
    assert in_short(done).count("  failed by chance: ") == 4
    assert f"adaptra: more than {MOST} failed by chance" in in_short(done)
    assert "  FAILED tests/test_planted.py::test_red_wrong - " in in_short(done)
    assert suite.runs_of("test_red_wrong") == 1
