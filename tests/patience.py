"""How long a test waits for what has to come, and what it raises when that came too late."""

import os

# Seconds until a wait is given up; nothing is measured with it, so it is long. Where a fault makes
# a test hang, scripts/faults.py wants to see it sooner.
PATIENCE = float(os.environ.get("ADAPTRA_TEST_PATIENCE", 300))


class TooLate(AssertionError):
    """What was awaited is right, but took longer than a limit that a busy machine alone may break.

    scripts/test.sh runs a test that raises it once more, alone (chance.py), if the test is marked
    with what it needs. Never for wrong results, nor for what does not come at all (PATIENCE).
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
