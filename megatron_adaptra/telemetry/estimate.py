"""From the stages' reports to Conditions: what the next plan is made for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from megatron_adaptra.config import UNLIMITED, Budget
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.telemetry.detect import ABSOLUTE, DelayChart
from megatron_adaptra.telemetry.link_model import LinkModel
from megatron_adaptra.telemetry.report import Memory, StageReport
from megatron_adaptra.telemetry.step_sync import StepSyncModel
from megatron_adaptra.telemetry.stock_messages import (
    RECENT,
    Excess,
    Link,
    is_stock,
    stock_links,
)
from megatron_adaptra.units import size

TIME_SLICE = 0.003  # seconds for which Linux lets a process have a core that others want
WINDOW = 5  # iterations over which op seconds are taken
PINNED = 3  # messages per microbatch in flight: posted on a device, and two in the host's memory
SPARE = 4  # messages under way beyond those that a plan has under way at once
THIN = 0.05  # of a stage's seconds, from which on a message's time on the wire matters
USABLE = 0.9  # share of a device's free memory that a budget may take


class OpSeconds(NamedTuple):
    """Seconds that one microbatch takes on one stage."""

    forward: float
    backward: float  # in one piece
    backward_input: float
    backward_weight: float
    recomputation: float


class Shares(NamedTuple):
    """What ops cost that need not run: the halves as shares of a backward, R of a forward."""

    backward_input: float = 0.5
    backward_weight: float = 0.5
    recomputation: float = 1.0


class Estimator:
    """Keeps one chart per directed link and the recent seconds per op of every stage.

    Args:
        microbatches: of an iteration.
        hosts: by stage, an identity of its machine. Stages of one machine share a clock; between
            machines only the round trip is known, and its halves are taken for equal.
        cores, chunks, split, recompute: see Conditions. With cores an op's cost is CPU time.
        message_bytes: of one message of the pipeline.
        budget: what a stage may keep; bytes become microbatches once memory has been measured.
        at_first: microbatches by stage until then.
        rendezvous: a message moves only after its receive is posted.
        everything: slow links delay the step's collectives, too; emulated ones do not.
        on_device: collectives are NCCL's.
    """

    def __init__(
        self,
        microbatches: int,
        hosts: Sequence[str],
        cores: float | None,
        message_bytes: int,
        budget: Budget = UNLIMITED,
        rendezvous: bool = False,
        everything: bool = True,
        *,
        chunks: int = 1,
        split: bool = False,
        recompute: bool = False,
        at_first: Sequence[float] = (),
        on_device: bool = False,
    ) -> None:
        self.microbatches, self.hosts, self.cores = microbatches, tuple(hosts), cores
        self.message_bytes, self.rendezvous = message_bytes, rendezvous
        self.everything, self._budget = everything, budget
        self.chunks, self.split, self.recompute = chunks, split, recompute
        self._splits = split  # even where there is no memory for it
        self._at_first = tuple(at_first)
        stages = len(hosts)
        self.budgets = (budget.microbatches,) * stages  # microbatches in flight, per stage
        if budget.in_bytes and at_first:
            self.budgets = tuple(at_first)
        self.memory: dict[int, Memory] = {}  # by stage, as last measured in bytes
        self._limits: dict[int, float] = {}  # bytes, once a budget in bytes can be kept to
        self.unmet = ""  # why a budget in bytes was given up
        pairs = [(s, s + 1) for s in range(stages - 1)]
        if chunks > 1 and stages > 2:
            pairs.append((stages - 1, 0))
        # A message that waits for a core to be handled looks like one that is still on its way.
        floor = 0.0 if cores is None else TIME_SLICE
        self.charts = {link: DelayChart(floor) for a, b in pairs for link in ((a, b), (b, a))}
        self._ops: list[deque[OpSeconds]] = [deque(maxlen=WINDOW) for _ in range(stages)]
        self._shares: list[deque[Shares]] = [deque(maxlen=WINDOW) for _ in range(stages)]
        self._on_device = on_device
        self._step = StepSyncModel(None) if on_device else StepSyncModel()
        # Where threads wait for a core, many a message does; a slow link delays all of them.
        self._crowded = on_device or cores is not None
        self._ratios: deque[float] = deque(maxlen=WINDOW)
        self._waits: deque[float] = deque(maxlen=RECENT)  # unexplained, per second of delay
        self._excesses = {link: Excess() for link in self.charts}
        self._excess = dict.fromkeys(self.charts, 0.0)  # now, of Megatron's messages over ours
        self._models = {link: LinkModel() for link in self.charts}

    def update(self, reports: Sequence[StageReport]) -> list[Link]:
        """Take one iteration's `reports`, one per stage; the links whose change is confirmed."""
        for report in reports:
            scale, stage, seconds = 1.0, report.stage, report.wall
            if self.cores is not None:
                scale, seconds = report.overhead, report.cpu
            shares = Shares(*_medians(self._shares[stage])) if self._shares[stage] else Shares()
            shares = _shares(seconds, shares)
            self._shares[stage].append(shares)
            self._ops[stage].append(_op_seconds(seconds, scale * self.chunks, shares))
        self._take_busy(reports)
        delays = self._of_stock(reports) if is_stock(reports) else self._of_ours(reports)
        stage_seconds = self.stage_seconds()
        changed = [
            link
            for link, chart in self.charts.items()
            if link in delays and chart.update(max(0.0, delays[link]), stage_seconds)
        ]
        for link in changed:
            self._models[link].changed()
        for report in reports:
            if report.stage == 0 and report.step is not None:
                self._step.update(report.step, self._delays)
        return changed

    @property
    def _delays(self) -> dict[Link, float]:
        """Seconds per link, as far as the step's collectives see them."""
        return {link: c.estimate * self.everything for link, c in self.charts.items()}

    def _of_ours(self, reports: Sequence[StageReport]) -> dict[Link, float]:
        """Seconds per link, from the stamps of our messages.

        What a link is worse for Megatron's messages is added where that was once measured.
        """
        delays = _by_link((r.stage, r.delay_p25 if self._crowded else r.delay) for r in reports)
        transits = _by_link((r.stage, r.transit) for r in reports)
        ahead = _by_link((r.stage, r.ahead) for r in reports)
        probed = _by_link((r.stage, r.probed) for r in reports)
        found = {}
        for link in self.charts:
            if (delay := self._delay(link, delays, transits, ahead)) is not None:
                probe = self._either_way(link, probed, probed)
                if probe is not None and (wire := self._wire(link)):
                    delay = min(delay, probe + wire)  # what has queued on a thin link is no delay
                self._excess[link] = excess = self._excesses[link].believed()
                found[link] = self._models[link].as_stock(delay) + max(0.0, excess)
        return found

    def _of_stock(self, reports: Sequence[StageReport]) -> dict[Link, float]:
        """Seconds per link, the longer of those for our probes and for Megatron's messages."""
        probed = _by_link((r.stage, r.probed) for r in reports)
        theirs, transits = stock_links(reports, self.chunks)
        matters, found = ABSOLUTE * self.stage_seconds(), {}
        for link in self.charts:
            ours = self._either_way(link, probed, probed)
            stock = self._either_way(link, theirs, transits)
            if ours is not None:
                least = ours
                ours += self._models[link].wire(self.message_bytes)  # however little it is
                if (
                    stock is not None
                    and max(stock, least) < matters
                    and not self.charts[link].alarm
                ):
                    self._models[link].while_well(stock, ours)
                ours = self._models[link].as_stock(ours)
            if ours is not None and stock is not None:
                self._excess[link] = self._excesses[link].measure(stock, ours, matters)
            if known := [seconds for seconds in (ours, stock) if seconds is not None]:
                found[link] = max(known)
        return found

    def _take_busy(self, reports: Sequence[StageReport]) -> None:
        """What our messages of several sizes have taken."""
        for report in reports:
            for source, samples in report.busy.items():
                if (model := self._models.get((source, report.stage))) and source in report.probed:
                    model.add(report.probed[source], samples)

    def _wire(self, link: Link) -> float:
        """Seconds that one of our messages keeps the link busy; 0 where that does not matter."""
        seconds = self._models[link].wire(self.message_bytes)
        return seconds if seconds >= THIN * self.stage_seconds() else 0.0

    def _either_way(
        self, link: Link, delays: Mapping[Link, float], transits: Mapping[Link, float]
    ) -> float | None:
        """Seconds on the way; between two machines, half of there and back. None if not known."""
        source, target = link
        if self.hosts[source] == self.hosts[target]:
            return delays.get(link)
        there, back = transits.get(link), transits.get((target, source))
        # Stamps of two clocks do not show which side was late, but their difference cancels.
        return None if there is None or back is None else (there + back) / 2

    def _delay(
        self,
        link: Link,
        delays: Mapping[Link, float],
        transits: Mapping[Link, float],
        ahead: Mapping[Link, float],
    ) -> float | None:
        """Seconds on the way; None where nothing is known."""
        source, target = link
        reverse, delay = (target, source), self._either_way(link, delays, transits)
        known = link in delays and reverse in delays and self.hosts[source] == self.hosts[target]
        if not known or not self.rendezvous:
            return delay
        # The message also waited for the handshake of its receive, which crosses the link
        # the other way, unless it was posted long enough ahead.
        handshake = max(0.0, delays[reverse] - ahead[link])
        if ahead[reverse] < delays[link]:  # its own time may contain such a wait
            handshake = min(handshake, delays[link] / 2)
        return delays[link] - handshake

    def stage_seconds(self) -> float:
        """What one microbatch takes: on the slowest stage, or on all that share cores."""
        each = [sum(_medians(ops)[:2]) for ops in self._ops if ops]
        shared = sum(each) / self.cores if self.cores is not None else 0.0
        return max([shared, *each], default=0.0)

    def accept(self) -> None:
        """The delays of now are planned for."""
        for chart in self.charts.values():
            if chart.level is not None:
                chart.accept(self.stage_seconds())

    @property
    def calibrated(self) -> bool:
        """Whether of every link it is known what is normal."""
        return all(chart.level is not None for chart in self.charts.values())

    def state(self) -> dict[str, float]:
        """What is planned for, to go on from after a restart: seconds per link."""
        return {f"{a}>{b}": c.level for (a, b), c in self.charts.items() if c.level is not None}

    def settings(self) -> dict[str, Any]:
        """What it was made with, for json.dump and `from_settings`."""
        budget = {key: x for key, x in self._budget._asdict().items() if x not in (math.inf, False)}
        return {
            "microbatches": self.microbatches, "hosts": list(self.hosts), "cores": self.cores,
            "message_bytes": self.message_bytes, "budget": budget, "rendezvous": self.rendezvous,
            "everything": self.everything, "chunks": self.chunks, "split": self._splits,
            "recompute": self.recompute, "on_device": self._on_device,
            "at_first": [None if math.isinf(x) else x for x in self._at_first],
        }  # fmt: skip

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Estimator:
        """One that has measured nothing yet, made with the `settings()` of another."""
        at_first = [math.inf if x is None else x for x in settings["at_first"]]
        budget = Budget(**settings["budget"])
        return cls(**{**settings, "budget": budget, "at_first": at_first})

    def resume(self, state: Mapping[str, float]) -> None:
        """Take the delays of `state()` for those that the plan in force is made for."""
        for (a, b), chart in self.charts.items():
            if f"{a}>{b}" in state:
                chart.resume(state[f"{a}>{b}"])

    def learn(self, predicted: float, measured: float) -> None:
        """Take note of an iteration's `predicted` (uncorrected) and `measured` seconds."""
        if predicted > 0:
            self._ratios.append(measured / predicted)

    def learn_stock(self, predicted: float, measured: float) -> None:
        """The same of one over Megatron's own messages: its `predicted` and `measured` seconds.

        Its stages wait for each other in ways that are not modelled, the longer the slower the
        links are.
        """
        if delay := self.stock_delay:
            self._waits.append(max(0.0, measured - predicted) / delay)

    @property
    def stock_extra(self) -> float:
        """Seconds of an iteration over Megatron's own messages beyond what the model says."""
        return median(self._waits) * self.stock_delay if self._waits else 0.0

    @property
    def stock_delay(self) -> float:
        """Seconds of all links that are slow enough for Megatron's own messages to matter."""
        each = [self._link_delay(link, True) for link in self.charts]
        return sum(seconds for seconds in each if seconds >= ABSOLUTE * self.stage_seconds())

    @property
    def correction(self) -> float:
        """What op seconds are multiplied with: cores and caches are shared in ways not modelled."""
        return min(max(median(self._ratios), 0.9), 1.25) if self._ratios else 1.0

    def delays(self) -> dict[str, float]:
        """Seconds of every link now, by `"2>3"`."""
        return {f"{a}>{b}": chart.estimate for (a, b), chart in self.charts.items()}

    def alarms(self) -> list[str]:
        """The links whose last delay is out of its chart, as `"2>3"`."""
        return [f"{a}>{b}" for (a, b), chart in self.charts.items() if chart.alarm]

    def conditions(self, corrected: bool = True, native: bool = False) -> Conditions:
        """What to plan for. `corrected`: by `correction`. `native`: stock's messages and step."""
        scale = self.correction if corrected else 1.0
        step_sync = (self._step.native if native else self._step.sync)(self._delays)
        ops = [OpSeconds(*(scale * s for s in _medians(window))) for window in self._ops]
        return Conditions(
            microbatches=self.microbatches,
            forward=tuple(op.forward for op in ops),
            backward_input=tuple(op.backward_input for op in ops),
            backward_weight=tuple(op.backward_weight for op in ops),
            links={link: self._state(link, native) for link in self.charts},
            message_bytes=float(self.message_bytes),
            activation_budget=self.budgets,
            step_seconds=self._step.work + sum(step_sync),
            step_sync=step_sync,
            cores=self.cores,
            chunks=self.chunks,
            split=self.split,
            recompute=self.recompute,
            backward=tuple(op.backward for op in ops) if self._splits else (),
            recomputation=tuple(op.recomputation for op in ops) if self.recompute else (),
        )

    def _link_delay(self, link: Link, native: bool) -> float:
        """Seconds, for our messages or (`native`) for Megatron's; charts have the longer ones."""
        excess = self._excess[link]
        shorter = max(0.0, -excess if native else excess)
        return max(0.0, self.charts[link].estimate - shorter)

    def _state(self, link: Link, native: bool) -> LinkState:
        """For our messages, with what is known of their bandwidth, or (`native`) for Megatron's."""
        seconds = self._link_delay(link, native)
        if native and self._on_device:
            return LinkState(seconds)
        seconds, wire = self._models[link].as_ours(seconds), self._wire(link)
        if not wire:
            return LinkState(seconds)
        return LinkState(max(0.0, seconds - wire), self.message_bytes / wire)

    def measure_budget(self, reports: Sequence[StageReport]) -> bool:
        """Take the bytes in `reports`; whether a budget in bytes now means other microbatches.

        It does when all stages have measured for the first time. Afterwards only where a plan has
        taken more than it may: halves and temporaries are no exact shares of a microbatch.
        """
        fresh = {
            report.stage: report.memory
            for report in reports
            if report.memory is not None and report.memory.per_microbatch
        }
        self.memory |= fresh
        if not self._budget.in_bytes or len(self.memory) < len(self.budgets):
            return False
        budgets = list(self.budgets)
        if not self._limits:  # what has been taken later must not make itself room
            self._limits = {stage: self._limit(memory) for stage, memory in self.memory.items()}
            for stage, memory in self.memory.items():
                beside, each = self._needs(memory)
                budgets[stage] = float((self._limits[stage] - beside) // each)
            if min(budgets) < 1 and not self._budget.auto:
                self._give_up_budget()
                return False
        for stage, memory in fresh.items():
            taken = (memory.peak_bytes or 0) + (0 if self._budget.auto else memory.pinned)
            limit = self._limits[stage]
            if taken > limit:
                budgets[stage] = min(budgets[stage], memory.peak * limit / taken)
        before = self.budgets, self.split
        self.budgets = tuple(max(1.0, float(b)) for b in budgets)
        # Less than one microbatch is not to be had, but a backward in one piece may be.
        self.split = self.split and min(budgets) >= 1
        return (self.budgets, self.split) != before

    def _give_up_budget(self) -> None:
        """No schedule keeps to it, so the job goes on within what it has begun with."""
        least = {stage: sum(self._needs(memory)) for stage, memory in self.memory.items()}
        stage = max(least, key=lambda s: least[s])
        self.unmet = (
            f"an activation budget of {size(self._budget.nbytes)} cannot be kept: one microbatch "
            f"of stage {stage} takes {size(least[stage])}, which is the least that works; training "
            "goes on with the schedule that it began with, and no deeper warmup"
        )
        self._budget = UNLIMITED

    def _needs(self, memory: Memory) -> tuple[float, float]:
        """Bytes that a stage takes beside its microbatches, and for each of them.

        On a GPU ops take some in passing. There each microbatch more has a receive standing posted
        and, of a budget of so many bytes, pinned memory of the host for two messages; what is free
        on a GPU has none of that in it.
        """
        each, message = memory.per_microbatch, self.message_bytes
        if not self._on_device:
            return 0.0, each
        passing = max(0.0, (memory.peak_bytes or 0) - memory.peak * each)
        if self._budget.auto:
            return passing, each + message
        return passing + SPARE * message, each + PINNED * message

    def _limit(self, memory: Memory) -> float:
        """Bytes that a stage may take, by what it was first seen to take."""
        if self._budget.auto:
            return (memory.peak_bytes or 0) + USABLE * (memory.free or 0)
        return self._budget.nbytes


def _by_link(rows: Iterable[tuple[int, Mapping[int, float]]]) -> dict[Link, float]:
    """`rows`: stages, each with seconds by source."""
    return {(source, stage): s for stage, row in rows for source, s in row.items()}


def _shares(seconds: Mapping[str, float], before: Shares) -> Shares:
    """From a report of an iteration; as they were `before` for what did not run in it."""
    half, rest, again = before
    if "I" in seconds and (both := seconds["I"] + seconds["W"]) > 0:
        whole = seconds.get("B", 0.0) or both / (half + rest or 1.0)
        half, rest = seconds["I"] / whole, seconds["W"] / whole
    if "R" in seconds and seconds["F"] > 0:
        again = seconds["R"] / seconds["F"]
    return Shares(half, rest, again)


def _op_seconds(seconds: Mapping[str, float], scale: float, shares: Shares) -> OpSeconds:
    """What a report says of the ops that ran, and what that means for the others."""
    forward, whole = seconds["F"], seconds.get("B", 0.0)
    half, rest = shares.backward_input * whole, shares.backward_weight * whole
    if "I" in seconds:
        half, rest = seconds["I"], seconds["W"]
    if "B" not in seconds:
        whole = (half + rest) / (shares.backward_input + shares.backward_weight or 1.0)
    again = seconds.get("R", shares.recomputation * forward)
    return OpSeconds(*(scale * value for value in (forward, whole, half, rest, again)))


def _medians(window: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(median(column) for column in zip(*window, strict=True))
