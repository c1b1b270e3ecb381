"""The replan loop where the host is ahead of the device: launch 6 ms, kernels 45 ms, link 2 ms."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from fake_cuda.hostile import build
from fake_cuda.hostile.adaptation import Course, Seen, adapt
from fake_cuda.hostile.apart import apart

from megatron_adaptra.transport.engine import native

_MISSING = build.missing() or native.missing()
pytestmark = [
    pytest.mark.cold,
    pytest.mark.timing,
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "-"),
]
MS = 1e-3
LAUNCH, KERNEL = 6 * MS, 45 * MS
HEALTHY, DEEPER = (2, 1), (3, 1)


def course(path: Path, iterations: int, *rules: str) -> Seen:
    log = path / "decisions.jsonl"
    seen = apart(adapt, Course(iterations, (*rules, "0-1:2ms"), LAUNCH, KERNEL, log))
    assert not seen.errors
    assert not seen.findings
    assert not any(seen.unusable), seen.unusable
    return seen


def test_a_link_gets_slow_and_heals(tmp_path: Path) -> None:
    seen = course(tmp_path, 26, "0-1:40ms@6..16")
    deeper, back = seen.warmup.index(DEEPER), len(seen.warmup) - seen.warmup[::-1].index(DEEPER)
    changes = [a != b for a, b in zip(seen.warmup, seen.warmup[1:], strict=False)]
    assert sum(changes) == 2, seen.warmup  # there and back, once each
    assert 6 < deeper <= 16, seen.warmup
    assert back > 16, seen.warmup
    assert seen.warmup[-1] == HEALTHY
    assert 38 * MS < median(seen.delays[7:15]) < 42 * MS, seen.delays
    # What an op takes is what the device took, not what its launch did.
    assert all(seconds > KERNEL - 1 * MS for seconds in seen.seconds), seen.seconds


@pytest.mark.large
def test_nothing_healthy_is_taken_for_slow(tmp_path: Path) -> None:
    seen = course(tmp_path, 200)
    assert set(seen.warmup) == {HEALTHY}
