"""Slow workers, and slow stages where all replicas' workers of one are slow."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from megatron_adaptra.diagnose.alike import AlikeStages
from megatron_adaptra.diagnose.beside import BesideOthers
from megatron_adaptra.diagnose.finding import REPLICA, STAGE, WORKER, Finding, Places
from megatron_adaptra.diagnose.past import OwnPast
from megatron_adaptra.diagnose.watch import Sight
from megatron_adaptra.measure.report import StageReport

Seconds = Mapping[str, float]
Sights = Mapping[int, Sight]


class WorkerDiagnosis:
    """A diagnosis finds slow workers, at `places`, of so many `stages` and `replicas`.

    Workers of several replicas are compared with each other. A replica all of whose workers are
    slow is one finding. A whole stage is found to be slow as a single worker is: by its past, and
    by other stages with the same layers.
    """

    def __init__(self, places: Places, stages: int, replicas: int) -> None:
        self._places, self._stages, self._replicas = places, stages, replicas
        self._peers = BesideOthers(stages, replicas, leaders=False) if replicas > 1 else None
        self._past = OwnPast(stages)
        self._alike = AlikeStages(stages)

    def update(
        self, iteration: int, rows: Mapping[int, StageReport], more: Callable[[int], float]
    ) -> dict[Hashable, Finding]:
        """Take the reports of an `iteration`, by worker.

        `more`: returns what ops of a worker wait for cores beyond what is normal, see Queue.
        """
        walls = {worker: report.wall for worker, report in rows.items()}
        took = self._fastest(walls)
        workers = {stage: self._of(stage) for stage in range(self._stages)}

        def most(stage: int) -> float:
            return max(more(worker) for worker in workers[stage])

        self._past.update(iteration, took, most)
        layers = {stage: rows[workers[stage][0]].layers for stage in took}
        self._alike.update(iteration, took, layers, most)
        if self._peers is None:
            return self._stage_findings(WORKER)
        self._peers.update(iteration, walls, more)
        slow, well = self._peers.slow, self._peers.well
        found = self._findings(slow, well, WORKER, {worker: (worker,) for worker in walls | slow})
        if self._stages > 1:  # what all stages share is no stage's, and here is one
            where = {replica: self._at(replica) for replica in range(self._replicas)}
            whole = self._findings(self._peers.whole, self._peers.whole_again, REPLICA, where)
            for subject, finding in {**whole, **self._stage_findings(STAGE)}.items():
                found = {s: one for s, one in found.items() if s not in finding.covers}
                found[subject] = finding
        return found

    def _stage_findings(self, kind: str) -> dict[Hashable, Finding]:
        past, alike = self._past, self._alike
        for stage in {*past.slow, *past.well} - alike.slow.keys():
            alike.forget(stage)  # its past shows more, unless it was slow in there, too
        slow, well = {**past.slow, **alike.slow}, {**past.well, **alike.well}
        well = {stage: sight for stage, sight in well.items() if stage not in slow}
        where = {stage: self._of(stage) for stage in range(self._stages)}
        return self._findings(slow, well, kind, where)

    def _findings(
        self, slow: Sights, well: Sights, kind: str, where: Mapping[int, tuple[int, ...]]
    ) -> dict[Hashable, Finding]:
        found: dict[Hashable, Finding] = {}
        for over, sights in ((True, well), (False, slow)):
            for one, sight in sights.items():
                workers = where[one]
                finding = Finding(
                    kind, tuple(map(self._places.at, workers)), -1 if over else sight.since,
                    sight.now, sight.normal, sight.agree, sight.samples,
                    until=sight.since if over else None,
                    beside="in the others" if kind == REPLICA else "normally",
                    covers=frozenset() if kind == WORKER else frozenset(workers),
                )  # fmt: skip
                found[one if kind == WORKER else (kind, one)] = finding
        return found

    def _fastest(self, walls: Mapping[int, Seconds]) -> dict[int, float]:
        """Return, by stage, the seconds of its fastest worker, where all have run a microbatch."""
        each = {
            stage: [_seconds(walls.get(worker, {})) for worker in self._of(stage)]
            for stage in range(self._stages)
        }
        return {stage: min(seconds) for stage, seconds in each.items() if all(seconds)}

    def _at(self, replica: int) -> tuple[int, ...]:
        first = replica * self._stages
        return tuple(range(first, first + self._stages))

    def _of(self, stage: int) -> tuple[int, ...]:
        return tuple(range(stage, self._stages * self._replicas, self._stages))


def _seconds(wall: Seconds) -> float:
    """Return the seconds of a forward and a backward, whole or in halves; 0 without a forward."""
    if "F" not in wall:
        return 0.0
    halves = wall.get("I", 0.0) + wall.get("W", 0.0)
    return wall["F"] + wall.get("B", halves)
