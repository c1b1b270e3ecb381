"""The replan loop where the host is ahead of the device: launch 6 ms, kernels 45 ms, link 2 ms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from apart import apart
from fakes.hostile_cuda import build
from hostile_cuda.adaptation import Course, Seen, adapt
from hostile_cuda.stage_model import Host
from patience import in_time

from megatron_adaptra.transport.engine import bindings

_MISSING = build.missing() or bindings.missing()
pytestmark = [
    pytest.mark.cold,
    pytest.mark.timing,
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "-"),
]
MS = 1e-3
LAUNCH, KERNEL, LINK = 6 * MS, 45 * MS, "0-1:2ms"
# A plan for it saves a quarter, and well above 15 % also where all ops look a quarter longer.
SLOW, SLOW_FROM, SLOW_UNTIL = 70 * MS, 6, 16
SOON = 5  # iterations in which a plan has to be there
HEALTHY, DEEPER = (2, 1), (4, 1)


def course(
    log: Path, iterations: int, *rules: str, kernel: float = KERNEL, hosts: tuple[Host, ...] = ()
) -> Seen:
    both = hosts or (Host(LAUNCH), Host(LAUNCH))
    seen = apart(adapt, Course(iterations, (*rules, LINK), kernel, log, both))
    assert not seen.errors
    assert not seen.findings
    assert not any(seen.unusable), seen.unusable
    return seen


def decisions(log: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, log.read_text().splitlines())
    return [line for line in lines if "conditions" in line]


def test_a_link_gets_slow_and_heals(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    seen = course(log, 26, f"0-1:{SLOW / MS:g}ms@{SLOW_FROM}..{SLOW_UNTIL}")
    changes = [i for i in range(1, len(seen.warmup)) if seen.warmup[i] != seen.warmup[i - 1]]
    assert len(changes) == 2, seen.warmup  # there and back, once each
    there, back = changes
    assert there > SLOW_FROM, seen.warmup
    assert back > SLOW_UNTIL, seen.warmup
    in_time("iterations until the plan", there - SLOW_FROM, SOON + 1)
    in_time("iterations until it is gone again", back - SLOW_UNTIL, SOON + 1)
    assert seen.warmup[there] == DEEPER
    assert seen.warmup[-1] == HEALTHY
    made, healed = decisions(log)
    for link in made["conditions"]["links"].values():
        assert link["delay"] > 0.95 * SLOW, made
        in_time("the delay", link["delay"], 1.05 * SLOW)
    assert healed["warmup_after"] == list(HEALTHY)
    # What an op takes is what the device took, not what its launch did.
    assert all(seconds > KERNEL - 1 * MS for seconds in seen.seconds), seen.seconds


HOSTS = {
    "late launches of the first": (5 * MS, (Host(30 * MS), Host(LAUNCH))),
    "late launches of the last": (5 * MS, (Host(LAUNCH), Host(30 * MS))),
    "a first stage that starves": (KERNEL, (Host(LAUNCH, 150 * MS), Host(LAUNCH))),
    "a last stage that starves": (KERNEL, (Host(LAUNCH), Host(LAUNCH, 150 * MS))),
}


@pytest.mark.parametrize("what", HOSTS)
def test_a_host_that_is_late_is_no_slow_link(what: str, tmp_path: Path) -> None:
    kernel, hosts = HOSTS[what]
    seen = course(tmp_path / "decisions.jsonl", 16, kernel=kernel, hosts=hosts)
    assert set(seen.warmup) == {HEALTHY}
    in_time("seconds on a link of 2 ms", sorted(seen.delays)[len(seen.delays) // 2], 4 * MS)


@pytest.mark.large
def test_nothing_healthy_is_taken_for_slow(tmp_path: Path) -> None:
    seen = course(tmp_path / "decisions.jsonl", 200)
    assert set(seen.warmup) == {HEALTHY}
