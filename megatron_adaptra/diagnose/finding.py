"""Findings: who is slow, since when, how much it costs, how sure that is, what a user can do."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from megatron_adaptra.ir.routes import worker_name
from megatron_adaptra.measure.report import StageReport

VERSION = 1
OPENED, CHANGED, CLOSED = STATES = ("opened", "changed", "closed")


class Worker(NamedTuple):
    """A worker runs one stage of one replica, on the host named `host`, as global rank `rank`."""

    rank: int
    host: str


@dataclass(frozen=True)
class Place:
    """A place names a rank, its stage and host, and the interface that messages go through there.

    `through`: an interface, RDMA ports or `memory`; "" if unknown. `worker`: replica and stage,
    `1.2`, where the job has several replicas; else "".
    """

    stage: int
    rank: int
    host: str
    through: str
    worker: str = ""

    def in_words(self) -> str:
        """Describe the place, as in `rank 3 on node1 (eth0)`."""
        return f"rank {self.rank} on {self.host}" + (f" ({self.through})" if self.through else "")


class Places:
    """A Places names the workers that report, as places.

    Args:
        workers: by number, with rank and host.
        stages: of a replica.
        replica: the first of these workers' replica in the job, for names; None for no names.
    """

    def __init__(self, workers: Sequence[Worker], stages: int, replica: int | None) -> None:
        self.workers, self._stages, self._replica = tuple(workers), stages, replica
        self._through: dict[int, Mapping[int, str]] = {}  # by worker, as last reported

    def see(self, rows: Mapping[int, StageReport]) -> None:
        """Take from reports what messages go through."""
        for worker, report in rows.items():
            self._through[worker] = {source: link.through for source, link in report.links.items()}

    def at(self, worker: int, other: int | None = None) -> Place:
        """Return the place of a `worker`, or its end of a link to the `other` one."""
        through = "" if other is None else self._through.get(worker, {}).get(other, "")
        name = ""
        if self._replica is not None:
            name = worker_name(self._replica * self._stages + worker, self._stages)
        return Place(worker % self._stages, *self.workers[worker], through, name)


class About(NamedTuple):
    """An About holds the words for one kind of finding.

    `now`: what is measured, in milliseconds if `ms`, else as a number of times. `well`: the same
    once it is over. `advice`: what a user can check.
    """

    now: str
    well: str
    ms: bool
    advice: str


_MESSAGE = "a message takes {takes:.3g} ms"
_TIMES = "a microbatch takes {takes:.1f} times as long as {beside}"
_WELL = "a microbatch takes as long as {beside}"
_COMES = "to the reduction of gradients of {beside}"
_WAITS = "ops wait for a core {takes:.1f} times as long as they compute"
_LOADS = "its iterations wait {takes:.3g} ms for batches"
_COLLECTS = "ranks collect garbage in different iterations, {takes:.3g} ms per iteration"
_ENDS = "adaptra doctor on both hosts: "
LINK, THIN_LINK, PORT, WORKER, HOST = (
    "slow link", "thin link", "thin port", "slow worker", "busy host",
)  # fmt: skip
LOADER, GARBAGE, STAGE = "data loader", "garbage collection", "slow stage"
REPLICA, LATE = "slow replica", "late rank"
KINDS = {
    LINK: About(_MESSAGE, _MESSAGE, True, f"{_ENDS}routes, cables, traffic shapers"),
    THIN_LINK: About(_MESSAGE, _MESSAGE, True, f"{_ENDS}link speed, errors, MTU"),
    PORT: About(_MESSAGE, _MESSAGE, True, "adaptra doctor there: port speed, who else sends"),
    WORKER: About(_TIMES, _WELL, False, "clocks, temperature and other users of its device"),
    HOST: About(_WAITS, _WAITS, False, "what else runs on this host"),
    LOADER: About(_LOADS, _LOADS, True, "--num-workers, the storage, what a sample takes to read"),
    GARBAGE: About(_COLLECTS, _COLLECTS, True, "--manual-gc --manual-gc-interval N: all at once"),
    STAGE: About(_TIMES, _WELL, False, "what all replicas of the stage share: a rack, a switch"),
    REPLICA: About(_TIMES, _WELL, False, "clocks, temperature and other users of its devices"),
    LATE: About(
        f"comes {{takes:.3g}} ms late {_COMES}",
        f"comes in time {_COMES}",
        True,
        "what this rank does before its gradients are reduced",
    ),
}


@dataclass
class Finding:
    """A finding says that something is slow.

    Args:
        kind: one of KINDS.
        places: where: both ends of a link, its receiver last; one worker, rank or port; else all.
        since: the first iteration in which it was slow, from 0.
        takes, normal: now, and where all is well: seconds, or times as long; see About.
        agree, samples: how many of so many iterations since then show it.
        number: how many were found before it by the same rank; `by`: that rank.
        found: the iteration whose reports have shown it. `until`: the first one that is well again.
        iteration, before: median seconds of an iteration since then, and before; None if unknown.
        lost: the seconds by which all iterations since then took longer than before, together.
        at: when it was found, in seconds since 1970.
        covers: subjects that are slow because of it, and no findings of their own.
        beside: what it is compared with, in words; of a late rank, those whose gradients are
            reduced.
        because: names of the open findings that explain it.
    """

    kind: str
    places: tuple[Place, ...]
    since: int
    takes: float
    normal: float
    agree: int = 1
    samples: int = 1
    number: int = -1
    by: int = 0
    found: int = -1
    until: int | None = None
    iteration: float | None = None
    before: float | None = None
    lost: float = 0.0
    at: float = field(default_factory=time.time)
    covers: frozenset[Hashable] = frozenset()
    beside: str = "normally"
    because: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The finding's name in a job: the rank that found it, and its number there."""
        return f"{self.by}-{self.number}"

    def to_json(self, state: str) -> dict[str, Any]:
        """Return the event for its `state`, one of STATES; times are milliseconds."""
        about = KINDS[self.kind]
        unit = 1e3 if about.ms else 1.0
        ms = {
            name: None if value is None else 1e3 * value
            for name, value in (("iteration", self.iteration), ("before", self.before))
        }
        return {
            "kind": "finding", "version": VERSION, "state": state, "id": self.id,
            "at": round(self.at, 3), "what": self.kind,
            "where": [asdict(place) for place in self.places], "since": self.since,
            "found": self.found, "until": self.until, "takes": unit * self.takes,
            "normal": unit * self.normal, "unit": "ms" if about.ms else "times",
            "iteration_ms": ms["iteration"], "before_ms": ms["before"],
            "lost_ms": 1e3 * self.lost, "agree": self.agree, "samples": self.samples,
            "advice": about.advice, "beside": self.beside, "because": list(self.because),
        }  # fmt: skip

    def sentence(self, state: str) -> str:
        """Describe the finding and its `state` in one line; Megatron's log counts from one."""
        if state == CLOSED:
            assert self.until is not None
            count = self.until - self.since
            return (
                f"recovered: {self._where()}, from iteration {self.until + 1} on: {self._now()}; "
                f"the {self.kind} was there for {count} iterations, which took "
                f"{self.lost:.3g} s longer"
            )
        return (
            f"{self.kind}: {self._where()}, since iteration {self.since + 1}: {self._now()}"
            f"{self._cost()}{self._why()}; {self.agree} of {self.samples} samples agree; to check: "
            f"{KINDS[self.kind].advice}"
        )

    def _where(self) -> str:
        names = [place.in_words() for place in self.places]
        workers = [place.worker for place in self.places if place.worker]
        link = self.kind in (LINK, THIN_LINK)
        text = (" to " if link else ", ").join(names)
        return text + (f" ({(' -> ' if link else ', ').join(workers)})" if workers else "")

    def _now(self) -> str:
        about = KINDS[self.kind]
        scale = 1e3 if about.ms else 1.0
        if self.until is not None:
            return about.well.format(takes=scale * self.takes, beside=self.beside)
        normal = f", normally {1e3 * self.normal:.3g} ms" if about.ms and self.normal else ""
        return about.now.format(takes=scale * self.takes, beside=self.beside) + normal

    def _why(self) -> str:
        return f"; because of {' and '.join(self.because)}" if self.because else ""

    def _cost(self) -> str:
        if self.iteration and self.kind == LATE and not self.before:
            return f"; {self.takes / self.iteration:.0%} of an iteration"
        if self.iteration is None or not self.before or self.iteration <= self.before:
            return ""
        more = self.iteration / self.before - 1
        return (
            f"; an iteration takes {1e3 * self.iteration:.4g} ms, before {1e3 * self.before:.4g} "
            f"({more:+.0%})"
        )
