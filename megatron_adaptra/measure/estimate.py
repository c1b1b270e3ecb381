"""The estimator of one pipeline: from its workers' reports to Conditions, a plan's input."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from megatron_adaptra.base.units import size
from megatron_adaptra.config import UNLIMITED, Budget
from megatron_adaptra.ir.conditions import Conditions, infinite_if_null, null_if_infinite
from megatron_adaptra.measure.detect import ABSOLUTE, DelayChart
from megatron_adaptra.measure.link_delay import Link
from megatron_adaptra.measure.link_estimates import LinkEstimates
from megatron_adaptra.measure.op_seconds import Correction, OpSeconds, StageOps
from megatron_adaptra.measure.report import Memory, StageReport
from megatron_adaptra.measure.step_sync import StepSyncModel
from megatron_adaptra.measure.stock_messages import RECENT

PINNED = 3  # messages per microbatch in flight: posted on a device, and two in the host's memory
SPARE = 4  # messages under way beyond those that a plan allows for
USABLE = 0.9  # share of a device's free memory that a budget may take


class Estimator:
    """An estimator keeps a chart per directed link and the recent op seconds of every stage.

    Reports and links are by worker, numbered as in `ir.routes`; conditions and budgets by stage.

    Args:
        microbatches: how many an iteration has.
        hosts: by stage, an identity of its machine. Stages of one machine share a clock; between
            machines only the round trip is known, and its halves are taken for equal.
        cores, chunks, split, recompute: see Conditions. With cores an op's cost is CPU time.
        message_bytes: bytes of one message of the pipeline.
        budget: what a stage may keep; bytes become microbatches once memory has been measured.
        at_first: by stage, microbatches in flight until then.
        rendezvous: True where a message moves only after its receive is posted.
        everything: True where slow links delay the step's collectives, too; emulated ones do not.
        on_device: True where collectives are NCCL's; an attribute, too.
        first: the worker of its first stage.
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
        first: int = 0,
    ) -> None:
        self.microbatches, self.hosts, self.cores = microbatches, tuple(hosts), cores
        self.message_bytes, self.rendezvous, self._first = message_bytes, rendezvous, first
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
        self._links = LinkEstimates(
            dict(enumerate(self.hosts, first)), message_bytes, chunks=chunks,
            rendezvous=rendezvous, shared=cores is not None, on_device=on_device,
        )  # fmt: skip
        self._ops = [StageOps(cores, chunks) for _ in range(stages)]
        self.on_device = on_device
        self._step = StepSyncModel(None) if on_device else StepSyncModel()
        self.correction = Correction()
        self._waits: deque[float] = deque(maxlen=RECENT)  # unexplained, per second of delay

    def update(self, reports: Sequence[StageReport]) -> list[Link]:
        """Take an iteration's `reports`, one per stage; return links whose change is confirmed."""
        for report in reports:
            self._ops[report.worker - self._first].update(report)
        changed = self._links.update(reports, self.stage_seconds())
        for report in reports:
            if report.worker == self._first and report.step is not None:
                self._step.update(report.step, self._delays)
        return changed

    @property
    def charts(self) -> Mapping[Link, DelayChart]:
        """The charts of the seconds that a message takes, by directed link."""
        return self._links.charts

    @property
    def samples(self) -> Mapping[Link, float]:
        """The seconds of the links that were measured in the last iteration."""
        return self._links.samples

    @property
    def _delays(self) -> dict[Link, float]:
        """The seconds by stages, as the step's collectives see their links: 0 if not at all."""
        return {self._at(link): c.estimate * self.everything for link, c in self.charts.items()}

    def _at(self, link: Link) -> Link:
        """Return the stages that a `link` is between."""
        return link[0] - self._first, link[1] - self._first

    def stage_seconds(self) -> float:
        """Return a microbatch's seconds: on the slowest stage, or on all that share cores."""
        each = [sum(ops.seconds()[:2]) for ops in self._ops if ops.known]
        shared = sum(each) / self.cores if self.cores is not None else 0.0
        return max([shared, *each], default=0.0)

    def accept(self) -> None:
        """Note that the plan in force is made for the links as they are now."""
        self._links.accept()

    @property
    def known(self) -> bool:
        """True once every stage has reported, which `conditions` needs."""
        return all(ops.known for ops in self._ops)

    @property
    def calibrated(self) -> bool:
        """True once the normal delay of every link is known."""
        return all(chart.level is not None for chart in self.charts.values())

    def state(self) -> dict[str, float]:
        """Return the seconds per link that are planned for, to go on from after a restart."""
        return {f"{a}>{b}": c.level for (a, b), c in self.charts.items() if c.level is not None}

    def settings(self) -> dict[str, Any]:
        """Return the arguments it was made with, for json.dump and `from_settings`."""
        budget = {key: x for key, x in self._budget._asdict().items() if x not in (math.inf, False)}
        return {
            "microbatches": self.microbatches, "hosts": list(self.hosts), "cores": self.cores,
            "message_bytes": self.message_bytes, "budget": budget, "rendezvous": self.rendezvous,
            "everything": self.everything, "chunks": self.chunks, "split": self._splits,
            "recompute": self.recompute, "on_device": self.on_device,
            "at_first": [null_if_infinite(x) for x in self._at_first],
        }  # fmt: skip

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], first: int = 0) -> Estimator:
        """Make an estimator without measurements from the `settings()` of another one.

        `first`: the worker of its first stage.
        """
        at_first = [infinite_if_null(x) for x in settings["at_first"]]
        budget = Budget(**settings["budget"])
        return cls(**{**settings, "budget": budget, "at_first": at_first, "first": first})

    def resume(self, state: Mapping[str, float]) -> None:
        """Take the delays of `state()` for those that the plan in force is made for."""
        for (a, b), chart in self.charts.items():
            if f"{a}>{b}" in state:
                chart.resume(state[f"{a}>{b}"])

    def learn(self, predicted: float, measured: float) -> None:
        """Take note of an iteration's `predicted` (uncorrected) and `measured` seconds."""
        self.correction.learn(predicted, measured)

    def learn_stock(self, predicted: float, measured: float) -> None:
        """Take note of `predicted` and `measured` seconds over Megatron's own messages.

        Stages then wait for each other in ways that are not modelled, the longer the slower the
        links are.
        """
        if delay := self.stock_delay:
            self._waits.append(max(0.0, measured - predicted) / delay)

    @property
    def stock_extra(self) -> float:
        """The seconds that an iteration over Megatron's own messages takes beyond the model's."""
        return median(self._waits) * self.stock_delay if self._waits else 0.0

    @property
    def stock_delay(self) -> float:
        """The summed delay, in seconds, of links where that of Megatron's own messages matters."""
        each = [self._links.delay(link, True) for link in self.charts]
        return sum(seconds for seconds in each if seconds >= ABSOLUTE * self.stage_seconds())

    @property
    def stock_measured(self) -> bool:
        """True where a link's seconds are known for Megatron's own messages, apart from ours."""
        return self._links.stock_measured

    def delays(self) -> dict[str, float]:
        """Return the present seconds of every link, by `"2>3"`."""
        return {f"{a}>{b}": chart.estimate for (a, b), chart in self.charts.items()}

    def alarms(self) -> list[str]:
        """Return the links whose last delay is out of its chart, as `"2>3"`."""
        return [f"{a}>{b}" for (a, b), chart in self.charts.items() if chart.alarm]

    def conditions(self, corrected: bool = True, native: bool = False) -> Conditions:
        """Return what to plan for.

        `corrected`: multiply op seconds by `correction`. `native`: for stock's messages and step.
        """
        scale = self.correction.factor if corrected else 1.0
        ports = {} if native and self.on_device else self._links.ports()
        step_sync = (self._step.native if native else self._step.sync)(self._delays)
        ops = [OpSeconds(*(scale * s for s in stage.seconds())) for stage in self._ops]
        return Conditions(
            microbatches=self.microbatches,
            forward=tuple(op.forward for op in ops),
            backward_input=tuple(op.backward_input for op in ops),
            backward_weight=tuple(op.backward_weight for op in ops),
            links={self._at(link): self._links.state(link, native) for link in self.charts},
            ports={worker - self._first: rate for worker, rate in ports.items()},
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

    def measure_budget(self, reports: Sequence[StageReport]) -> bool:
        """Take the bytes in `reports`; return whether they change a budget's microbatches.

        They do when all stages have measured for the first time. Later only where a plan has taken
        more than it may: halves and temporaries are no exact shares of a microbatch.
        """
        fresh = {
            report.worker - self._first: report.memory
            for report in reports
            if report.memory is not None and report.memory.per_microbatch
        }
        self.memory |= fresh
        if not self._budget.in_bytes or len(self.memory) < len(self.budgets):
            return False
        budgets = list(self.budgets)
        if not self._limits:  # by the first bytes: later use must not raise its own limit
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
        # No stage can do with less than one microbatch, but it may do without halves.
        self.split = self.split and min(budgets) >= 1
        return (self.budgets, self.split) != before

    def _give_up_budget(self) -> None:
        """Drop a budget that no schedule keeps to; the job goes on with its first schedule."""
        least = {stage: sum(self._needs(memory)) for stage, memory in self.memory.items()}
        stage = max(least, key=lambda s: least[s])
        self.unmet = (
            f"an activation budget of {size(self._budget.nbytes)} cannot be kept: one microbatch "
            f"of stage {stage} takes {size(least[stage])}, which is the least that works; training "
            "goes on with the schedule that it began with, and no deeper warmup"
        )
        self._budget = UNLIMITED

    def _needs(self, memory: Memory) -> tuple[float, float]:
        """Return the bytes that a stage takes beside its microbatches, and for each of them.

        On a GPU, ops take some in passing. There each further microbatch also needs a posted
        receive and, where the budget is a number of bytes, pinned memory of the host for two
        messages. A budget of free GPU memory does not count the host's.
        """
        each, message = memory.per_microbatch, self.message_bytes
        if not self.on_device:
            return 0.0, each
        passing = max(0.0, (memory.peak_bytes or 0) - memory.peak * each)
        if self._budget.auto:
            return passing, each + message
        return passing + SPARE * message, each + PINNED * message

    def _limit(self, memory: Memory) -> float:
        """Return the bytes that a stage may take, by what it was first seen to take."""
        if self._budget.auto:
            return (memory.peak_bytes or 0) + USABLE * (memory.free or 0)
        return self._budget.nbytes
