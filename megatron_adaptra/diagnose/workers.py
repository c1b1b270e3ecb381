"""Slow workers, and slow stages where all replicas' workers of one are slow."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

from megatron_adaptra.diagnose.alike import AlikeStages
from megatron_adaptra.diagnose.finding import STAGE, WORKER, Finding, Places
from megatron_adaptra.diagnose.watch import Samples, Sight
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.measure.slow_workers import SLOW, SlowWorkers

SLOW_ALONE = 1.5  # times as long as before, from which on a worker without peers is slow

Seconds = Mapping[str, float]
Waits = Callable[[int], float]


class Changes(NamedTuple):
    """A set of changes has a Sight of those that are `slow`, and of those that are `well` again."""

    slow: dict[int, Sight]
    well: dict[int, Sight]


class _Factors:
    """A _Factors follows which of `stages` times `replicas` are slow, as SlowWorkers finds them.

    `least`: times as long as normally, from which on they are.
    """

    def __init__(self, stages: int, replicas: int, least: float) -> None:
        self._detector, self._least = SlowWorkers(stages, replicas), least
        self._samples = [Samples() for _ in range(stages * replicas)]
        self._slow: dict[int, Sight] = {}

    def update(self, iteration: int, walls: Mapping[int, Seconds], waits: Waits) -> Changes:
        """Take seconds by kind of op, as SlowWorkers. `waits`: see AlikeStages."""
        self._detector.update(walls)
        for one, log in self._detector.logs.items():
            self._samples[one].add(iteration, log)
        self._detector.accept()
        well: dict[int, Sight] = {}
        for one, factor in self._detector.factors().items():
            before = self._slow.get(one)
            # Ops that share a core with others' compute longer, too: caches and clocks are shared.
            least = self._least * (1 + waits(one))
            if factor >= (least if before is None else min(least, SLOW)):
                sight = Sight(factor, 1.0, *self._samples[one].since(0.0, math.log(factor)))
                if before is not None:
                    sight = sight._replace(since=before.since)
                self._slow[one] = sight
            elif before is not None:
                del self._slow[one]
                since = self._samples[one].since(math.log(before.now), 0.0)
                well[one] = Sight(1.0, 1.0, *since)
        return Changes(dict(self._slow), well)


class WorkerDiagnosis:
    """A diagnosis finds slow workers, at `places`, of so many `stages` and `replicas`.

    Workers of several replicas are compared with each other. A whole stage is found to be slow as a
    single worker is: by its past, and by other stages with the same layers.
    """

    def __init__(self, places: Places, stages: int, replicas: int) -> None:
        self._places, self._stages, self._replicas = places, stages, replicas
        self._peers = _Factors(stages, replicas, SLOW) if replicas > 1 else None
        self._past = _Factors(stages, 1, SLOW_ALONE)
        self._alike = AlikeStages(stages)

    def update(
        self, iteration: int, rows: Mapping[int, StageReport], waits: Waits
    ) -> dict[Hashable, Finding]:
        """Take the reports of an `iteration`, by worker. `waits`: see AlikeStages, by worker."""
        walls = {worker: report.wall for worker, report in rows.items()}
        stages = self._fastest(walls)
        workers = {stage: self._of(stage) for stage in range(self._stages)}

        def most(stage: int) -> float:
            return max(waits(worker) for worker in workers[stage])

        past = self._past.update(iteration, stages, most)
        took = {stage: seconds for stage, wall in stages.items() if (seconds := _seconds(wall))}
        layers = {stage: rows[workers[stage][0]].layers for stage in took}
        self._alike.update(iteration, took, layers, most)
        if self._peers is None:
            return self._stage_findings(past, WORKER)
        peers = self._peers.update(iteration, walls, waits)
        found = self._findings(peers, WORKER, {worker: (worker,) for worker in walls | peers.slow})
        if self._stages > 1:  # what all stages share is no stage's, and here is one
            for subject, finding in self._stage_findings(past, STAGE).items():
                found = {s: one for s, one in found.items() if s not in finding.covers}
                found[subject] = finding
        return found

    def _stage_findings(self, past: Changes, kind: str) -> dict[Hashable, Finding]:
        for stage in (*past.slow, *past.well):
            self._alike.forget(stage)  # it has a past that shows more
        slow, well = {**self._alike.slow, **past.slow}, {**self._alike.well, **past.well}
        where = {stage: self._of(stage) for stage in range(self._stages)}
        return self._findings(Changes(slow, well), kind, where)

    def _findings(
        self, changes: Changes, kind: str, where: Mapping[int, tuple[int, ...]]
    ) -> dict[Hashable, Finding]:
        found: dict[Hashable, Finding] = {}
        for over, sights in ((True, changes.well), (False, changes.slow)):
            for one, sight in sights.items():
                workers = where[one]
                finding = Finding(
                    kind, tuple(map(self._places.at, workers)), -1 if over else sight.since,
                    sight.now, sight.normal, sight.agree, sight.samples,
                    until=sight.since if over else None,
                    covers=frozenset(workers) if kind == STAGE else frozenset(),
                )  # fmt: skip
                found[("stage", one) if kind == STAGE else one] = finding
        return found

    def _fastest(self, walls: Mapping[int, Seconds]) -> dict[int, Seconds]:
        """Return, by stage, the seconds of its fastest worker, where all have run a microbatch."""
        found = {}
        for stage in range(self._stages):
            each = [walls.get(worker, {}) for worker in self._of(stage)]
            if all(map(_seconds, each)):
                found[stage] = min(each, key=_seconds)
        return found

    def _of(self, stage: int) -> tuple[int, ...]:
        return tuple(range(stage, self._stages * self._replicas, self._stages))


def _seconds(wall: Seconds) -> float:
    """Return the seconds of a forward and a backward, whole or in halves; 0 without a forward."""
    if "F" not in wall:
        return 0.0
    halves = wall.get("I", 0.0) + wall.get("W", 0.0)
    return wall["F"] + wall.get("B", halves)
