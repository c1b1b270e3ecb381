"""What a rank has started yields where its own training waits for a core; nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

from megatron_adaptra.execute.shares import adaptive
from megatron_adaptra.execute.shares.adaptive import (
    HOLDS,
    NICE,
    PAUSE,
    SPAN,
    WAITS,
    Yielding,
    lower_priority,
)
from megatron_adaptra.measure.core_wait import CoreWait
from megatron_adaptra.measure.host_use import HostUse

SCRIPT = Path(__file__).with_name("yielding_script.py")
WITH_HELPERS = HostUse(0.5, 0.5, 0.5, 0.0, 0.0, 2)
counted = pytest.mark.skipif(CoreWait()() is None, reason="the kernel does not count waits")


@pytest.fixture
def beside() -> Iterator[int]:
    """A process on the same core that the training's script is no ancestor of."""
    core = min(os.sched_getaffinity(0))
    words = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", words]) as process:
        yield process.pid
        process.kill()


def trained() -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), str(min(os.sched_getaffinity(0)))]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "use": HostUse(*found["use"])}


@counted
def test_a_child_yields_and_a_process_beside_it_does_not(beside: int) -> None:
    found = trained()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert (found["own"], found["child"]) == (own, min(19, own + NICE))
    assert os.getpriority(os.PRIO_PROCESS, beside) == own
    use = found["use"]
    assert use.queued >= WAITS
    assert use.helpers > 0
    assert use.job > 0, "started by the same process, as ranks of a job are"


class Meter:
    """Has measured `use`."""

    def __init__(self, use: HostUse | None) -> None:
        self.use, self.spans = use, 0

    def begin(self) -> None:
        self.spans += 1

    def end(self, queued: float) -> HostUse | None:
        return self.use


@pytest.mark.parametrize(
    ("use", "yields"),
    [
        (WITH_HELPERS, True),
        (WITH_HELPERS._replace(helpers=0.04), False),
        (WITH_HELPERS._replace(helpers=0.0, others=1.5), False),
        (None, False),
    ],
)
def test_only_what_takes_cores_from_its_own_training_yields(
    use: HostUse | None, yields: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    monkeypatch.setattr(adaptive, "lower_priority", called.append)
    one = Yielding()
    meter = one._meter = Meter(use)  # type: ignore[assignment]
    for _ in range(HOLDS - 1):
        one.ended(WAITS, 1.0)
    one.ended(0.9 * WAITS, 1.0)  # less than has to be, so that it begins anew
    for _ in range(HOLDS + SPAN - 1):
        one.ended(WAITS, 1.0)
    assert (one.use, called, meter.spans) == (None, [], 1)
    one.ended(WAITS, 1.0)
    assert (one.use, bool(called)) == (use, yields)
    for _ in range(PAUSE + HOLDS):
        one.ended(WAITS, 1.0)
    assert meter.spans == 2, "others may have been started"
    one.ended(0.0, 1.0)
    assert one.use is None


def test_what_has_ended_or_yields_more_stays(beside: int) -> None:
    os.setpriority(os.PRIO_PROCESS, beside, 19)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(PATIENCE)
    lower_priority({ended.pid, beside})
    assert os.getpriority(os.PRIO_PROCESS, beside) == 19


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (HostUse(0.25, 0.5, 0.0, 0.0, 0.0, 2), "it waits for a core for 25% of the time"),
        (
            HostUse(0.25, 0.5, 0.1, 0.0, 1.4, 2),
            "it waits for a core for 25% of the time: processes that are not of this job use 1.4, "
            "its own processes, which yield, use 0.1 of 2 cores",
        ),
        (
            HostUse(0.5, 0.5, 0.0, 3.5, 0.0, 4),
            "it waits for a core for 50% of the time: other ranks of the job use 3.5 of 4 cores",
        ),
    ],
)  # fmt: skip
def test_who_uses_the_cores_in_words(use: HostUse, words: str) -> None:
    assert use.in_words() == words
