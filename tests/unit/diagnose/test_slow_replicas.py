"""Replicas whose microbatches are timed: a slow one is found in time, unless it is explained."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from diagnose.kept import Kept, places
from measure.replica_runs import COUNT, iteration
from seeding import new_seed

from megatron_adaptra.diagnose.finding import REPLICA, WORKER, Finding
from megatron_adaptra.diagnose.replicas import ReplicaDiagnosis
from megatron_adaptra.measure.replica_speed import ReplicaRow, ReplicaSpeeds

IN_TIME = 5  # iterations


class Job:
    """So many replicas of two stages, fed with rows."""

    def __init__(self, replicas: int, noise: Mapping[str, float] | None = None) -> None:
        self.kept, self.rng = Kept(), random.Random(new_seed())
        self._noise, self._speeds = noise or {}, ReplicaSpeeds(replicas, 1.0)
        self.places = places(replicas, 2)
        self.diagnosis = ReplicaDiagnosis(self.places, self.kept.book(), self.kept.open.explains)
        self.now, self._counts = 0, [COUNT] * replicas

    def train(self, iterations: int, slow: Mapping[int, float] | None = None) -> None:
        for _ in range(iterations):
            rows = iteration(self.rng, slow or {}, self._counts, **self._noise, fill=1.0)
            seconds = tuple(row[0] for row in rows.values())
            self._speeds.update(rows)
            row = ReplicaRow(
                self.now, tuple(self._counts), seconds, (None,) * len(rows), max(seconds)
            )
            self.diagnosis.update(row, self._speeds)
            self.now += 1


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_slow_replica_is_found_in_time_and_closed(replicas: int) -> None:
    for factor in (1.8, 3.0):
        job = Job(replicas)
        job.train(12)
        for _ in range(4):
            begin = job.now
            job.train(10, {1: factor})
            assert job.diagnosis.answers([1]) == [job.kept.events[-1]["id"]]
            end = job.now
            job.train(12)
            opened, closed = job.kept.events[-2:]
            assert (opened["state"], opened["what"], opened["since"]) == ("opened", REPLICA, begin)
            assert opened["found"] < begin + IN_TIME
            assert [place["rank"] for place in opened["where"]] == [2, 3]
            assert opened["takes"] == pytest.approx(factor, rel=0.1)
            assert (closed["state"], closed["until"]) == ("closed", end)
        assert len(job.kept.events) == 8
    line = job.kept.lines[0]
    assert line.startswith("slow replica: rank 2 on host1, rank 3 on host1 (1.0, 1.1), since")
    assert "times as long as in the others; an iteration takes" in line


def test_one_whose_worker_is_slow_is_no_second_finding() -> None:
    job, slow = Job(2), {1: 2.0}
    job.train(12)
    leader, worker = job.kept.book(2), Finding(WORKER, (job.places[1][1],), 12, 2.6, 1.0)
    job.train(2, slow)
    leader.update(14, {1: worker})
    job.train(10, slow)
    assert job.diagnosis.answers([1]) == ["2-0"]
    leader.update(26, {1: replace(worker, until=24)})
    job.train(10)
    assert {e["what"] for e in job.kept.events} == {WORKER}


def test_what_explains_it_later_is_named() -> None:
    job, slow = Job(2), {1: 2.0}
    job.train(12)
    job.train(6, slow)
    job.kept.book(2).update(17, {1: Finding(WORKER, (job.places[1][1],), 12, 2.6, 1.0)})
    job.train(2, slow)
    states = [(e["state"], e["what"], e["because"]) for e in job.kept.events]
    assert states == [
        ("opened", REPLICA, []), ("opened", WORKER, []), ("changed", REPLICA, ["2-0"]),
    ]  # fmt: skip
    assert "; because of 2-0; " in job.kept.lines[-1]


@pytest.mark.parametrize("noise", [{}, {"sigma": 0.08}, {"spikes": 0.03}])
@pytest.mark.parametrize("replicas", [2, 4])
def test_nothing_is_found_in_healthy_runs(replicas: int, noise: Mapping[str, float]) -> None:
    for _ in range(20):
        job = Job(replicas, noise)
        job.train(100)
        assert job.kept.events == []
