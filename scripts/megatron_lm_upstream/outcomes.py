"""What came of upstream's tests, rank by rank, and how two runs of them differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Call:
    """One of a schedule, by "us" or by "Megatron". `ops`: the kinds that ours ran, e.g. "BF".

    `came`: a digest of the losses and gradients that came of it.
    """

    by: str
    why: str
    ops: str
    came: str


@dataclass(frozen=True)
class Test:
    """What came of one test on one rank. `why`: the error, or the reason for a skip."""

    outcome: str
    why: str
    calls: tuple[Call, ...]


Outcomes = list[dict[str, Test]]  # by rank; the name of a test is its file and what follows


def read(path: Path) -> dict[str, Test]:
    """The last word on each test counts: one that has only begun has stalled."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        calls = tuple(Call(**call) for call in row["calls"])
        found[row["test"].removeprefix("tests/unit_tests/")] = Test(
            row["outcome"], row["why"], calls
        )
    return found


def differences(stock: Outcomes, ours: Outcomes) -> list[str]:
    """How tests of `ours` ended otherwise than with stock Megatron, or came to other numbers."""
    found = []
    for rank, (theirs, tests) in enumerate(zip(stock, ours, strict=True)):
        for name, test in tests.items():
            expected = theirs.get(name)
            where = f"{name}, rank {rank}"
            if expected is None:
                found.append(f"{where}: not run with stock")
            elif test.outcome != expected.outcome:
                found.append(f"{where}: {expected.outcome} with stock, {test.outcome}: {test.why}")
            elif [call.came for call in test.calls] != [call.came for call in expected.calls]:
                found.append(f"{where}: other losses or gradients than with stock")
    return found


def passed(tests: dict[str, Test]) -> set[str]:
    """Their names."""
    return {name for name, test in tests.items() if test.outcome == "passed"}


def outcome_of(outcomes: Outcomes, name: str) -> str:
    """Of one test: a word if all ranks agree."""
    counted = Counter(tests[name].outcome for tests in outcomes if name in tests)
    if len(counted) == 1:
        return next(iter(counted))
    return ", ".join(f"{word} on {count} ranks" for word, count in counted.items())


def iterations(outcomes: Outcomes) -> int:
    """Calls of a schedule that our engine ran, on rank 0."""
    return sum(call.by == "us" for test in outcomes[0].values() for call in test.calls)


def by_whom(tests: Iterable[Test]) -> str:
    """Who ran the schedules of these tests, and why not us."""
    calls = [call for test in tests for call in test.calls]
    ours = [call for call in calls if call.by == "us"]
    printed = []
    if ours:
        ops = sorted({kind for call in ours for kind in call.ops})
        printed.append(f"**us, {len(ours)} iterations** of {'/'.join(ops)}")
    if len(calls) > len(ours):
        printed.append("Megatron")
    reasons = {reason for call in calls for reason in call.why.split("; ") if reason}
    reasons = {reason.removeprefix("stock schedule: ") for reason in reasons}
    return " ".join([*printed, *(f"({reason})" for reason in sorted(reasons))])
