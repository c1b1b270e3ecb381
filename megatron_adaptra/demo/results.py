"""Results from the ranks' measurements: summary.json, timeline.json, the report."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from megatron_adaptra.adapt.leader import Leader
from megatron_adaptra.adapt.reductions.decisions import ReductionDecision
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.adapt.schedules.remedy import PlanRemedy
from megatron_adaptra.adapt.shares.remedy import ShareDecision
from megatron_adaptra.demo.comparison import (
    WARM_UP,
    Comparison,
    Outlook,
    compare,
)
from megatron_adaptra.demo.cpu_load import Sample, load_of
from megatron_adaptra.demo.decided import reduction_entries, share_entries
from megatron_adaptra.demo.notes import of_predictions, of_the_run
from megatron_adaptra.demo.options import DemoOptions
from megatron_adaptra.demo.phase_times import phase_times
from megatron_adaptra.demo.rounding import Differences
from megatron_adaptra.ir.conditions import null_if_infinite
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.routes import worker_name
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.measure.iteration_record import IterationRecord, merge
from megatron_adaptra.measure.report import Memory
from megatron_adaptra.view.chrome import chrome_trace
from megatron_adaptra.view.findings import key_phase, slow_noun
from megatron_adaptra.view.html.report import report_html
from megatron_adaptra.view.pipeline import pipeline_gantt
from megatron_adaptra.view.report import ArmReport, Report
from megatron_adaptra.view.summary import (
    Machine,
    MemoryFigures,
    PhaseFigures,
    Replan,
    Summary,
    entry,
)

# Options that the summary has by their own names, in three parts.
_SHAPE = (
    "stages", "microbatches", "data_parallel", "num_layers", "hidden_size", "seq_length",
    "iterations",
)  # fmt: skip
_SLOW = (
    "slow_links", "slow_workers", "slow_paths", "late_ranks", "slow_replicas", "slow_hosts",
)  # fmt: skip
_PLANS = ("engine", "reroute", "sync", "policy", "chunks", "recompute")


@dataclass
class RankResult:
    """A rank's result holds all that it has measured.

    By arm: `seconds` of each iteration, `digests` of the parameters, `records` of the iterations
    that may be drawn. `apart`: both arms' parameters, see `Arm.apart`. `counted`: the iterations
    whose activations were measured in bytes.
    `reductions`: in force, of the data-parallel groups whose first rank this is.
    `samples`: of the CPU time used. `kernel`: see `cpu_load.kernel`.
    """

    stage: int
    seconds: dict[str, list[float]]
    digests: dict[str, str]
    apart: float
    records: dict[str, list[IterationRecord]]
    counted: list[tuple[int, Memory]]
    samples: list[Sample]
    kernel: str
    reductions: list[ReductionDecision]


@dataclass(frozen=True)
class Run:
    """A run holds all that rank 0 knows at its end, or after an interruption.

    `losses`: of each iteration, by arm. `decisions`: those that came into force. `start`: the
    schedule that the run began with. `at_end`: what was measured at the end of the phase that the
    report is about. `workers`: the ranks whose timelines are shown, of so many `replicas`.
    `versions`: of packages, by name. `interrupted`: the signal's name, or empty. `shares`:
    decisions on replicas' microbatches that came into force; where these may change, `at_end` is
    None.
    """

    losses: Mapping[str, list[float]]
    decisions: Sequence[PlanDecision]
    start: Schedule
    at_end: Outlook | None
    workers: Sequence[int]
    replicas: int
    versions: Mapping[str, str]
    interrupted: str = ""
    shares: Sequence[ShareDecision] = ()

    @property
    def names(self) -> list[str] | None:
        """The workers' names, where replicas have one plan; None for the stages of one pipeline."""
        stages = len(self.workers) // self.replicas
        several = self.replicas > 1
        return [worker_name(w, stages) for w in range(len(self.workers))] if several else None


def write(options: DemoOptions, ranks: Sequence[RankResult], run: Run, controller: Leader) -> None:
    """Write all files into `options.out`, from what all `ranks` have measured."""
    out = Path(options.out)
    # An iteration begins with the first stage's first forward and ends with its last backward and
    # the optimizer step, so the first stage's clock decides; of several replicas the slowest.
    first = [r for r in ranks if r.stage == 0]
    iteration_ms = {
        name: [1e3 * max(values) for values in zip(*(r.seconds[name] for r in first), strict=True)]
        for name in run.losses
    }
    ran = len(iteration_ms["adaptra"])
    planner: PlanRemedy[Any, Any] = controller.loop.remedy
    phases = phases_until(options, ran)
    ends = [end for _, end in phases.values()]
    lived: dict[int, range] = {}  # a plan's whole life in its phase, by its first iteration
    for decision, until in pairwise([*run.decisions, None]):
        assert decision is not None
        end = min([ran, *(end for end in ends if end > decision.iteration)])
        if until is not None:
            end = min(end, until.iteration)
        end = min([end, *(s.iteration for s in run.shares if s.iteration > decision.iteration)])
        lived[decision.iteration] = whole = range(decision.iteration + 1, end)
        times = iteration_ms["adaptra"][whole.start : whole.stop]
        planner.log.measure(decision, median(times) if times else None)
    shown = [ranks[rank] for rank in run.workers]
    comparison = None
    if run.at_end is not None:
        comparison = compare(
            phases[key_phase(phases)], run.decisions, iteration_ms, run.start, run.at_end,
            planner.evaluate,
        )  # fmt: skip
    arms = _arm_reports(iteration_ms, shown, run.replicas, comparison)
    machine = _machine(ranks, phases, comparison)
    samples, kernels = [r.samples for r in ranks], [r.kernel for r in ranks]
    predictions = of_predictions(
        run.decisions, lived, samples, kernels, comparison, arms, planner.delays
    )
    if options.sync != "full":  # an iteration takes what the slowest replica does, not this one
        predictions = []
    summary = _summary(
        options, ranks, run, iteration_ms, phases, arms, comparison,
        None if comparison is None else _memory(controller, shown, comparison),
        machine,
        [*of_the_run(options, run.interrupted, ran, machine), *predictions],
    )  # fmt: skip
    out.joinpath("summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    gantts = {
        f"{arm.name} {kind}": pipeline_gantt(timeline)
        for arm in arms
        for kind, timeline in (("measured", arm.measured), ("predicted", arm.predicted))
        if timeline is not None
    }
    out.joinpath("timeline.json").write_text(json.dumps(chrome_trace(gantts)))
    pipelines = "a pipeline" if run.replicas == 1 else f"{run.replicas} pipelines"
    report = Report(
        title=f"A GPT through {pipelines} with a {slow_noun(summary['config'])}",
        summary=summary,
        arms=arms,
        phases=phases,
        link_delay_ms=_delays_ms(planner.delays),
    )
    out.joinpath("report.html").write_text(report_html(report))


def phases_until(options: DemoOptions, ran: int) -> dict[str, tuple[int, int]]:
    """The phases of a run of which `ran` iterations are over."""
    spans = {name: (a, min(b, ran)) for name, (a, b) in options.phases.items() if a < ran}
    return spans or {"measured": (0, ran)}


def _delays_ms(delays: Mapping[int, Mapping[str, float]]) -> dict[str, list[float]]:
    """Return by link the delay, ms, of each iteration up to the last one that was measured.

    Iteration 0 is not measured: allocators and caches warm up. NaN before the first message of a
    link that was opened later.
    """
    last, rows = dict.fromkeys(next(iter(delays.values()), ()), 0.0), []
    for iteration in range(max(delays, default=-1) + 1):
        last = {**last, **delays.get(iteration, {})}
        rows.append(last)
    return {link: [1e3 * row.get(link, math.nan) for row in rows] for link in last}


def _arm_reports(
    iteration_ms: Mapping[str, list[float]],
    shown: Sequence[RankResult],
    replicas: int,
    comparison: Comparison | None,
) -> list[ArmReport]:
    """Both arms, each with a measured and the predicted timeline of the plan compared."""
    if comparison is None:
        return [ArmReport(name) for name in ("stock", "adaptra")]
    predicted = {"stock": comparison.stock, "adaptra": comparison.plan.timeline}
    conditions = comparison.plan.conditions
    several = conditions if isinstance(conditions, ReplicaConditions) else None
    return [
        ArmReport(
            name,
            _drawn(shown, replicas, name, iteration_ms[name], comparison),
            predicted[name],
            several,
        )
        for name in ("stock", "adaptra")
    ]


def _memory(
    controller: Leader, shown: Sequence[RankResult], comparison: Comparison
) -> MemoryFigures | None:
    """Return the activations of each worker under the plan compared, in microbatches and bytes.

    None for Megatron's own schedule, where Megatron keeps them itself.
    """
    plan, end = comparison.plan, comparison.iterations.stop
    drawn = comparison.iterations
    records = [[r for r in rank.records["adaptra"] if r.iteration in drawn] for rank in shown]
    kept = [[r.memory for r in row if r.memory is not None] for row in records]
    if not all(kept):
        return None
    budgets = controller.loop.remedy.estimator.budgets
    # A plan's bytes are counted once, in its second iteration; those of a microbatch are the same
    # under every plan.
    counted = [[(i, memory) for i, memory in rank.counted if i < end][-1:] for rank in shown]
    each = [memory.per_microbatch for row in counted for _, memory in row]
    peaks = [
        memory.peak_bytes
        for row in counted
        for i, memory in row
        if i >= comparison.since and memory.peak_bytes is not None
    ]
    known = len(each) == len(shown)
    return {
        "budget": [None if math.isinf(budget) else budget for budget in budgets],
        "predicted_peak": list(plan.peak_in_flight),
        "measured_peak": [max(memory.peak for memory in row) for row in kept],
        "bytes_per_microbatch": each if known else None,
        "predicted_peak_bytes": [
            round(peak * one) for peak, one in zip(plan.peak_in_flight, each, strict=True)
        ]
        if known
        else None,
        "measured_peak_bytes": peaks if len(peaks) == len(shown) else None,
    }


def _drawn(
    shown: Sequence[RankResult],
    replicas: int,
    arm: str,
    iteration_ms: Sequence[float],
    comparison: Comparison,
) -> Timeline | None:
    """Return the recorded iteration nearest to the median of those compared; None for none."""
    kept = set(comparison.iterations)
    for rank in shown:  # one whose adaptation has failed records no more
        kept &= {record.iteration for record in rank.records[arm]}
    if not kept:
        return None
    middle = comparison.measured_ms[arm]
    drawn = min(sorted(kept), key=lambda i: abs(iteration_ms[i] - middle))
    records = [next(r for r in rank.records[arm] if r.iteration == drawn) for rank in shown]
    return merge(records, f"{arm} measured", replicas)


def _machine(
    ranks: Sequence[RankResult],
    phases: Mapping[str, tuple[int, int]],
    comparison: Comparison | None,
) -> Machine:
    """Return the load of rank 0's machine by phase, and in the iterations compared."""
    spans = dict(phases)
    if comparison is not None:
        spans["compared"] = comparison.iterations.start, comparison.iterations.stop
    samples, kernels = [r.samples for r in ranks], [r.kernel for r in ranks]
    loads = {name: load_of(samples, kernels, *span) for name, span in spans.items()}
    return {
        "cores": os.cpu_count(),
        "load_average": list(os.getloadavg()),
        "cpu_share": {name: load._asdict() for name, load in loads.items() if load is not None},
    }


def _summary(
    options: DemoOptions,
    ranks: Sequence[RankResult],
    run: Run,
    iteration_ms: Mapping[str, list[float]],
    phases: Mapping[str, tuple[int, int]],
    arms: Sequence[ArmReport],
    comparison: Comparison | None,
    memory: MemoryFigures | None,
    machine: Machine,
    notes: Sequence[str],
) -> Summary:
    def of_phase(name: str, span: tuple[int, int]) -> PhaseFigures:
        values = iteration_ms[name]
        warm = values[max(span[0], WARM_UP) : span[1]]
        return {"iteration_ms": median(warm or values[span[0] : span[1]])}

    medians = {
        name: {phase: of_phase(name, span) for phase, span in phases.items()}
        for name in iteration_ms
    }

    def ratio(phase: str, of: str, to: str) -> float | None:
        if phase not in phases:
            return None
        return medians[of][phase]["iteration_ms"] / medians[to][phase]["iteration_ms"]

    reduced = reduction_entries([one for rank in ranks for one in rank.reductions])
    shares = share_entries(run.shares, iteration_ms["adaptra"], [end for _, end in phases.values()])
    changed = bool(shares) or bool(options.sync_counts)
    differences = Differences.between(
        run.losses, [r.digests for r in ranks], [r.apart for r in ranks],
        [Schedule.parse(d.plan) for d in run.decisions], options.precision, options.dropout or 0.0,
        reduced=bool(reduced) or options.allreduce not in ("native", "auto"),
        shared=changed,
    )  # fmt: skip
    slow = options.slowness
    onset = slow.first if options.emulate else 0
    plans = [(one.detected, one.iteration) for one in run.decisions]
    adapts, made, more = options.policy == "adaptive", plans, list[tuple[int, int]]()
    if slow.slow_replicas and options.emulate:
        adapts = options.sync != "full" and not options.sync_counts
        made = [(s["detected"], s["iteration"]) for s in shares]
        more = plans  # cheaper remedies may be enough
    elif options.lateness:
        adapts = options.allreduce == "auto"
        made = [(r["detected"], r["iteration"]) for r in reduced]
    detected = [at for at, _ in made if at >= onset]
    changes = [first for at, first in (*made, *more) if at >= onset]
    adapts = bool(changes) or (adapts and options.emulate)
    return {
        "config": {
            **{name: getattr(options, name) for name in _SHAPE},
            **{name: getattr(slow, name) if options.emulate else [] for name in _SLOW},
            "hosts": slow.port_texts if slow.late_ranks else [],
            "message_bytes": options.message_bytes,
            "from_iteration": slow.first if options.emulate else None,
            "to_iteration": slow.end if options.emulate else None,
            **{name: getattr(options, name) for name in _PLANS},
            "activation_budget": options.activation_budget or "none",
            "precision": options.precision,
            "dropout": options.dropout,
            "text": options.text or "the Python standard library's source",
        },
        "arms": {
            arm.name: {
                "phases": medians[arm.name],
                "losses": run.losses[arm.name],
                "predicted_slow_ms": comparison.predicted_ms[arm.name] if comparison else None,
                "measured_slow_ms": comparison.measured_ms[arm.name] if comparison else None,
                "peak_in_flight": list(arm.measured.peak_in_flight()) if arm.measured else None,
                "iteration_ms": iteration_ms[arm.name],
            }
            for arm in arms
        },
        "workers": run.names,
        "losses_identical": differences.losses_identical,
        "parameters_identical": differences.parameters_identical,
        "losses_difference": null_if_infinite(differences.losses_difference),
        "parameters_difference": differences.parameters_difference,
        "equal_to_rounding": differences.equal_to_rounding,
        "interrupted": run.interrupted or None,
        "times": phase_times(phases, iteration_ms, onset, changes if adapts else None),
        # Ratios of the medians of phases, and no other statistic.
        "speedup_slow": ratio("slow" if options.emulate else "measured", "stock", "adaptra"),
        "slowdown_healthy": ratio("healthy", "adaptra", "stock"),
        "compared": None
        if comparison is None
        else {
            "phase": key_phase(phases),
            "first_iteration": comparison.iterations.start,
            "last_iteration": comparison.iterations.stop - 1,
            "warmup": list(comparison.plan.schedule.warmup),
            "since_iteration": comparison.since,
        },
        "replans": [entry(Replan, decision) for decision in run.decisions],
        "all_reduces": reduced,
        "shares": shares,
        "detected_after_iterations": min(detected) - onset + 1 if detected else None,
        "versions": dict(run.versions),
        "memory": memory,
        "machine": machine,
        "notes": notes,
    }
