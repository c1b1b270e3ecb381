"""The diagnosis of what a leader sees: links and workers of one pipeline, or of all replicas."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

from megatron_adaptra.diagnose.across import StageTimes
from megatron_adaptra.diagnose.beside import Search
from megatron_adaptra.diagnose.book import FindingBook
from megatron_adaptra.diagnose.finding import (
    GARBAGE,
    HOST,
    LINK,
    LOADER,
    PORT,
    REPLICA,
    STAGE,
    THIN_LINK,
    Finding,
    Place,
    Places,
    Worker,
)
from megatron_adaptra.diagnose.garbage import GarbageWatch
from megatron_adaptra.diagnose.watch import KEPT_SAMPLES, LinkWatch, MostlyWatch, Queue, Sight
from megatron_adaptra.diagnose.workers import WorkerDiagnosis
from megatron_adaptra.measure.core_use import never_queued, queue_share
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.link_delay import Link
from megatron_adaptra.measure.replica_estimate import ReplicaEstimator
from megatron_adaptra.measure.report import StageReport

# Shares of its iterations that a rank waits for batches: from the first on its loader is slow, and
# below the second it is well again. Reading what others have prepared takes a hundredth, and almost
# a tenth where small models train on CPUs. A single batch may be late, as the first of a file.
LOADING, LOADING_WELL = 0.15, 0.1
LOOKED_AT, MOST = 5, 4  # iterations that are looked at, and how many of them have to agree
LOOKS = 24  # iterations from its first slow one on, in which a link's bandwidth gets known
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

    It goes on where a job begins another run, with another number of microbatches.

    Args:
        workers: all that report, by number, with rank and host.
        replicas: of these workers.
        replica: the first of them among all of the job, for names; None where the job has one.
        book: gets what is found.
        shows: takes what this pipeline's stages have measured, to be compared with others'.
    """

    def __init__(
        self, workers: Sequence[Worker], replicas: int, replica: int | None, book: FindingBook,
        shows: Callable[[StageTimes], None] | None = None,
    ) -> None:  # fmt: skip
        self.book, self._replicas, self._shows = book, replicas, shows
        self._stages = len(workers) // replicas
        self._places = Places(workers, self._stages, replica)
        self._links: dict[Link, LinkWatch] = {}
        self._workers = WorkerDiagnosis(self._places, self._stages, replicas)
        self._loaders: dict[int, MostlyWatch] = {}  # by worker that reads batches
        self._garbage = GarbageWatch()
        self._thin: set[Link] = set()
        self._ports: dict[int, set[Link]] = {}  # by worker whose port is thin, its links
        self._hosts: dict[str, list[int]] = {}  # and their workers
        for number, worker in enumerate(workers):
            self._hosts.setdefault(worker.host, []).append(number)
        self._queues = {host: Queue() for host in self._hosts}
        self._own = [Queue(KEPT_SAMPLES) for _ in workers]  # the first ones of a rank are restless
        self._search = Search("who is slow", book)

    def update(
        self,
        iteration: int,
        rows: Mapping[int, StageReport],
        estimator: Estimator | ReplicaEstimator,
    ) -> None:
        """Take the reports of an `iteration`, by worker, which the `estimator` has taken before.

        An error ends the diagnosis alone, with one line: plans go on without it.
        """
        self._search.run(self._update, iteration, rows, estimator)

    def _update(
        self,
        iteration: int,
        rows: Mapping[int, StageReport],
        estimator: Estimator | ReplicaEstimator,
    ) -> None:
        self._places.see(rows)
        took = [one.seconds for w, one in rows.items() if w % self._stages == 0 and one.seconds]
        if took:
            self.book.took(iteration - 1, max(took))
        now: dict[Hashable, Finding] = {}
        now |= self._of_links(iteration, estimator)
        now |= self._of_hosts(iteration, rows)
        alone = {worker: never_queued(report.of_ops_alone()) for worker, report in rows.items()}
        more = {worker: self._more(worker) for worker in range(len(self._places.workers))}
        now |= self._workers.update(iteration, alone, more.__getitem__)
        now |= self._of_loaders(iteration, rows)
        now |= self._of_garbage(iteration, rows)
        self.book.update(iteration, now)
        if self._shows is not None:  # later: who compares them knows by then what is found here
            walls = {worker: report.wall for worker, report in alone.items()}
            self._shows(StageTimes(iteration, max(took, default=None), walls, more))

    def answers(self, change: Subjects) -> list[str]:
        """Return the names of the open findings that a `change` is for."""
        ends = sorted({end for link in change.links for end in link})
        ports = [("port", worker) for worker in ends]
        wider = {(REPLICA, worker // self._stages) for worker in change.workers}
        wider |= {(STAGE, worker % self._stages) for worker in change.workers}
        return self.book.ids(
            [*map(frozenset, change.links), *change.workers, *sorted(wider), *ports]
        )

    def _of_links(
        self, iteration: int, estimator: Estimator | ReplicaEstimator
    ) -> dict[Hashable, Finding]:
        stage_seconds, charts = estimator.stage_seconds(), estimator.charts
        for link, seconds in estimator.samples.items():
            watch = self._links.setdefault(link, LinkWatch(charts[link].floor))
            watch.update(iteration, seconds, stage_seconds)
        slow = {link: one.slow for link, one in self._links.items() if one.slow is not None}
        well = {link: one.well for link, one in self._links.items() if one.well is not None}
        found: dict[Hashable, Finding] = {}
        for link, sight in sorted(well.items(), key=lambda item: -item[1].now):
            if link[::-1] not in slow:
                found[frozenset(link)] = self._finding(LINK, link, sight, over=True)
        self._look_at_bytes(iteration, slow, estimator)
        for link, sight in sorted(slow.items(), key=lambda item: item[1].now):
            kind = THIN_LINK if link in self._thin else LINK
            found[frozenset(link)] = self._finding(kind, link, sight)  # of both ways the slower
        for port in list(self._ports):
            found |= self._of_port(port, slow, well, found)
        return found

    def _of_port(
        self, port: int, slow: Mapping[Link, Sight], well: Mapping[Link, Sight],
        found: dict[Hashable, Finding],
    ) -> dict[Hashable, Finding]:  # fmt: skip
        """Return the finding on a thin `port`, in place of those `found` on its links."""
        links = self._ports[port]
        still = {link: slow[link] for link in links if link in slow}
        sights = still or {link: well[link] for link in links if link in well}
        if not still:
            del self._ports[port]
        if not sights:
            return {}
        worst = max(sights, key=lambda link: sights[link].now)
        covers = frozenset(frozenset(link) for link in links)
        for pair in covers:
            found.pop(pair, None)
        at = self._places.at(port, worst[0] if worst[1] == port else worst[1])
        one = self._finding(PORT, worst, sights[worst], over=not still)
        return {("port", port): replace(one, places=(at,), covers=covers)}

    def _look_at_bytes(
        self,
        iteration: int,
        slow: Mapping[Link, Sight],
        estimator: Estimator | ReplicaEstimator,
    ) -> None:
        """Find out which of the `slow` links, and which ports, are short of bandwidth.

        What was found once holds until the link is well: estimates of bytes go to and fro.
        """
        self._thin &= slow.keys()
        known = {link for links in self._ports.values() for link in links}
        new = {link for link, sight in slow.items() if iteration <= sight.since + LOOKS}
        if not ((unknown := new - known) and estimator.known):
            return
        conditions = estimator.conditions()
        for link in unknown:
            sight = slow[link]
            if conditions.wire(*link) >= THIN_SHARE * (sight.now - sight.normal):
                self._thin.add(link)
                if ports := [end for end in link if conditions.port(end) > 0]:
                    self._ports.setdefault(ports[0], set()).add(link)

    def _finding(self, kind: str, link: Link, sight: Sight, over: bool = False) -> Finding:
        a, b = link
        return _seen(kind, (self._places.at(a, b), self._places.at(b, a)), sight, over)

    def _of_loaders(
        self, iteration: int, rows: Mapping[int, StageReport]
    ) -> dict[Hashable, Finding]:
        for worker, report in rows.items():
            if report.loading is None or not report.seconds:
                continue
            watch = self._loaders.setdefault(worker, MostlyWatch(LOOKED_AT, MOST, 0.0))
            # On a busy host all takes longer.
            seconds = (1 + self._queue(worker).typical) * report.seconds
            watch.update(iteration - 1, report.loading, LOADING * seconds, LOADING_WELL * seconds)
        found: dict[Hashable, Finding] = {}
        for worker, watch in self._loaders.items():
            if (sight := watch.slow or watch.well) is not None:
                at, over = self._places.at(worker), watch.slow is None
                found["loader", worker] = _seen(LOADER, (at,), sight, over)
        return found

    def _of_garbage(
        self, iteration: int, rows: Mapping[int, StageReport]
    ) -> dict[Hashable, Finding]:
        known = {w: r.collecting for w, r in rows.items() if r.collecting is not None}
        took = [report.seconds for report in rows.values() if report.seconds]
        watch = self._garbage
        if known and took:
            watch.update(iteration - 1, max(took), known)
        if (sight := watch.busy or watch.over) is None:
            return {}
        places = tuple(map(self._places.at, watch.workers))
        return {"garbage": _seen(GARBAGE, places, sight, watch.busy is None)}

    def _queue(self, worker: int) -> Queue:
        """Return the queue for cores on the host of a `worker`."""
        return self._queues[self._places.workers[worker].host]

    def _more(self, worker: int) -> float:
        """Return what ops of a `worker` wait for cores beyond what is normal there, or on its host.

        Those that take turns on a core compute longer, too: each finds its caches emptied.
        """
        return max(self._own[worker].more, self._queue(worker).more)

    def _of_hosts(self, iteration: int, rows: Mapping[int, StageReport]) -> dict[Hashable, Finding]:
        found: dict[Hashable, Finding] = {}
        shares = {worker: queue_share(report) for worker, report in rows.items()}
        known = {worker: share for worker, share in shares.items() if share is not None}
        for worker, share in known.items():
            self._own[worker].update(iteration, share)
        for host, queue in self._queues.items():
            here = self._hosts[host]
            if each := [known[worker] for worker in here if worker in known]:
                queue.update(iteration, median(each))
            sight = queue.busy or queue.over
            if sight is not None:
                places = tuple(self._places.at(worker) for worker in here)
                found["host", host] = _seen(HOST, places, sight, queue.busy is None)
        return found


def _seen(kind: str, places: tuple[Place, ...], sight: Sight, over: bool) -> Finding:
    """Make the finding of a `sight`; `over`: it is the one that shows that all is well."""
    since, until = (-1, sight.since) if over else (sight.since, None)
    return Finding(
        kind, places, since, sight.now, sight.normal, sight.agree, sight.samples, until=until
    )
