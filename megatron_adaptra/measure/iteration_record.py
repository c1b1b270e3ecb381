"""The record of one worker's iteration: its ops, its messages, its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from megatron_adaptra.ir.op import COMPUTE, Kind, Op
from megatron_adaptra.ir.timeline import Message, Span, Timeline
from megatron_adaptra.measure.link_delay import larger, link_sample
from megatron_adaptra.measure.port_use import port_use
from megatron_adaptra.measure.report import Collective, Memory, OpAlone, StageReport, Step, StockOp
from megatron_adaptra.transport.base import Stamps


class OpTime(NamedTuple):
    """An op time holds when an op ran, in seconds on the monotonic clock.

    `cpu`: CPU seconds of the thread that ran it; 0 on a device. After messages of Megatron's own,
    `asked`: when the host called for them; `lag`: seconds from when the call was answered until the
    host launched the op, and those of the call in which its thread waited for a core. `queued`:
    seconds that the thread waited for a core; None where that is not known. `waited`: seconds of
    waiting for other replicas, which may be later than this one. `aside`, `aside_cpu`: seconds of
    waiting for batches and of collecting garbage, and the CPU seconds of both.
    """

    op: Op
    start: float
    end: float
    cpu: float
    asked: float = 0.0
    lag: float = 0.0
    queued: float | None = None
    waited: float = 0.0
    aside: float = 0.0
    aside_cpu: float = 0.0

    @property
    def alone(self) -> OpTime:
        """The op without what was aside."""
        cpu = max(0.0, self.cpu - self.aside_cpu)
        return self._replace(end=max(self.start, self.end - self.aside), cpu=cpu)

    @property
    def own(self) -> float:
        """The seconds of the op without its wait for other replicas."""
        return max(self.cpu, self.end - self.start - self.waited)


class CollectiveSpan(NamedTuple):
    """A collective span holds when stages did one operation of the step together.

    `start`, `end`: seconds on the monotonic clock. `name`: the same one in every iteration.
    `backend` and `direct`: seconds, as last measured, through torch's backend and through an
    all-gather of ours; negative where not known. `stages`: those that take part; () for all.
    `kept`: it always goes through the backend. `taken`: where a device did it, returns the seconds
    there; None while they are not known.
    """

    name: str
    start: float
    end: float
    backend: float
    direct: float
    stages: tuple[int, ...] = ()
    kept: bool = False
    taken: Callable[[], float | None] | None = None

    def known(self) -> CollectiveSpan:
        """Return the span with the device's seconds, where known, in place of its launch's."""
        if self.taken is None:
            return self
        seconds = self.taken()
        if seconds is None:
            return self._replace(taken=None)
        return self._replace(end=self.start + seconds, backend=seconds, taken=None)


@dataclass
class IterationRecord:
    """An iteration record collects what one worker did in one iteration.

    `cpu`: CPU seconds of the whole process between the first op and the last one. `stock`:
    Megatron's own messages were used, so that `messages` is empty. `probed`: source and stamps of
    what was sent only to measure a link. `through`: see LinkSample, by source; `met`, `loading`,
    `collecting`, `layers`: see StageReport, but of this iteration. `unusable`: why its times mean
    nothing.
    """

    worker: int
    iteration: int
    begin: float = 0.0
    end: float = 0.0
    cpu: float = 0.0
    ops: list[OpTime] = field(default_factory=list)
    messages: list[tuple[int, Op, Stamps]] = field(default_factory=list)  # source, op, stamps
    memory: Memory | None = None
    collectives: Sequence[CollectiveSpan] = ()
    stock: bool = False
    probed: list[tuple[int, Stamps]] = field(default_factory=list)
    through: Mapping[int, str] = field(default_factory=dict)
    unusable: str = ""
    met: str = ""
    loading: float | None = None
    collecting: float | None = None
    layers: str = ""

    def report(self, before: IterationRecord | None = None) -> StageReport:
        """Return the small message to the leader; `before`: the previous record, for its step."""
        compute = sum(o.cpu for o in self.ops)
        stock = (StockOp(str(o.op), o.start, o.end, o.asked, o.lag) for o in self.ops)
        ended = before is not None and before.end > 0
        links, transits, large = {}, {}, {}
        for source in sorted(self.sources):
            messages = [t for s, _, t in self.messages if s == source]
            probes = [t for s, t in self.probed if s == source]
            links[source] = link_sample(messages, probes, self.through.get(source, ""))
            least, some = links[source].probed, larger(messages, probes)
            if least is not None and some:
                transits[source], large[source] = least, some
        return StageReport(
            self.worker,
            self.iteration,
            wall=self._seconds("wall"),
            cpu=self._seconds("cpu"),
            queued=self._seconds("queued") if self._counted else {},
            idle=self._seconds("idle") if self._counted else {},
            overhead=self.cpu / compute if compute > 0 else 1.0,
            links=links,
            starved=self.starved,
            port=port_use(large, transits) if len(large) > 1 else None,
            memory=self.memory,
            ops=tuple(stock) if self.stock else None,
            step=before.step if before and ended else None,
            seconds=before.end - before.begin if before and ended else None,
            met=self.met,
            loading=before.loading if before and ended else None,
            collecting=before.collecting if before and ended else None,
            alone=self._alone(),
            layers=self.layers,
        )

    def _alone(self) -> dict[str, OpAlone]:
        if not any(o.aside for o in self.ops):
            return {}
        other = replace(self, ops=[o.alone for o in self.ops])
        wall, cpu = other._seconds("wall"), other._seconds("cpu")
        idle = other._seconds("idle") if self._counted else dict.fromkeys(wall, 0.0)
        return {kind: OpAlone(wall[kind], cpu[kind], idle[kind]) for kind in wall}

    @property
    def sources(self) -> set[int]:
        """The workers that messages or probes came from."""
        return {s for s, _, _ in self.messages} | {s for s, _ in self.probed}

    @property
    def known(self) -> bool:
        """True once the times of its ops are known."""
        return self.begin > 0

    @property
    def starved(self) -> float:
        """The seconds between ops that a device was idle because the host was late."""
        late = 0.0
        for before, after in zip(self.ops, self.ops[1:], strict=False):
            gap, asking = after.start - before.end, after.asked - before.end
            late += min(max(0.0, gap), max(0.0, asking) + max(0.0, after.lag))
        return late

    @property
    def _counted(self) -> bool:
        """True where the wait for a core is known of every op."""
        return all(o.queued is not None for o in self.ops)

    def _seconds(self, clock: str) -> dict[str, float]:
        """Return seconds by kind of op, of those that ran; `clock`: see `_typical`.

        A forward that keeps no activations takes longer; its excess over others counts as R.
        """
        recomputed = {o.op[1:3] for o in self.ops if o.op.kind is Kind.R}
        found: dict[str, list[OpTime]] = {}
        for o in self.ops:
            dropped = o.op.kind is Kind.F and o.op[1:3] in recomputed
            if o.op.kind in COMPUTE:
                found.setdefault("recomputed" if dropped else o.op.kind.value, []).append(o)
        seconds = {kind: _typical(ops, clock) for kind, ops in found.items()}
        if (dropping := seconds.pop("recomputed", None)) is not None:
            plain = seconds.setdefault("F", dropping)
            seconds["R"] = max(0.0, seconds["R"] + dropping - plain)
        return seconds

    @property
    def step(self) -> Step:
        """The step, and its collectives."""
        collectives = (
            Collective(c.name, c.end - c.start, c.backend, c.direct, c.stages, c.kept)
            for c in self.collectives
        )
        return Step(self.end - self.last_op_end, tuple(collectives))

    @property
    def last_op_end(self) -> float:
        """The moment, on the monotonic clock, when the pipeline part was over."""
        return self.ops[-1].end if self.ops else self.begin


def merge(records: Sequence[IterationRecord], name: str, replicas: int = 1) -> Timeline:
    """Return the measured Timeline, called `name`, of one iteration of workers with one clock.

    `records`: one of each worker of so many `replicas`.
    """
    zero = min(r.begin for r in records)
    spans, messages = [], []
    finish = max(r.last_op_end for r in records)
    for r in records:
        spans += [Span(r.worker, o.op, o.start - zero, o.end - zero) for o in r.ops]
        spans += [Span(r.worker, op, a - zero, b - zero) for op, a, b in _step_of(r, finish)]
        messages += [
            # The first receives are posted in the iteration before.
            Message(
                source, r.worker, op, s.sent - zero, s.completed - zero, max(0.0, s.posted - zero)
            )
            for source, op, s in r.messages
        ]
    depth = len(records) // replicas if replicas > 1 else 0
    return Timeline(tuple(spans), tuple(messages), name, replicas, depth)


def _step_of(record: IterationRecord, begin: float) -> list[tuple[Op, float, float]]:
    """Return a worker's step from `begin` on as ops: numbered collectives and the work between."""
    parts: list[tuple[Op, float, float]] = []
    now = begin
    for i, span in enumerate(record.collectives):
        start = max(now, span.start)
        parts += [(Op(Kind.STEP, i), now, start), (Op(Kind.SYNC, i), start, span.end)]
        now = max(now, span.end)
    parts.append((Op(Kind.STEP, len(record.collectives)), now, record.end))
    return [(op, a, b) for op, a, b in parts if b > a]


def _typical(ops: Sequence[OpTime], clock: str) -> float:
    """Return the typical seconds of ops of one kind, by one `clock`.

    "wall": the median. The others are means, which add up to the total: "cpu" for computing,
    "queued" for waiting for a core, and "idle" for neither of them.
    """
    if clock == "wall":
        return median(o.own for o in ops)
    if clock == "cpu":
        return sum(o.cpu for o in ops) / len(ops)
    queued = sum(o.queued or 0.0 for o in ops)
    if clock == "idle":
        return max(0.0, sum(o.own - o.cpu for o in ops) - queued) / len(ops)
    return queued / len(ops)
