"""scripts/faults.py: what counts as caught, in a package of one function."""

from pathlib import Path

import pytest
from faults import Copy, Judge, Outcome, judged, table
from fitting import Fault

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.large, pytest.mark.cold]  # a dozen runs of pytest

CODE = "def half(x):\n    return x / 2\n"
TESTS = """
import pathlib, pytest
from megatron_adaptra.sums import half

def test_of_four():
    assert half(4) == 2

def test_of_three():
    assert half(3) == 1

@pytest.fixture
def quarter():
    assert half(half(4)) == 1

def test_of_what_is_shared(quarter):
    pass

def test_by_chance():
    seen = pathlib.Path(__file__).with_name("seen")
    times = len(seen.read_text()) if seen.exists() else 0
    seen.write_text("x" * (times + 1))
    assert times != 1
"""


def package(folder: Path) -> Copy:
    (folder / "megatron_adaptra").mkdir()
    (folder / "tests").mkdir()
    for name, text in (
        ("megatron_adaptra/__init__.py", ""), ("megatron_adaptra/sums.py", CODE),
        ("tests/test_sums.py", TESTS),
    ):  # fmt: skip
        (folder / name).write_text(text)
    return Copy(folder)


def look_at(folder: Path, find: str, put: str, test: str) -> Outcome:
    fault = Fault("x", "It is wrong.", "half", find, put, (f"tests/test_sums.py::{test}",))
    outcome = Judge(package(folder)).look_at(fault)
    assert (folder / "megatron_adaptra" / "sums.py").read_text() == CODE
    return outcome


@pytest.mark.parametrize("test", ["test_of_four", "test_of_what_is_shared"])
def test_caught(tmp_path, test):
    outcome = look_at(tmp_path, "x / 2", "x / 3", test)
    assert (outcome.caught_by, outcome.problem) == (f"tests/test_sums.py::{test}", "")
    assert f"| x | It is wrong. | `test_sums.py::{test}` |" in table([outcome])


@pytest.mark.parametrize(
    ("find", "put", "test", "says"),
    [
        ("x / 2", "x / 2.0", "test_of_four", "NOT CAUGHT: all its tests pass"),
        ("x / 2", "y / 2", "test_of_four", "NOT CAUGHT: an error, not a failing test: test_of_fo"),
        ("x / 2", "x / 3", "test_of_three", "NOT CAUGHT: tests/test_sums.py::test_of_three fails "
         "without the fault, too"),
        ("x / 2", "x / 3", "test_by_chance", "NOT CAUGHT: tests/test_sums.py::test_by_chance fails "
         "by chance: the second time it passes"),
        ("x / 2", "x / 3", "test_of_six", "NOT CAUGHT: pytest ended with status 4"),
        ("x / 4", "x / 3", "test_of_four", "does not fit any more: `x / 4` stands 0 times"),
    ],
)  # fmt: skip
def test_not_caught(tmp_path, find, put, test, says):
    outcome = look_at(tmp_path, find, put, test)
    assert outcome.problem.startswith(says), outcome.problem
    assert outcome.caught_by == ""


def test_several_are_looked_at_side_by_side_each_in_its_own_copy():
    tests = ("tests/test_sums.py::test_of_four", "tests/test_sums.py::test_of_what_is_shared")
    faults = [
        Fault(f"{test} {put}", "It is wrong.", "half", "x / 2", put, (test,))
        for test in tests for put in ("x / 3", "x / 2.0")
    ]  # fmt: skip
    found = {outcome.id: outcome.problem for outcome in judged(faults, 2, package)}
    for fault in faults:
        assert (found.pop(fault.id) == "") == (fault.put == "x / 3")
    assert not found
