"""scripts/faults.py: what counts as caught, in a package of one function."""

from pathlib import Path

import pytest
from faults import Copy, judged, table
from fitting import Fault

ROOT = Path(__file__).resolve().parents[3]

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


SAYS = [
    ("x / 2", "x / 3", "test_of_four", ""),
    ("x / 2", "x / 3", "test_of_what_is_shared", ""),
    ("x / 2", "x / 2.0", "test_of_four", "NOT CAUGHT: all its tests pass"),
    ("x / 2", "y / 2", "test_of_four", "NOT CAUGHT: an error, not a failing test: test_of_four"),
    ("x / 2", "x / 3", "test_of_three", "NOT CAUGHT: tests/test_sums.py::test_of_three fails "
     "without the fault, too"),
    ("x / 2", "x / 3", "test_by_chance", "NOT CAUGHT: tests/test_sums.py::test_by_chance fails "
     "by chance: the second time it passes"),
    ("x / 4", "x / 3", "test_of_four", "does not fit any more: `x / 4` stands 0 times"),
]  # fmt: skip


def test_what_is_caught_and_what_is_not():
    """Two at a time, each in a copy of its own, which is as before when the next one is put in."""
    faults = [
        Fault(str(i), "It is wrong.", "half", find, put, (f"tests/test_sums.py::{test}",))
        for i, (find, put, test, _) in enumerate(SAYS)
    ]
    found = {int(outcome.id): outcome for outcome in judged(faults, 2, package)}
    for i, (_, _, test, says) in enumerate(SAYS):
        assert found[i].problem.startswith(says)
        assert bool(found[i].problem) == bool(says), found[i].problem
        assert found[i].caught_by == ("" if says else f"tests/test_sums.py::{test}")
    assert "| 0 | It is wrong. | `test_sums.py::test_of_four` |" in table([found[0]])
