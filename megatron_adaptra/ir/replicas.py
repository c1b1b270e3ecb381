"""Conditions of several replicas of one pipeline: which workers and paths are slow or dead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from megatron_adaptra.base.errors import BadInput, reading
from megatron_adaptra.ir.conditions import Conditions, LinkState, infinite_if_null, null_if_infinite
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.routes import parse_worker, worker_name


@dataclass(frozen=True)
class ReplicaConditions:
    """A ReplicaConditions describes a job whose replicas may run each other's microbatches.

    Workers are numbered as in `ir.routes`.

    Args:
        pipeline: conditions of each replica, where nothing else is known of a worker; with one
            chunk per stage. Its cores are an even share of those that all workers have together.
        replicas: at least 2.
        failed: workers that are dead; every stage has another.
        slow: by worker, how many times as long as in `pipeline` its ops take; above 0.
        core_share: by worker, where it is other than in `pipeline`; see there.
        paths: by source and target, workers of adjacent stages, the directed path between them,
            where it differs from what `pipeline` has between the two stages.
        ports: by worker, bytes per second that it receives at most over all its paths, and that
            it sends at most.
        activation_budget: microbatches in flight, per worker; empty for those of `pipeline`.

    Raises:
        BadInput: a value is out of range, or does not go with the others.
    """

    pipeline: Conditions
    replicas: int
    failed: frozenset[int] = frozenset()
    slow: Mapping[int, float] = field(default_factory=dict)
    paths: Mapping[tuple[int, int], LinkState] = field(default_factory=dict)
    ports: Mapping[int, float] = field(default_factory=dict)
    activation_budget: tuple[float, ...] = ()
    core_share: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.replicas < 2:
            allowed = "at least 2: one has no other replica to run its microbatches"
            raise BadInput("replicas", self.replicas, allowed)
        if self.pipeline.chunks > 1:
            allowed = "1: virtual stages are not planned across replicas"
            raise BadInput("chunks", self.pipeline.chunks, allowed)
        for name in ("failed", "slow", "ports", "core_share"):
            for worker in getattr(self, name):
                self._check_worker(name, worker)
        for stage in range(self.stages):
            if all(replica * self.stages + stage in self.failed for replica in self.all_replicas):
                names = ", ".join(map(self.name, sorted(self.failed)))
                raise BadInput("failed", names, f"nobody is left for stage {stage}")
        for worker, times in self.slow.items():
            if not 0 < times < math.inf:
                raise BadInput(f"slow {self.name(worker)}", times, "a finite number above 0")
        for worker, share in self.core_share.items():
            if not 0 <= share <= 1:
                raise BadInput(f"core_share {self.name(worker)}", share, "0 to 1")
        for worker, rate in self.ports.items():
            if not rate > 0:
                allowed = "a number above 0, in bytes per second"
                raise BadInput(f"port {self.name(worker)}", rate, allowed)
        for (source, target), link in self.paths.items():
            self._check_path(source, target, link)
        if not self.activation_budget:
            each = self.pipeline.activation_budget * self.replicas
            object.__setattr__(self, "activation_budget", each)
        if len(self.activation_budget) != self.workers:
            allowed = f"one value per worker, {self.workers} in all"
            raise BadInput("activation_budget", list(self.activation_budget), allowed)
        for budget in self.activation_budget:
            if not budget >= 1:
                raise BadInput("activation_budget", budget, "at least 1 microbatch in flight")

    def _check_worker(self, what: str, worker: int) -> None:
        if not 0 <= worker < self.workers:
            allowed = f"replicas are 0 to {self.replicas - 1}, stages 0 to {self.stages - 1}"
            raise BadInput(what, worker_name(worker, self.stages), allowed)

    def _check_path(self, source: int, target: int, link: LinkState) -> None:
        name = f"path {self.name(source)}-{self.name(target)}"
        for worker in (source, target):
            self._check_worker("path", worker)
        if abs(source % self.stages - target % self.stages) != 1:
            raise BadInput("path", name[5:], "its workers are on adjacent stages")
        if not (0 <= link.delay < math.inf and link.bandwidth > 0 and not link.jitter):
            allowed = "a finite delay of at least 0, a bandwidth above 0, and no jitter"
            raise BadInput(name, tuple(link), allowed)

    @property
    def stages(self) -> int:
        """How many stages each replica has."""
        return self.pipeline.stages

    @property
    def all_replicas(self) -> range:
        """The numbers of the replicas, from 0."""
        return range(self.replicas)

    @property
    def workers(self) -> int:
        """The number of workers in all replicas, dead ones included."""
        return self.stages * self.replicas

    @property
    def microbatches(self) -> int:
        """The number of microbatches that each replica runs in an iteration."""
        return self.pipeline.microbatches

    @property
    def cores(self) -> float | None:
        """Compute slots that all workers share; None where each has a device of its own."""
        return None if self.pipeline.cores is None else self.pipeline.cores * self.replicas

    @property
    def shared(self) -> bool:
        """True where the workers have to share cores."""
        return self.pipeline.shared

    @property
    def step_work(self) -> float:
        """Seconds of the step in which no stage waits for another."""
        return self.pipeline.step_work

    @property
    def step_sync(self) -> tuple[float, ...]:
        """Seconds of the step in which the stages wait for each other, one by one."""
        return self.pipeline.step_sync

    def name(self, worker: int) -> str:
        """Replica and stage of `worker`: `1.2`."""
        return worker_name(worker, self.stages)

    def alive(self, stage: int) -> list[int]:
        """The workers of `stage` that are not dead, in the order of their replicas."""
        all_of_it = range(stage, self.workers, self.stages)
        return [worker for worker in all_of_it if worker not in self.failed]

    def seconds(self, kind: Kind, worker: int) -> float:
        """Return the seconds that an op of this `kind` takes on `worker` with a core to itself."""
        return self.slow.get(worker, 1.0) * self.pipeline.seconds(kind, worker % self.stages)

    def on_core(self, worker: int) -> float:
        """The share of an op's seconds on `worker` in which it needs its core."""
        known = self.core_share.get(worker)
        return self.pipeline.on_core(worker % self.stages) if known is None else known

    def link(self, source: int, target: int) -> LinkState:
        """The path from worker `source` to worker `target`."""
        known = self.paths.get((source, target))
        if known is not None:
            return known
        return self.pipeline.link(source % self.stages, target % self.stages)

    def wire(self, source: int, target: int) -> float:
        """Seconds for which one message keeps the path from `source` to `target` busy."""
        return self.message_bytes / self.link(source, target).bandwidth

    def message_seconds(self, source: int, target: int) -> float:
        """Return the seconds of a message from `source` to `target`: delay and transfer."""
        return self.link(source, target).delay + self.passes(source, target)

    def passes(self, source: int, target: int) -> float:
        """Seconds that a message's bytes take from `source` to `target`: by path and both ports."""
        return max(self.wire(source, target), self.port(source), self.port(target))

    @property
    def message_bytes(self) -> float:
        """The bytes of one message."""
        return self.pipeline.message_bytes

    def port(self, worker: int) -> float:
        """Return the seconds for which one message keeps the port of `worker` busy."""
        of_stage = self.pipeline.ports.get(worker % self.stages, math.inf)
        return self.message_bytes / self.ports.get(worker, of_stage)

    def chain(self, workers: Sequence[int]) -> Conditions:
        """Return the conditions of the pipeline of such `workers`, by stage, none of them dead.

        It has its even share of the cores.
        """
        links: dict[tuple[int, int], LinkState] = {}
        for s, (a, b) in enumerate(pairwise(workers)):
            links[s, s + 1], links[s + 1, s] = self.link(a, b), self.link(b, a)
        return replace(
            self.pipeline.scaled([self.slow.get(worker, 1.0) for worker in workers]),
            links=links,
            activation_budget=tuple(self.activation_budget[worker] for worker in workers),
            core_share=tuple(map(self.on_core, workers)),
        )

    def to_json(self) -> dict[str, Any]:
        """Return an object for json.dump; null stands for infinity."""
        names = self.name
        return {
            "pipeline": self.pipeline.to_json(),
            "replicas": self.replicas,
            "failed": [names(worker) for worker in sorted(self.failed)],
            "slow": {names(worker): times for worker, times in sorted(self.slow.items())},
            "paths": {
                f"{names(a)}>{names(b)}": [link.delay, null_if_infinite(link.bandwidth)]
                for (a, b), link in sorted(self.paths.items())
            },
            "ports": {
                names(worker): null_if_infinite(rate) for worker, rate in sorted(self.ports.items())
            },
            "activation_budget": [null_if_infinite(budget) for budget in self.activation_budget],
            "core_share": {
                names(worker): share for worker, share in sorted(self.core_share.items())
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReplicaConditions:
        """Return the conditions that `to_json` has turned into `data`. Raises BadInput."""
        with reading("conditions of replicas", data):
            pipeline = Conditions.from_json(data["pipeline"])
            stages, paths = pipeline.stages, {}
            for key, (delay, bandwidth) in data["paths"].items():
                source, target = (parse_worker(text, stages) for text in key.split(">"))
                paths[source, target] = LinkState(delay, infinite_if_null(bandwidth))
            return cls(
                pipeline,
                data["replicas"],
                frozenset(parse_worker(text, stages) for text in data["failed"]),
                {parse_worker(text, stages): times for text, times in data["slow"].items()},
                paths,
                {
                    parse_worker(text, stages): infinite_if_null(r)
                    for text, r in data["ports"].items()
                },
                tuple(infinite_if_null(budget) for budget in data["activation_budget"]),
                {parse_worker(text, stages): x for text, x in data.get("core_share", {}).items()},
            )
