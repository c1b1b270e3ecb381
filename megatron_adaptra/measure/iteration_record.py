"""What one stage saw in one iteration: its ops, its messages, its step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from megatron_adaptra.ir.op import COMPUTE, Kind, Op
from megatron_adaptra.ir.timeline import Message, Span, Timeline
from megatron_adaptra.measure.link_fit import by_themselves, transmissions
from megatron_adaptra.measure.port_use import port_use
from megatron_adaptra.measure.report import Collective, Memory, StageReport, Step, StockOp
from megatron_adaptra.transport.base import Stamps

SMALL = 64  # bytes of a message that shows a link's delay alone
FREE = 0.5  # share of messages that have not queued from which on they alone show the delay


class OpTime(NamedTuple):
    """Seconds on the monotonic clock, and of CPU in the thread that ran the op; 0 on a device.

    Of an op that Megatron's own messages came before: `asked`, when the host called for them, and
    `lag`, the seconds from when it had been answered until it launched the op. `queued`: seconds
    that the thread has waited for a core; None where that is not known. `waited`: seconds that it
    has waited for other replicas, which may be later than this one.
    """

    op: Op
    start: float
    end: float
    cpu: float
    asked: float = 0.0
    lag: float = 0.0
    queued: float | None = None
    waited: float = 0.0

    @property
    def own(self) -> float:
        """Seconds without those for other replicas."""
        return max(self.cpu, self.end - self.start - self.waited)


class CollectiveSpan(NamedTuple):
    """An operation of the step that stages do together; seconds on the monotonic clock.

    `name`: the same one in every iteration.
    `backend` and `direct`: what it costs, as last measured, through torch's backend and through an
    all-gather of ours; negative where that is not known. `stages`: who takes part; () for all.
    `kept`: it always goes through the backend. `taken`: where a device did it, the seconds, as far
    as they are known by now.
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
        """The same once the device has done it: what it took there, not its launch."""
        if self.taken is None:
            return self
        seconds = self.taken()
        if seconds is None:
            return self._replace(taken=None)
        return self._replace(end=self.start + seconds, backend=seconds, taken=None)


@dataclass
class IterationRecord:
    """`cpu` is what the whole process spent between the first op and the last one.

    `stock`: Megatron's own messages were used, so that `messages` has none. `probed`: stamps of
    what was sent only to measure a link, with its source. `through`, `met`: see StageReport.
    `unusable`: why its times mean nothing.
    """

    stage: int
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

    def report(self, before: IterationRecord | None = None) -> StageReport:
        """The small message to the leader; `before`: the iteration before, whose end is known.

        A transit contains the difference of the two stages' clocks; there and back it cancels.
        """
        compute = sum(o.cpu for o in self.ops)
        sources = sorted({source for source, _, _ in self.messages})
        stock = (StockOp(str(o.op), o.start, o.end, o.asked, o.lag) for o in self.ops)
        ended = before is not None and before.end > 0
        transits = self._probed
        large = self._large(transits)
        return StageReport(
            self.stage,
            self.iteration,
            wall=self._seconds("wall"),
            cpu=self._seconds("cpu"),
            queued=self._seconds("queued") if self._counted else {},
            idle=self._seconds("idle") if self._counted else {},
            overhead=self.cpu / compute if compute > 0 else 1.0,
            delay={source: self.delay(source) for source in sources},
            delay_p25={source: self.delay_p25(source) for source in sources},
            transit={source: self.transit(source) for source in sources},
            ahead={source: self.ahead(source) for source in sources},
            starved=self.starved,
            probed=transits,
            through=self.through,
            busy={
                source: tuple(transmissions(large[source], transits[source], 0.25))
                for source in large
            },
            port=port_use(large, transits) if len(large) > 1 else None,
            memory=self.memory,
            ops=tuple(stock) if self.stock else None,
            step=before.step if before and ended else None,
            seconds=before.end - before.begin if before and ended else None,
            met=self.met,
        )

    @property
    def _probed(self) -> dict[int, float]:
        """Least seconds, as in a transit, that a small probe from each source took."""
        found: dict[int, float] = {}
        for source, t in self.probed:
            if t.nbytes <= SMALL:
                seconds = t.completed - t.sent
                found[source] = min(seconds, found.get(source, seconds))
        return found

    def _large(self, transits: Mapping[int, float]) -> dict[int, list[Stamps]]:
        """Larger messages, probes among them, by source.

        None of links whose small probe is not there: it shows the delay that is not in what their
        bytes take.
        """
        found: dict[int, list[Stamps]] = {}
        for source, t in [(s, t) for s, _, t in self.messages] + self.probed:
            if t.nbytes > SMALL and source in transits:
                found.setdefault(source, []).append(t)
        return found

    @property
    def sources(self) -> set[int]:
        """The stages that messages, or what only measures a link, came from."""
        return {s for s, _, _ in self.messages} | {s for s, _ in self.probed}

    @property
    def known(self) -> bool:
        """Whether its ops' times are."""
        return self.begin > 0

    @property
    def starved(self) -> float:
        """Seconds that a device had nothing to do, between ops, because the host was late."""
        late = 0.0
        for before, after in zip(self.ops, self.ops[1:], strict=False):
            gap, asking = after.start - before.end, after.asked - before.end
            late += min(max(0.0, gap), max(0.0, asking) + max(0.0, after.lag))
        return late

    @property
    def _counted(self) -> bool:
        """Whether it is known what its ops have waited for a core."""
        return all(o.queued is not None for o in self.ops)

    def _seconds(self, clock: str) -> dict[str, float]:
        """By kind, of the kinds of ops that ran.

        A forward that keeps nothing takes longer; what it takes beyond others counts as R.
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

    def delay(self, source: int) -> float:
        """Median seconds that messages from stage `source` were on their way.

        The median, not the mean: one late wake-up of this process is not a slow link. What they
        have queued behind others is not in it, where a small probe shows for how long.
        """
        return median(self._delays(source, self._awaited(source)))

    def delay_p25(self, source: int) -> float:
        """The same from `source` where processes wait for a core, and so messages seem to.

        The lower quartile: a slow link delays all messages. Also of those alone that compute was
        waiting for: nothing else ran in this process when they came.
        """
        awaited = self._awaited(source)
        wanted = [t for t in awaited if 0 < t.wanted <= t.completed]
        quartiles = (sorted(self._delays(source, some)) for some in (awaited, wanted) if some)
        return min(delays[len(delays) // 4] for delays in quartiles)

    def _delays(self, source: int, some: Sequence[Stamps]) -> list[float]:
        """Seconds that `some` messages were on their way.

        Of those that have queued behind others nothing is known but what the link is busy with each
        of them: they count, without the queue, where few have not.
        """
        if (transit := self._probed.get(source)) is None:
            return [t.delay for t in some]
        each = by_themselves((t for s, _, t in self.messages if s == source), transit)
        alone = {id(one.stamps): one for one in each}
        free = [t.delay for t in some if not alone[id(t)].queued]
        if len(free) >= FREE * len(some):
            return free
        return [min(t.delay, alone[id(t)].seconds) for t in some]

    def transit(self, source: int) -> float:
        """Least seconds from sent, on the clock of `source`, to there, on this one.

        The least: with two clocks nobody knows which messages have waited for their receive.
        """
        return min(t.completed - t.sent for s, _, t in self.messages if s == source)

    def ahead(self, source: int) -> float:
        """Median seconds that a receive from `source` stood posted before its message was sent."""
        return median(max(0.0, t.sent - t.posted) for t in self._awaited(source))

    def _awaited(self, source: int) -> list[Stamps]:
        """Stamps of the messages that were sent after their receive had been posted; all if none.

        What is sent earlier has crossed the link by then, or waits for its receive: when it is
        there says more about this stage than about the link. A stage that runs all forwards before
        the first backward has a few messages only that it awaits.
        """
        stamps = [stamps for s, _, stamps in self.messages if s == source]
        return [t for t in stamps if t.eager or t.posted <= t.sent] or stamps

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
        """When the pipeline part was over, on the monotonic clock."""
        return self.ops[-1].end if self.ops else self.begin


def merge(records: Sequence[IterationRecord], name: str, replicas: int = 1) -> Timeline:
    """The measured Timeline, called `name`, of one iteration of workers that share a clock.

    `records`: of all workers of so many `replicas`.
    """
    zero = min(r.begin for r in records)
    spans, messages = [], []
    finish = max(r.last_op_end for r in records)
    for r in records:
        spans += [Span(r.stage, o.op, o.start - zero, o.end - zero) for o in r.ops]
        spans += [Span(r.stage, op, a - zero, b - zero) for op, a, b in _step_of(r, finish)]
        messages += [
            # The first receives are posted in the iteration before.
            Message(
                source, r.stage, op, s.sent - zero, s.completed - zero, max(0.0, s.posted - zero)
            )
            for source, op, s in r.messages
        ]
    depth = len(records) // replicas if replicas > 1 else 0
    return Timeline(tuple(spans), tuple(messages), name, replicas, depth)


def _step_of(record: IterationRecord, begin: float) -> list[tuple[Op, float, float]]:
    """A stage's step as ops: collectives, numbered, and what is between them."""
    parts: list[tuple[Op, float, float]] = []
    now = begin
    for i, span in enumerate(record.collectives):
        start = max(now, span.start)
        parts += [(Op(Kind.STEP, i), now, start), (Op(Kind.SYNC, i), start, span.end)]
        now = max(now, span.end)
    parts.append((Op(Kind.STEP, len(record.collectives)), now, record.end))
    return [(op, a, b) for op, a, b in parts if b > a]


def _typical(ops: Sequence[OpTime], clock: str) -> float:
    """Seconds of ops of one kind. Means of CPU time add up to what the CPU did.

    So do those of what a thread has waited for a core ("queued"), and those in which it has neither
    computed nor waited for one ("idle").
    """
    if clock == "wall":
        return median(o.own for o in ops)
    if clock == "cpu":
        return sum(o.cpu for o in ops) / len(ops)
    queued = sum(o.queued or 0.0 for o in ops)
    if clock == "idle":
        return max(0.0, sum(o.own - o.cpu for o in ops) - queued) / len(ops)
    return queued / len(ops)
