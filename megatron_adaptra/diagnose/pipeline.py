"""The diagnosis of what a leader sees: links and workers of one pipeline, or of all replicas."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

from megatron_adaptra.base.log import GOES_ON, log_line
from megatron_adaptra.diagnose.book import FindingBook
from megatron_adaptra.diagnose.finding import (
    HOST,
    LINK,
    PORT,
    THIN_LINK,
    WORKER,
    Finding,
    Places,
    Worker,
)
from megatron_adaptra.diagnose.watch import LinkWatch, Queue, Samples, Sight
from megatron_adaptra.measure.core_use import OwnCores, queue_share
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.link_delay import Link
from megatron_adaptra.measure.replica_estimate import ReplicaEstimator
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.measure.slow_workers import SLOW, SlowWorkers

SLOW_ALONE = 1.5  # times as long as before, from which on a worker without peers is slow
THIN_SHARE = 0.5  # of what a link takes beyond the normal, from which on it is for its bytes


class Subjects(Protocol):
    """A change has subjects: the links and workers that it is for."""

    @property
    def links(self) -> Mapping[Link, float]:
        """The links, with what they took before."""
        ...

    @property
    def workers(self) -> Mapping[int, float]:
        """The workers, with what they took before."""
        ...


class PipelineDiagnosis:
    """A diagnosis finds slow links, ports and workers, whatever any remedy makes of them.

    Args:
        estimator: of the remedy, which it only asks: it has taken the reports before.
        workers: all that report, by number, with rank and host.
        replica: this pipeline's number among all of the job, for names; None where the job has one
            replica, or the workers are of all replicas.
        book: gets what is found.
    """

    def __init__(
        self,
        estimator: Estimator | ReplicaEstimator,
        workers: Sequence[Worker],
        replica: int | None,
        book: FindingBook,
    ) -> None:
        several = isinstance(estimator, ReplicaEstimator)
        self.book, self._estimator = book, estimator
        self._replicas = estimator.replicas if isinstance(estimator, ReplicaEstimator) else 1
        self._stages = len(workers) // self._replicas
        self._places = Places(workers, self._stages, 0 if several else replica)
        self._links: dict[Link, LinkWatch] = {}
        self._slow = SlowWorkers(self._stages, self._replicas)
        self._least = SLOW if self._replicas > 1 else SLOW_ALONE
        self._cores = OwnCores(len(workers), estimator.shared_cores, queueing=False)
        self._queues = {host: Queue() for host in {worker.host for worker in workers}}
        self._samples = [Samples() for _ in workers]
        self._workers: dict[int, Sight] = {}
        self._over = False  # it has failed

    def update(self, iteration: int, rows: Mapping[int, StageReport]) -> None:
        """Take the reports of an `iteration`, which the estimator has taken, by worker.

        An error ends the diagnosis alone, with one line: plans go on without it.
        """
        if self._over:
            return
        try:
            self._update(iteration, rows)
        except Exception as error:
            self._over = True
            log_line(f"who is slow is not looked for any more, {GOES_ON}: {error!r}")

    def _update(self, iteration: int, rows: Mapping[int, StageReport]) -> None:
        self._places.see(rows)
        took = [one.seconds for w, one in rows.items() if w % self._stages == 0 and one.seconds]
        if took:
            self.book.took(iteration - 1, max(took))
        now: dict[Hashable, Finding] = {}
        now |= self._of_links(iteration)
        now |= self._of_hosts(iteration, rows)
        now |= self._of_workers(iteration, rows)
        self.book.update(iteration, now)

    def answers(self, change: Subjects) -> list[str]:
        """Return the names of the open findings that a `change` is for."""
        ends = sorted({end for link in change.links for end in link})
        ports = [("port", worker) for worker in ends]
        return self.book.ids([*map(frozenset, change.links), *change.workers, *ports])

    def _of_links(self, iteration: int) -> dict[Hashable, Finding]:
        estimator = self._estimator
        stage_seconds, charts = estimator.stage_seconds(), estimator.charts
        for link, seconds in estimator.samples.items():
            watch = self._links.setdefault(link, LinkWatch(charts[link].floor))
            watch.update(iteration, seconds, stage_seconds)
        slow = {link: one.slow for link, one in self._links.items() if one.slow is not None}
        well = {link: one.well for link, one in self._links.items() if one.well is not None}
        found: dict[Hashable, Finding] = {}
        thin: dict[int, list[Link]] = {}  # links by worker whose port is thin
        for link, sight in sorted(well.items(), key=lambda item: -item[1].now):
            if link[::-1] not in slow:
                found[frozenset(link)] = self._finding(LINK, link, sight, until=sight.since)
        if not slow:
            return found
        conditions = estimator.conditions() if estimator.known else None
        for link, sight in sorted(slow.items(), key=lambda item: item[1].now):
            kind, wire = LINK, 0.0 if conditions is None else conditions.wire(*link)
            if conditions is not None and wire >= THIN_SHARE * (sight.now - sight.normal):
                kind = THIN_LINK
                if ports := [end for end in link if conditions.port(end) > 0]:
                    thin.setdefault(ports[0], []).append(link)
            found[frozenset(link)] = self._finding(kind, link, sight)  # of both ways the slower
        for port, links in thin.items():
            covers = frozenset(frozenset(link) for link in links)
            worst = max(links, key=lambda link: slow[link].now)
            at = self._places.at(port, worst[0] if worst[1] == port else worst[1])
            one = found[frozenset(worst)]
            for pair in covers:
                found.pop(pair, None)
            found["port", port] = replace(one, kind=PORT, places=(at,), covers=covers)
        return found

    def _finding(self, kind: str, link: Link, sight: Sight, until: int | None = None) -> Finding:
        since = sight.since if until is None else -1
        a, b = link
        places = (self._places.at(a, b), self._places.at(b, a))
        return Finding(
            kind, places, since, sight.now, sight.normal, sight.agree, sight.samples, until=until
        )

    def _of_workers(
        self, iteration: int, rows: Mapping[int, StageReport]
    ) -> dict[Hashable, Finding]:
        walls = {worker: report.wall for worker, report in self._cores.of(rows).items()}
        self._slow.update(walls)
        for worker, log in self._slow.logs.items():
            self._samples[worker].add(iteration, log)
        self._slow.accept()
        found: dict[Hashable, Finding] = {}
        for worker, factor in self._slow.factors().items():
            before = self._workers.get(worker)
            # Ops that share a core with others' compute longer, too: caches and clocks are shared.
            waits = self._queues[self._places.workers[worker].host].typical
            least = self._least * (1 + waits)
            if factor >= (least if before is None else min(least, SLOW)):
                sight = Sight(factor, 1.0, *self._samples[worker].since(0.0, math.log(factor)))
                if before is not None:
                    sight = sight._replace(since=before.since)
                self._workers[worker] = sight
                found[worker] = Finding(
                    WORKER, (self._places.at(worker),), sight.since, factor, 1.0, sight.agree,
                    sight.samples,
                )  # fmt: skip
            elif before is not None:
                del self._workers[worker]
                until, *_ = self._samples[worker].since(math.log(before.now), 0.0)
                found[worker] = Finding(
                    WORKER, (self._places.at(worker),), -1, 1.0, 1.0, until=until
                )
        return found

    def _of_hosts(self, iteration: int, rows: Mapping[int, StageReport]) -> dict[Hashable, Finding]:
        found: dict[Hashable, Finding] = {}
        for host, queue in self._queues.items():
            here = [w for w, worker in enumerate(self._places.workers) if worker.host == host]
            shares = [queue_share(rows[w]) for w in here if w in rows]
            known = [share for share in shares if share is not None]
            if known:
                queue.update(iteration, median(known))
            sight = queue.busy or queue.over
            if sight is not None:
                places = tuple(self._places.at(worker) for worker in here)
                found["host", host] = Finding(
                    HOST, places, sight.since, sight.now, sight.normal, sight.agree, sight.samples,
                    until=None if queue.busy else sight.since,
                )  # fmt: skip
        return found
