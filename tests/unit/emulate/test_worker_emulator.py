"""The emulated slow worker by itself: how long its ops wait, on a clock that is the test's."""

from __future__ import annotations

import random
import time

import pytest
from seeding import new_seed

from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.device.base import HOST
from megatron_adaptra.emulate.worker_emulator import SAMPLES, WorkerEmulator
from megatron_adaptra.emulate.worker_rules import WorkerRule
from megatron_adaptra.execute.guarded_probe import SlowedProbe
from megatron_adaptra.ir.op import Kind, Op


class Clock:
    """Seconds that pass only in `sleep`, and wakes up `late` by that much."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self.late = 100.0, late
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.now += seconds + self.late

    def emulator(self, *rules: WorkerRule, worker: int = 5, steady: bool = False) -> WorkerEmulator:
        return WorkerEmulator(worker, rules, steady, work=self, clock=self, sleep=self.sleep)

    def op(self, emulator: WorkerEmulator, seconds: float, kind: Kind = Kind.F) -> float:
        """How long an op takes that computes for so many `seconds`."""
        begin = self.now
        self.now += seconds
        emulator.wait(begin, kind)
        return self.now - begin


def test_an_op_takes_as_many_times_as_long() -> None:
    clock = Clock()
    emulator = clock.emulator(WorkerRule(5, 3.0))
    for seconds in (0.01, 0.002, 1.5):
        assert clock.op(emulator, seconds) == pytest.approx(3 * seconds)
    assert clock.op(emulator, 0.0) == 0.0


def test_another_worker_does_not_wait() -> None:
    clock = Clock()
    emulator = clock.emulator(WorkerRule(4, 3.0), WorkerRule(6, 3.0))
    assert emulator.rules == []
    assert clock.op(emulator, 0.01) == pytest.approx(0.01)
    assert clock.slept == []


def test_it_changes_at_the_iterations_of_its_rules() -> None:
    clock = Clock()
    emulator = clock.emulator(
        WorkerRule(5, 2.0, 2, 4), WorkerRule(5, 5.0, 3, 6), WorkerRule(5, 1.5, 8)
    )
    times = []
    for iteration in range(10):
        emulator.iteration = iteration
        times.append(round(clock.op(emulator, 1.0), 6))
    assert times == [1, 1, 2, 2, 5, 5, 1, 1, 1.5, 1.5]


def test_where_all_workers_wait_ops_of_a_kind_are_as_long_as_the_first_ones() -> None:
    """Whatever the core's clock does; also when a rule begins later, or is of another length."""
    rng, clock = random.Random(new_seed()), Clock()
    emulator = clock.emulator(WorkerRule(5, 20.0, 5), WorkerRule(5, 10.0), steady=True)
    usual = {Kind.F: 0.02, Kind.B: 0.04}
    for _ in range(SAMPLES):  # of each kind, in turn, around its usual length
        for kind, seconds in usual.items():
            clock.op(emulator, seconds * rng.uniform(0.99, 1.01), kind)
    for iteration, times in ((4, 10), (5, 20)):
        emulator.iteration = iteration
        for _ in range(20):
            kind = rng.choice(list(usual))
            took = clock.op(emulator, usual[kind] * rng.uniform(0.7, 1.5), kind)
            assert took == pytest.approx(times * usual[kind], rel=0.01)
    most = 30 * usual[Kind.F]
    assert clock.op(emulator, most) == pytest.approx(most), "nothing to wait for"
    after = clock.emulator(WorkerRule(5, 5.0), steady=True)
    after.like(emulator)
    took = clock.op(after, 1.5 * usual[Kind.F])
    assert took == pytest.approx(5 * usual[Kind.F], rel=0.01), "as in the training before"


def test_late_wakes_do_not_add_up() -> None:
    """On average an op takes what it should, although a timer is late each time."""
    rng, clock = random.Random(new_seed()), Clock()
    emulator = clock.emulator(WorkerRule(5, 2.0))
    computed = taken = 0.0
    for _ in range(500):
        clock.late = rng.uniform(0.0, 5e-4)
        seconds = rng.uniform(1e-3, 5e-3)
        computed += seconds
        taken += clock.op(emulator, seconds)
    assert taken == pytest.approx(2 * computed, abs=1e-3)


def test_a_process_that_was_suspended_has_slow_ops_afterwards() -> None:
    clock = Clock(late=30.0)
    emulator = clock.emulator(WorkerRule(5, 2.0))
    clock.op(emulator, 0.01)
    clock.late = 0.0
    assert clock.op(emulator, 0.01) == pytest.approx(0.02, abs=1.1e-3)


def slowed(times: float, guard: Guard) -> tuple[SlowedProbe, list[float]]:
    """A probe of a worker that takes `times` as long, and the seconds it has waited."""
    slept: list[float] = []
    emulator = WorkerEmulator(1, [WorkerRule(1, times)], sleep=slept.append)
    return SlowedProbe(guard, 1, HOST, emulator), slept


def test_the_wait_is_inside_what_is_measured() -> None:
    """An op that computes for 10 ms is measured with at least 30; the wait computes nothing."""
    woke: list[float] = []

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        woke.append(time.monotonic())

    probe = SlowedProbe(Guard(), 1, HOST, WorkerEmulator(1, [WorkerRule(1, 3.0)], sleep=sleep))
    probe.begin(0)
    probe.op_begins()
    end = time.thread_time() + 0.01
    while time.thread_time() < end:
        pass
    probe.op_ends(Op(Kind.F, 0))
    record = probe.pipeline_ends()
    assert record is not None
    (op,) = record.ops
    assert op.op == Op(Kind.F, 0)
    assert op.end - op.start >= 0.03
    assert op.end >= woke[0], "on a busy machine 10 ms may take 30 as well"
    assert op.cpu < 0.02


def test_a_worker_stays_slow_when_nothing_adapts_any_more() -> None:
    guard = Guard()
    guard.off = True
    probe, slept = slowed(3.0, guard)
    probe.begin(0)
    probe.op_begins()
    probe.op_ends(Op(Kind.B, 0))
    assert len(slept) == 1
    assert slept[0] > 0
