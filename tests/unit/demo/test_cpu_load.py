"""Whose the CPU time was: ours, or that of others."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from megatron_adaptra.demo.cpu_load import Load, Sample, kernel, load_of
from megatron_adaptra.measure.host_use import MachineTime

BURN = "import time\nwhile time.process_time() < 0.5: pass"
IDLE_MACHINE = MachineTime(0.0, 0.0, 0.0)


def sample(iteration: int) -> Sample:
    return Sample(iteration, time.process_time(), MachineTime.now())


@pytest.mark.skipif(MachineTime.now() is None, reason="the system does not report it")
def test_what_another_process_uses_is_seen_and_is_not_ours() -> None:
    before = sample(0)
    subprocess.run([sys.executable, "-c", BURN], check=True, timeout=300)
    after = sample(1)
    load = load_of([[before, after]], [kernel()], 0, 1)
    assert load is not None
    assert before.machine is not None
    assert after.machine is not None
    seconds = after.machine.total - before.machine.total
    assert load.others * seconds > 0.4
    assert load.own * seconds == pytest.approx(after.own - before.own)


def test_ranks_of_other_machines_do_not_count() -> None:
    end = MachineTime(10.0, 8.0, 1.0)
    mine = [Sample(0, 0.0, IDLE_MACHINE), Sample(5, 3.0, end)]
    near, far = ([Sample(0, 0.0, None), Sample(5, own, None)] for own in (2.0, 9.0))
    load = load_of([mine, near, far], ["a", "a", "b"], 0, 5)
    assert load == Load(own=0.5, others=pytest.approx(0.3), steal=0.1)


def test_a_span_between_samples_takes_those_around_it() -> None:
    rows = [[Sample(i, i / 10, MachineTime(i, i / 2, 0.0)) for i in (0, 5, 10, 15)]]
    load = load_of(rows, ["a"], 6, 9)
    assert load is not None
    assert (load.own, load.others) == pytest.approx((0.1, 0.4))
    assert load_of(rows, ["a"], 14, 16) is None
