"""Lateness that is inconclusive and lateness that is a failure: planted tests, in real pytest."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from inconclusive import CORES, others
from patience import PATIENCE, RUNS, TooLate, decided, in_some_run, in_time, longer_and_longer

pytestmark = pytest.mark.cold  # runs of pytest
SUPPORT = Path(__file__).parents[1] / "support"
CONFTEST = f"""
import os, sys, time
sys.path.insert(0, {str(SUPPORT)!r})
pytest_plugins = ["inconclusive"]

def pytest_configure():
    import inconclusive
    # Others have taken all cores, or none.
    busy = os.environ["CORES"] != "idle"
    inconclusive.others = lambda: busy * inconclusive.CORES * time.monotonic()

def pytest_collection_modifyitems(items):
    import inconclusive
    if os.environ["CORES"] == "at last":  # the file began long ago, when others took nothing
        inconclusive._began[items[0].path] = -1e9, 0.0
"""
PLANTED = """
from pathlib import Path
from patience import in_time

SEEN = Path(__file__).with_name("seen")

def test_late():
    in_time("the answer", 3.0, 2.0)

def test_late_once():
    late = not SEEN.exists()
    SEEN.touch()
    in_time("the answer", 3.0 if late else 1.0, 2.0)

def test_wrong_and_late():
    try:
        assert 2 + 2 == 5
    finally:
        in_time("the answer", 3.0, 2.0)

def test_right():
    pass
"""


def run(folder: Path, cores: str, *options: str) -> tuple[int, str]:
    """Exit status and output of pytest over the planted tests."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -rfE -p no:hypothesispytest\n")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_planted.py").write_text(PLANTED)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options], cwd=folder,
        env={**os.environ, "CORES": cores}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("cores", "options", "counts"),
    [
        ("busy", ("-n", "2"), "1 failed, 1 passed, 2 inconclusive"),
        ("idle", (), "3 failed, 1 passed"),
        ("at last", (), "1 failed, 1 passed, 2 inconclusive"),
        ("busy", ("-k", "late and not wrong"), "2 deselected, 2 inconclusive"),
        ("busy", ("--again", "-k", "late and not wrong"), "2 deselected, 1 inconclusive, 1 passed"),
    ],
)
def test_lateness_alone_is_inconclusive_where_cores_were_short(
    cores: str, options: tuple[str, ...], counts: str, tmp_path: Path
) -> None:
    status, printed = run(tmp_path, cores, *options)
    assert status == ("failed" in counts), printed
    assert sorted(printed.splitlines()[-1].strip("= ").partition(" in ")[0].split(", ")) == sorted(
        counts.split(", ")
    )
    late = printed.count("adaptra: inconclusive: test_planted.py::test_late")
    assert late == (0 if cores == "idle" else 2)
    assert printed.count("100% of all cores; passed alone") == ("--again" in options)
    assert ("FAILED test_planted.py::test_wrong_and_late " in printed) == ("failed" in counts)


def test_what_others_take_is_seen_and_what_is_ours_is_not() -> None:
    """A process of this one takes a core, then one that is nobody's child."""
    burn = "import time; end = time.process_time() + 1.5\nwhile time.process_time() < end: pass"
    words = [sys.executable, "-c", burn]
    before = others()
    began = time.monotonic()
    subprocess.run(words, check=True)
    ours = others() - before
    subprocess.run(
        [sys.executable, "-c", f"import os\nif os.fork() == 0: os.setsid(); exec({burn!r})"],
        check=True,
    )  # its parent has ended
    end = time.monotonic() + PATIENCE
    while (theirs := others() - before - ours) < 1.4 and time.monotonic() < end:
        time.sleep(0.05)
    assert theirs >= 1.4
    # Of the first one no more counts than what else runs on this machine.
    assert ours <= CORES * (time.monotonic() - began) - 1.4


def test_a_limit_is_a_limit() -> None:
    in_time("it", 1.0, 2.0)
    for took in (2.0, math.inf):
        with pytest.raises(TooLate, match="it: took"):
            in_time("it", took, 2.0)
    decided("it", True, ("other", 3.0, 2.0))
    with pytest.raises(TooLate, match="it: not so, and other: took 3"):
        decided("it", False, ("other", 3.0, 2.0))
    for wrong in (lambda: in_time("it", math.nan, 2), lambda: decided("it", False, ("x", 1.0, 2))):
        with pytest.raises(AssertionError, match=r"not a number|it: not so") as caught:
            wrong()
        assert not isinstance(caught.value, TooLate)


def test_one_run_in_time_is_enough() -> None:
    numbers = iter(range(RUNS))
    assert in_some_run(lambda: next(numbers), lambda n: n == RUNS - 1) == RUNS - 1
    with pytest.raises(AssertionError, match=f"none of {RUNS} runs"):
        in_some_run(lambda: 0, bool)
    assert list(longer_and_longer(0.5)) == [0.5, 5.0, 50.0]
