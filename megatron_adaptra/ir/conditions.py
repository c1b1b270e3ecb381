"""Conditions of a job: the only input of a planner, and the costs a simulation runs on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from megatron_adaptra.base.errors import BadInput, reading
from megatron_adaptra.ir.op import Kind


class LinkState(NamedTuple):
    """A directed link. `delay` in seconds beyond a healthy link, `bandwidth` in bytes/second.

    `jitter`: standard deviation of the delay in seconds; the delay is its mean.
    """

    delay: float = 0.0
    bandwidth: float = math.inf
    jitter: float = 0.0


HEALTHY = LinkState()
OP_COSTS = ("forward", "backward_input", "backward_weight", "backward", "recomputation")
# Fields that older files do not have.
_LATER: Mapping[str, Any] = {
    "step_sync": (), "backward": (), "recomputation": (), "core_share": (), "ports": {},
}  # fmt: skip


@dataclass(frozen=True)
class Conditions:
    """Seconds per op and stage, the links, and the limits.

    `cores`: compute slots that the stages of this pipeline share when they run on one machine's
    CPUs; None where every stage has a device of its own. `core_share`: by stage, the share of an
    op's seconds in which it needs its core, by default 1: for the rest it waits, in an emulation,
    or because the process is suspended. `step_seconds`: from the end of the
    pipeline to the end of the optimizer step, of which `step_sync` are those in which the stages
    wait for each other, one by one. `activation_budget`: microbatches in flight per
    stage, infinite where there is no limit. `chunks`: model chunks per device, of equal cost.
    `split`: whether a backward may run as two halves; `recompute`: whether single microbatches may
    be recomputed. `backward`: a backward in one piece, by default as long as its halves;
    `recomputation`: what making a microbatch's activations a second time costs in all, by default
    another forward. `ports`: by stage, bytes per second that it receives at most over all its
    links, and that it sends at most. Raises BadInput.
    """

    microbatches: int
    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    links: Mapping[tuple[int, int], LinkState] = field(default_factory=dict)
    message_bytes: float = 0.0
    activation_budget: tuple[float, ...] = ()
    step_seconds: float = 0.0
    step_sync: tuple[float, ...] = ()
    cores: float | None = None
    chunks: int = 1
    split: bool = True
    recompute: bool = False
    backward: tuple[float, ...] = ()
    recomputation: tuple[float, ...] = ()
    core_share: tuple[float, ...] = ()
    ports: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stages = len(self.forward)
        if stages < 1:
            raise BadInput("stages", stages, "a pipeline has at least 1 stage")
        for name in ("microbatches", "chunks"):
            if getattr(self, name) < 1:
                raise BadInput(name, getattr(self, name), "at least 1")
        if not self.activation_budget:
            object.__setattr__(self, "activation_budget", (math.inf,) * stages)
        costs = [name for name in OP_COSTS if getattr(self, name) or name in OP_COSTS[:3]]
        for name in (*costs, "activation_budget"):
            values = getattr(self, name)
            if len(values) != stages:
                raise BadInput(name, list(values), f"one value per stage, {stages} in all")
        for name in costs:
            for value in getattr(self, name):
                if not 0 <= value < math.inf:
                    raise BadInput(name, value, "a finite number of at least 0, in seconds")
        if self.core_share and len(self.core_share) != stages:
            allowed = f"one value per stage, {stages} in all, or none"
            raise BadInput("core_share", list(self.core_share), allowed)
        for share in self.core_share:
            if not 0 <= share <= 1:
                raise BadInput("core_share", share, "0 to 1")
        for budget in self.activation_budget:
            if not budget >= 1:
                raise BadInput("activation_budget", budget, "at least 1 microbatch in flight")
        for (source, target), link in self.links.items():
            if not (0 <= source < stages and 0 <= target < stages and source != target):
                raise BadInput("link", f"{source}>{target}", f"stages are 0 to {stages - 1}")
            good = all(0 <= x < math.inf for x in (link.delay, link.jitter))
            if not (good and link.bandwidth > 0):
                allowed = "a finite delay and jitter of at least 0 and a bandwidth above 0"
                raise BadInput(f"link {source}>{target}", tuple(link), allowed)
        for stage, rate in self.ports.items():
            if not 0 <= stage < stages:
                raise BadInput("port", stage, f"stages are 0 to {stages - 1}")
            if not rate > 0:
                raise BadInput(f"port {stage}", rate, "a number above 0, in bytes per second")
        if self.cores is not None and not 0 < self.cores < math.inf:
            raise BadInput("cores", self.cores, "a finite number above 0, or none")
        most = self.step_seconds
        if not all(x >= 0 for x in self.step_sync) or sum(self.step_sync) > most * (1 + 1e-9):
            allowed = f"numbers of at least 0, together within step_seconds, {most}"
            raise BadInput("step_sync", list(self.step_sync), allowed)
        for name in ("step_seconds", "message_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadInput(name, getattr(self, name), "a finite number of at least 0")

    @property
    def stages(self) -> int:
        """How many devices the pipeline has."""
        return len(self.forward)

    @property
    def workers(self) -> int:
        """The stages: each is the worker of its ops."""
        return self.stages

    @property
    def step_work(self) -> float:
        """Seconds of the step in which no stage waits for another."""
        return max(0.0, self.step_seconds - sum(self.step_sync))

    @property
    def shared(self) -> bool:
        """True where the stages have to share cores: there are fewer `cores` than stages."""
        return self.cores is not None and self.cores < self.stages

    def link(self, source: int, target: int) -> LinkState:
        """The link from stage `source` to stage `target`; healthy if nothing else is known."""
        return self.links.get((source, target), HEALTHY)

    def wire(self, source: int, target: int) -> float:
        """Seconds for which one message keeps the link from `source` to `target` busy."""
        return self.message_bytes / self.link(source, target).bandwidth

    def port(self, worker: int) -> float:
        """Return the seconds for which one message keeps the port of `worker` busy."""
        return self.message_bytes / self.ports.get(worker, math.inf)

    def message_seconds(self, source: int, target: int) -> float:
        """Return the seconds of a message from `source` to `target`: delay and transfer."""
        return self.link(source, target).delay + self.passes(source, target)

    def passes(self, source: int, target: int) -> float:
        """Seconds that a message's bytes take from `source` to `target`: by link and both ports."""
        return max(self.wire(source, target), self.port(source), self.port(target))

    @property
    def microbatch_seconds(self) -> float:
        """Seconds of a microbatch's F and B: on the slowest stage or, if longer, on all `cores`."""
        each = [self.seconds(Kind.F, s) + self.seconds(Kind.B, s) for s in range(self.stages)]
        if self.cores is None:
            return max(each)
        computed = sum(seconds * self.on_core(s) for s, seconds in enumerate(each))
        return max(*each, computed / self.cores)

    @property
    def full_links(self) -> tuple[tuple[int, int], ...]:
        """The links that are out of bandwidth, in order.

        A microbatch keeps one busy for longer than the slowest stage, so that the link sets the
        pace. Time on the way can be hidden, by a deeper warmup; this cannot.
        """
        pace = self.microbatch_seconds
        return tuple(link for link in sorted(self.links) if self.busy(*link) > pace)

    def name(self, stage: int) -> str:
        """Return the name of a `stage` for a sentence."""
        return f"stage {stage}"

    def busy(self, source: int, target: int) -> float:
        """Seconds that a microbatch's messages keep the link, or a port at its ends, busy.

        `source`, `target`: the link's stages.
        """
        ring = self.chunks > 1 and self.stages > 2
        inner = range(0 if ring else 1, self.stages if ring else self.stages - 1)
        ports = (self.port(stage) * (2 if stage in inner else 1) for stage in (source, target))
        return max(self.wire(source, target), *ports)

    def seconds(self, kind: Kind, stage: int) -> float:
        """Return the seconds that an op of this `kind` takes on `stage` with a core to itself."""
        if kind is Kind.F:
            return self.forward[stage]
        if kind is Kind.R:
            return (self.recomputation or self.forward)[stage]
        if kind is Kind.B:
            if self.backward:
                return self.backward[stage]
            return self.backward_input[stage] + self.backward_weight[stage]
        if kind is Kind.I:
            return self.backward_input[stage]
        return self.backward_weight[stage] if kind is Kind.W else 0.0

    def on_core(self, stage: int) -> float:
        """The share of an op's seconds on `stage` in which it needs its core."""
        return self.core_share[stage] if self.core_share else 1.0

    def healthy(self) -> Conditions:
        """The same job with no slow link."""
        return replace(self, links={}, ports={})

    def scaled(self, times: Sequence[float]) -> Conditions:
        """Return the same job with ops that take longer: `times[stage]` times as long."""
        costs: dict[str, Any] = {
            name: tuple(x * t for x, t in zip(seconds, times, strict=True))
            for name in OP_COSTS
            if (seconds := getattr(self, name))
        }
        return replace(self, **costs)

    def to_json(self) -> dict[str, Any]:
        """Return an object for json.dump; null stands for infinity."""
        plain = {name: getattr(self, name) for name in _FIELDS}
        lists = {name: list(each) for name, each in plain.items() if isinstance(each, tuple)}
        links = {
            f"{a}>{b}": {
                "delay": link.delay,
                "bandwidth": null_if_infinite(link.bandwidth),
                "jitter": link.jitter,
            }
            for (a, b), link in sorted(self.links.items())
        }
        ports = {str(stage): null_if_infinite(rate) for stage, rate in sorted(self.ports.items())}
        budget = [null_if_infinite(each) for each in self.activation_budget]
        return plain | lists | {"links": links, "ports": ports, "activation_budget": budget}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Conditions:
        """Return the conditions that `to_json` has turned into `data`. Raises BadInput."""
        with reading("conditions", data):
            links = {}
            for key, link in data["links"].items():
                source, target = key.split(">")
                links[int(source), int(target)] = LinkState(
                    link["delay"], infinite_if_null(link["bandwidth"]), link["jitter"]
                )
            values = {name: {**_LATER, **data}[name] for name in _FIELDS}
            lists = {name: tuple(x) for name, x in values.items() if isinstance(x, list)}
            budget = tuple(infinite_if_null(each) for each in values["activation_budget"])
            ports = {int(s): infinite_if_null(rate) for s, rate in values["ports"].items()}
            read = {"links": links, "ports": ports, "activation_budget": budget}
            return cls(**values | lists | read)


_FIELDS = tuple(each.name for each in fields(Conditions))


def null_if_infinite(value: float) -> float | None:
    """Return the `value` as JSON holds it: None for infinity."""
    return None if math.isinf(value) else value


def infinite_if_null(value: float | None) -> float:
    """Return the `value` read from JSON: infinity for None."""
    return math.inf if value is None else value
