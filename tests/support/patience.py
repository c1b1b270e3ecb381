"""How long a test waits for what has to come, and what it raises when that came too late."""

import os
from collections.abc import Callable, Iterator
from typing import TypeVar

Found = TypeVar("Found")
RUNS = 20  # at most, until one is in time

# Seconds until a wait is given up; nothing is measured with it, so it is long. Where a fault makes
# a test hang, scripts/faults.py wants to see it sooner.
PATIENCE = float(os.environ.get("ADAPTRA_TEST_PATIENCE", 300))


class TooLate(AssertionError):
    """What was awaited is right, but took longer than a limit that a busy machine alone may break.

    Where the machine was short of cores meanwhile, the test is inconclusive (inconclusive.py), else
    it has failed. Never for wrong results, nor for what does not come at all (PATIENCE).
    """


def too_late(error: BaseException | None) -> bool:
    """Whether it says that something came too late, and not that something else was wrong, too.

    If a test's code runs elsewhere, and its error is sent as text: send this along, and raise
    TooLate there.
    """
    return isinstance(error, TooLate) and error.__context__ is None


def in_time(what: str, took: float, limit: float) -> None:
    """Raises TooLate unless `took` is below `limit`, both in one unit: seconds, iterations.

    A limit may be what something else took, or a multiple of it.
    """
    if took != took or limit != limit:
        raise AssertionError(f"{what}: not a number: {took} and {limit}")
    if not took < limit:
        raise TooLate(f"{what}: took {took:.6g}, has to be below {limit:.6g}")


def longer_and_longer(seconds: float) -> Iterator[float]:
    """For a delay that has to be long beside what a busy machine adds: `seconds`, then ten times as
    long, at last a hundred times. What is wrong is so with all of them."""
    for times in (1, 10, 100):
        yield times * seconds


def in_some_run(run: Callable[[], Found], in_time: Callable[[Found], bool]) -> Found:
    """What one of some runs has found that was `in_time`. A busy machine makes some of them late;
    what is really late is late in all, and raises AssertionError."""
    for _ in range(RUNS):
        if in_time(found := run()):
            return found
    raise AssertionError(f"none of {RUNS} runs was in time; the last one: {found}")


def decided(what: str, right: bool, *meanwhile: tuple[str, float, float]) -> None:
    """Raises TooLate unless `right`: that something was decided, or estimated, as it should be from
    measured time. Of trainings whose ops take what this machine gives them nothing else shows
    whether it was the machine; a defect fails in the second run, too.

    `meanwhile`: what kept its time, each as for `in_time`, where that can be known: had it
    all been in time, the machine explains nothing, and AssertionError is raised.
    """
    if right:
        return
    for one in meanwhile:
        in_time(f"{what}: not so, and {one[0]}", *one[1:])
    raise (AssertionError if meanwhile else TooLate)(f"{what}: not so")
