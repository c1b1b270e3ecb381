"""Each wait for an event in the product, taken away, is missed."""

from __future__ import annotations

import re

import pytest
from apart import apart
from fakes.hostile_cuda import build
from fakes.hostile_cuda.waits import names
from hostile_cuda.batches import run_removed
from hostile_cuda.jobs import EXECUTOR, Job

pytestmark = pytest.mark.large

SEEDS = 50
# Calls that wait, or ask whether something is over.
CALL = re.compile(
    r"(?:cuda\.(?:stream_wait|event_query|event_synchronize|stream_query|stream_synchronize)"
    r"|(?<!bool Device::)\bpassed|device_?->wait|(?<!void Device::)\bwatch|landed_\.wait_for"
    r"|transfer\.over\.load)\("
)
# What the two functions that the rest goes through do themselves.
INNERMOST = {"cuda.stream_wait(", "cuda.event_query("}


def statements() -> list[tuple[str, str]]:
    """Of each such call in the engine's sources: the call, and the statement with what is near."""
    found = []
    for path in sorted(build.ENGINE.rglob("*.cpp")):
        text = re.sub(r"//.*", "", path.read_text())
        if '#include "gpu/' not in text:
            continue
        for match in CALL.finditer(text):
            start = max(text.rfind(c, 0, match.start()) for c in ";{}")
            before = max(text.rfind(c, 0, start) for c in ";{}")
            end = text.find(";", text.find("removed(", match.end(), match.end() + 300))
            found.append((match.group(), text[before : max(end, match.end() + 120)]))
    return found


def test_all_waits_have_names() -> None:
    calls = statements()
    innermost = [call for call, _ in calls if call in INNERMOST]
    assert sorted(innermost) == sorted(INNERMOST)
    for call, statement in calls:
        if call not in INNERMOST:
            named = [name for name in names() if f'"{name}"' in statement]
            assert named or "removed(queue.front().wait)" in statement, statement
    # Two calls are two waits each, of sends and of receives; one asks for all that are watched.
    assert len(names()) == len(calls) - len(INNERMOST) + 2 - 1, calls


@pytest.mark.cold
@pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "-")
@pytest.mark.parametrize("wait", names())
def test_a_wait_that_is_gone_is_missed(wait: str) -> None:
    jobs = [Job(2, 1, EXECUTOR, (1, 8, 32)[seed % 3], seed) for seed in range(SEEDS)]
    first, faults = apart(run_removed, wait, jobs)
    print(f"{wait}: seed {first}: {faults}")
    assert faults, f"{wait}: {SEEDS} seeds do not miss it"
