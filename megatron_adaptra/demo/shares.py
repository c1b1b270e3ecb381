"""Results of shares of microbatches that were found while training: figures, and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Protocol

from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.shares.remedy import ShareDecision, ShareRemedy
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.ir.timeline import Span, Timeline
from megatron_adaptra.sim.clock import step_spans
from megatron_adaptra.view.axis import number
from megatron_adaptra.view.findings import counts, measured_too
from megatron_adaptra.view.pipeline import shares_gantt
from megatron_adaptra.view.report import Simulated
from megatron_adaptra.view.summary import Shares, entry

_FORWARD = 1 / 3  # of a microbatch, in the picture: a backward takes twice as long


class Finds(Protocol):
    """A rank's shares of microbatches have a loop, which finds counts, on the first rank."""

    @property
    def loop(self) -> Loop[ShareRemedy] | None:
        """The loop that finds counts; None on other ranks, and where counts are given."""
        ...


def found_shares(shares: Finds | None) -> list[ShareDecision]:
    """Return the decisions that came into force, at the end of a run; none without `shares`."""
    loop = None if shares is None else shares.loop
    if loop is None:
        return []
    loop.drain()
    return list(loop.log.in_force)


def share_entries(
    decisions: Sequence[ShareDecision], iteration_ms: Sequence[float], ends: Iterable[int]
) -> list[Shares]:
    """Return the summary's entry for each of `decisions`, in order.

    `iteration_ms`: of each iteration that ran. `ends`: of the phases, each the iteration after its
    last: other replicas are slow in the next phase, which a prediction does not cover.
    """
    found, ends = list[Shares](), [*ends, len(iteration_ms)]
    for one, until in pairwise([*decisions, None]):
        assert one is not None
        end = min([end for end in ends if end > one.iteration], default=len(iteration_ms))
        end = end if until is None else min(end, until.iteration)
        times = iteration_ms[one.iteration + 1 : end]
        measured = median(times) if times else None
        found.append(entry(Shares, one, measured_ms=measured))
    return found


def drawn_shares(
    decisions: Sequence[ShareDecision], shares: Sequence[Shares], phase: tuple[int, int]
) -> Simulated | None:
    """Return the picture of the change of counts that most iterations of the `phase` ran under.

    `shares`: the summary's entry for each of `decisions`, see `share_entries`.
    """
    found: list[tuple[int, int]] = []
    for at, (decision, until) in enumerate(pairwise([*decisions, None])):
        assert decision is not None
        end = phase[1] if until is None else min(until.iteration, phase[1])
        ran = end - max(decision.iteration, phase[0])
        if decision.microbatch_ms and decision.after != decision.before and ran > 0:
            found.append((-ran, at))
    if not found:
        return None
    at = min(found)[1]
    return shared_iteration(decisions[at], shares[at]["measured_ms"])


def shared_iteration(decision: ShareDecision, measured_ms: float | None) -> Simulated:
    """Return the picture of a `decision`, from the figures that it was made from.

    Each microbatch of a replica takes as long as on its pipeline's slowest stage. Time that does
    not depend on their number, as a pipeline fills and drains, comes after them. `measured_ms`: an
    iteration with its counts; None where none ran.
    """
    seconds = [ms / 1e3 for ms in decision.microbatch_ms]
    least, step = min(seconds), decision.predicted_ms / 1e3 - _last(decision, decision.after)
    pipeline = Conditions(
        decision.microbatches, (_FORWARD * least,), (0.0,), (0.0,),
        backward=((1 - _FORWARD) * least,), split=False, step_seconds=max(0.0, step),
    )  # fmt: skip
    slow = {one: seconds[one] / least for one in decision.slow}
    conditions = ReplicaConditions(pipeline, len(seconds), slow=slow)
    before = _timeline(decision, decision.before, conditions, "before")
    after = _timeline(decision, decision.after, conditions, "after")
    names = [f"{word} {one}" for word in ("before", "after") for one in conditions.all_replicas]
    gantt = replace(shares_gantt(before, after, conditions), names=tuple(names))
    both = [
        f"{counts(each)}: {number(1e3 * (_last(decision, each) + pipeline.step_seconds))} ms"
        for each in (decision.before, decision.after)
    ]
    note = (
        f"As simulated from what had been measured when counts were chosen for iteration "
        f"{decision.iteration}: a row per replica, before and after. Each microbatch takes what it "
        f"takes the slowest stage of the replica; a stripe marks a sample of another replica."
    )
    title = "One iteration of all replicas, before and after"
    words = "; then ".join(both) + measured_too(measured_ms)
    return Simulated(title, note, {words: gantt}, 16)


def _last(decision: ShareDecision, counts: Sequence[int]) -> float:
    """Seconds until the last replica has run its microbatches."""
    figures = zip(decision.outside_ms, decision.microbatch_ms, counts, strict=True)
    return max(outside + each * count for outside, each, count in figures) / 1e3


def _timeline(
    decision: ShareDecision, counts: Sequence[int], conditions: ReplicaConditions, name: str
) -> Timeline:
    """Return one iteration with these `counts`: a row per replica, and the step after the last."""
    sync, spans = SyncPlan(decision.microbatches, tuple(counts)), list[Span]()
    for replica, ms in enumerate(decision.microbatch_ms):
        for place, (home, microbatch) in enumerate(sync.share(replica)):
            start, middle, end = (ms / 1e3 * at for at in (place, place + _FORWARD, place + 1))
            spans.append(Span(replica, Op(Kind.F, microbatch, home=home), start, middle))
            spans.append(Span(replica, Op(Kind.B, microbatch, home=home), middle, end))
    spans += step_spans(conditions, _last(decision, counts))
    return Timeline(tuple(spans), (), name, conditions.replicas, 1)
