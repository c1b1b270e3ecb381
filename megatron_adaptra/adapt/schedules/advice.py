"""Lines for people beside decisions: what other flags would gain, and GPUs that no plan helps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from megatron_adaptra.adapt.schedules.policy import ReplanPolicy, executor_flags
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.report import StageReport
from megatron_adaptra.measure.step_sync import PASSES

STARVED_ITERATIONS = 5  # whose median counts
STARVED_SHARE = 0.1  # of an iteration
DIRECT = "--adaptra-small-collectives auto"


@dataclass(frozen=True)
class Advice:
    """An advice compares what runs with what other flags would run, by the rule of plans.

    Args:
        rule: by which plans are made and compared.
        executes: the executor can run this model's pipeline.
        split, recompute: its plans may run backwards in halves, and forwards again.
    """

    rule: ReplanPolicy
    executes: bool
    split: bool = False
    recompute: bool = False

    def on_executor(self, conditions: Conditions, native: float) -> str:
        """Describe what a plan of the executor gains; "" where that is less than `min_gain`.

        `native`: seconds of an iteration under these `conditions` by the plan without it.
        """
        if not self.executes or conditions.chunks > 1:
            return ""
        rule, c = replace(self.rule, policy="adaptive"), replace(conditions, split=self.split)
        best = rule.make_plan(c)
        if self.recompute and min(c.activation_budget) < c.microbatches:
            again = rule.make_plan(replace(c, recompute=True))
            best = again if rule.gains(again, best) else best
        if best.predicted > native * (1 - rule.min_gain):
            return ""
        return _would(
            executor_flags(best.conditions.recompute), best.schedule.why,
            "an iteration", best.predicted, native,
        )  # fmt: skip

    def on_small_collectives(
        self, pipelines: Iterable[Estimator], seconds: float, note: Callable[[str, str], None]
    ) -> None:
        """Log what small collectives sent directly save, where a link is slow.

        Args:
            pipelines: what is known of each.
            seconds: of an iteration, of which they have to save `min_gain`.
            note: takes the line and its subject.
        """
        for one in pipelines:
            slow = max(one.state().values(), default=0.0) if one.known else 0.0
            if not slow:
                continue
            ours, stock = (one.conditions(native=native).step_sync for native in (False, True))
            # On a busy machine they take longer than a link makes them.
            now, then = min(sum(stock), PASSES * slow * len(stock)), sum(ours)
            if now - then >= self.rule.min_gain * seconds:
                what = f"{len(stock)} collectives of an iteration's end wait for a slow link"
                note(_would(DIRECT, what, "together they", then, now), DIRECT)


def _would(flags: str, what: str, who: str, seconds: float, without: float) -> str:
    return (
        f"would be done with {flags}: {what}; {who} would take {1e3 * seconds:.4g} ms, without "
        f"{1e3 * without:.4g}"
    )


class Starvation:
    """A check finds which of so many `stages` has a GPU that waits most for its late host.

    No schedule helps against that.
    """

    def __init__(self, stages: int) -> None:
        self._shares: list[deque[float]] = [deque(maxlen=STARVED_ITERATIONS) for _ in range(stages)]
        self._reported = False

    def update(self, reports: Sequence[StageReport], seconds: float) -> str:
        """Take an iteration's `reports`, one per stage; return a line to log, once, else "".

        `seconds`: those that an iteration takes.
        """
        for shares, report in zip(self._shares, reports, strict=True):
            shares.append(report.starved / seconds)
        typical = [median(shares) for shares in self._shares]
        worst = max(range(len(typical)), key=typical.__getitem__)
        few = len(self._shares[0]) < STARVED_ITERATIONS
        if self._reported or few or typical[worst] < STARVED_SHARE:
            return ""
        self._reported = True
        return (
            f"the GPU of stage {worst} has nothing to do for {typical[worst]:.0%} of an iteration "
            "because its host launches too late; no schedule helps against that"
        )
