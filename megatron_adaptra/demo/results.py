"""From what the ranks measured to summary.json, timeline.json, the report and its picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_adaptra.demo.options import DemoOptions
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.plan import Plan
from megatron_adaptra.runtime.decisions import Decision
from megatron_adaptra.runtime.leader import Leader
from megatron_adaptra.telemetry.probe import IterationRecord, merge
from megatron_adaptra.telemetry.report import Memory
from megatron_adaptra.view.chrome import chrome_trace
from megatron_adaptra.view.html.report import report_html
from megatron_adaptra.view.pipeline import pipeline_gantt
from megatron_adaptra.view.png import no_matplotlib
from megatron_adaptra.view.report import ArmReport, Report

WARM_UP = 2  # iterations at the start that no median counts


@dataclass
class RankResult:
    """What one rank has measured.

    By arm: `seconds` of each iteration, `digests` of the parameters, `records` of the iterations
    that may be drawn. `counted`: the iterations whose activations were measured in bytes.
    """

    stage: int
    seconds: dict[str, list[float]]
    digests: dict[str, str]
    records: dict[str, list[IterationRecord]]
    counted: list[tuple[int, Memory]]


@dataclass(frozen=True)
class Prediction:
    """What is predicted for an iteration: of ours, and of Megatron's as it is."""

    plan: Plan
    stock: Timeline

    @classmethod
    def now(cls, controller: Leader) -> Prediction:
        """For the schedule in force and the links as they are. Only on the leader."""
        loop = controller.loop
        plan = loop.rule.evaluate(controller.ballot.schedule, loop.estimator.conditions())
        return cls(plan, loop.replanner.stock())

    @classmethod
    def of(cls, decision: Decision, controller: Leader) -> Prediction:
        """As it was when the plan was made."""
        conditions = Conditions.from_json(decision.conditions)
        plan = controller.loop.rule.evaluate(Schedule.parse(decision.plan), conditions)
        return cls(plan, decision.stock)


def write(
    options: DemoOptions,
    ranks: Sequence[RankResult],
    losses: Mapping[str, list[float]],
    controller: Leader,
    decisions: Sequence[Decision],
    drawn: Prediction,
    pipeline: Sequence[int],
    versions: Mapping[str, str],
) -> None:
    """Write all files into `options.out`.

    `losses`: of each iteration, by arm. `decisions`: those that came into force. `pipeline`: the
    ranks whose timelines are shown, and `drawn`, what was predicted for them at their end.
    `versions`: of what was used, by package.
    """
    out = Path(options.out)
    # An iteration begins with the first stage's first forward and ends with its last backward and
    # the optimizer step, so the first stage's clock tells; of several replicas the slowest.
    first = [r for r in ranks if r.stage == 0]
    iteration_ms = {
        name: [1e3 * max(values) for values in zip(*(r.seconds[name] for r in first), strict=True)]
        for name in losses
    }
    for i, decision in enumerate(decisions):  # over the plan's whole life in its phase
        end = decisions[i + 1].iteration if i + 1 < len(decisions) else options.iterations
        end = min([end, *(b for _, b in options.phases.values() if b > decision.iteration)])
        lived = iteration_ms["adaptra"][decision.iteration + 1 : end]
        controller.loop.log.measure(decision, median(lived) if lived else None)
    shown = [ranks[rank] for rank in pipeline]
    slow = options.phases.get("slow", (0, options.iterations))
    made = [d for d in decisions if slow[0] <= d.iteration < slow[1]]
    prediction = Prediction.of(made[-1], controller) if made else drawn
    arms = _arm_reports(iteration_ms, shown, prediction)
    summary = _summary(options, ranks, losses, iteration_ms, decisions, arms, versions)
    summary["memory"] = _memory(
        controller, shown, prediction.plan, made[-1].iteration if made else 0
    )
    out.joinpath("summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    gantts = {
        f"{arm.name} {kind}": pipeline_gantt(timeline)
        for arm in arms
        for kind, timeline in (("measured", arm.measured), ("predicted", arm.predicted))
        if timeline is not None
    }
    out.joinpath("timeline.json").write_text(json.dumps(chrome_trace(gantts)))
    report = Report(
        title="A GPT through a pipeline with a slow link",
        summary=summary,
        arms=arms,
        phases=options.phases,
        link_delay_ms=_delays_ms(controller.loop.delays),
    )
    out.joinpath("report.html").write_text(report_html(report))
    try:
        from megatron_adaptra.view.png.report import report_png

        report_png(report, out / "report.png")
    except ImportError:  # matplotlib is an extra
        print(f"adaptra: no report.png: {no_matplotlib()}", flush=True)


def _delays_ms(delays: Mapping[int, Mapping[str, float]]) -> dict[str, list[float]]:
    """By link one value for each iteration up to the last one that was measured.

    Iteration 0 is not measured: allocators and caches warm up.
    """
    last, rows = dict.fromkeys(next(iter(delays.values()), ()), 0.0), []
    for iteration in range(max(delays, default=-1) + 1):
        last = {**last, **delays.get(iteration, {})}
        rows.append(last)
    return {link: [1e3 * row[link] for row in rows] for link in last}


def _arm_reports(
    iteration_ms: Mapping[str, list[float]], shown: Sequence[RankResult], prediction: Prediction
) -> list[ArmReport]:
    """Both arms, each with its measured and its predicted timeline of the same iteration."""
    measured = {name: _typical(shown, name, iteration_ms[name]) for name in iteration_ms}
    predicted = {"stock": prediction.stock, "adaptra": prediction.plan.timeline}
    return [
        ArmReport(name, iteration_ms[name], measured[name], predicted[name])
        for name in ("stock", "adaptra")
    ]


def _last(shown: Sequence[RankResult]) -> int:
    """The last iteration that is drawn."""
    return shown[0].records["adaptra"][-1].iteration


def _memory(
    controller: Leader, shown: Sequence[RankResult], plan: Plan, since: int
) -> dict[str, Any] | None:
    """What activations take, stage by stage, in microbatches and, as last counted, in bytes.

    None for Megatron's own schedule, which keeps them itself. `since`: the plan's first iteration.
    """
    records = [[r for r in rank.records["adaptra"] if r.iteration >= since] for rank in shown]
    kept = [[r.memory for r in row if r.memory is not None] for row in records]
    if not all(kept):
        return None
    budgets = controller.loop.estimator.budgets
    # A plan's bytes are counted once, in its second iteration.
    upto = _last(shown)
    counted = [m for rank in shown for m in [m for i, m in rank.counted if i <= upto][-1:]]
    in_bytes = len(counted) == len(shown)
    return {
        "budget": [None if math.isinf(budget) else budget for budget in budgets],
        "predicted_peak": list(plan.peak_in_flight),
        "measured_peak": [max(memory.peak for memory in row) for row in kept],
        "predicted_peak_bytes": [
            round(peak * memory.per_microbatch)
            for peak, memory in zip(plan.peak_in_flight, counted, strict=True)
        ]
        if in_bytes
        else None,
        "measured_peak_bytes": [memory.peak_bytes for memory in counted] if in_bytes else None,
    }


def _healthy(options: DemoOptions, decisions: Sequence[Decision]) -> list[int]:
    """The iterations in which both arms ran 1F1B over healthy links: before, and after recovery."""
    first, end = options.phases.get("healthy", (0, 0))
    before = range(max(first, WARM_UP), end)
    if "recovered" not in options.phases or any(d.iteration < end for d in decisions):
        return list(before)
    back, last = options.phases["recovered"]
    if decisions and decisions[-1].warmup_after == decisions[0].warmup_before:
        return [*before, *range(max(back, decisions[-1].iteration + 1), last)]
    return list(before)


def _typical(
    shown: Sequence[RankResult], arm: str, iteration_ms: Sequence[float]
) -> Timeline | None:
    """The measured Timeline of the recorded iteration that is nearest to their median."""
    kept = [record.iteration for record in shown[0].records[arm]]
    if not kept:
        return None
    middle = median(iteration_ms[i] for i in kept)
    at = min(range(len(kept)), key=lambda k: abs(iteration_ms[kept[k]] - middle))
    return merge([r.records[arm][at] for r in shown], f"{arm} measured")


def _summary(
    options: DemoOptions,
    ranks: Sequence[RankResult],
    losses: Mapping[str, list[float]],
    iteration_ms: Mapping[str, list[float]],
    decisions: Sequence[Decision],
    arms: Sequence[ArmReport],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    def phase(name: str, span: tuple[int, int]) -> dict[str, float]:
        values = iteration_ms[name][max(span[0], WARM_UP) : span[1]] or iteration_ms[name][-1:]
        return {"iteration_ms": median(values)}

    medians = {
        arm.name: {key: phase(arm.name, span) for key, span in options.phases.items()}
        for arm in arms
    }
    slow = "slow" if "slow" in options.phases else "measured"
    pairs = [
        iteration_ms["adaptra"][i] / iteration_ms["stock"][i] for i in _healthy(options, decisions)
    ]
    onset = options.from_iteration if options.emulate else 0
    found = [d for d in decisions if d.detected >= onset]
    return {
        "config": {
            "stages": options.stages,
            "microbatches": options.microbatches,
            "data_parallel": options.data_parallel,
            "num_layers": options.num_layers,
            "hidden_size": options.hidden_size,
            "seq_length": options.seq_length,
            "iterations": options.iterations,
            "slow_links": options.slow_links if options.emulate else [],
            "delay_ms": 1e3 * options.delay if options.emulate else None,
            "from_iteration": options.from_iteration if options.emulate else None,
            "to_iteration": options.to_iteration if options.emulate else None,
            "engine": options.engine,
            "policy": options.policy,
            "chunks": options.chunks,
            "recompute": options.recompute,
            "activation_budget": options.activation_budget or "none",
            "precision": options.precision,
            "dropout": options.dropout,
            "text": options.text or "the Python standard library's source",
        },
        "arms": {
            arm.name: {
                "phases": medians[arm.name],
                "losses": losses[arm.name],
                "predicted_slow_ms": 1e3 * arm.predicted.makespan if arm.predicted else None,
                "peak_in_flight": list(arm.measured.peak_in_flight()) if arm.measured else None,
                "iteration_ms": iteration_ms[arm.name],
            }
            for arm in arms
        },
        "losses_identical": losses["stock"] == losses["adaptra"],
        "parameters_identical": all(r.digests["stock"] == r.digests["adaptra"] for r in ranks),
        "speedup_slow": medians["stock"][slow]["iteration_ms"]
        / medians["adaptra"][slow]["iteration_ms"],
        "slowdown_healthy": median(pairs) if pairs else None,
        "replans": [
            {
                "iteration": d.iteration,
                "why": d.why,
                "warmup_before": d.warmup_before,
                "warmup_after": d.warmup_after,
                "predicted_ms": d.predicted_ms,
                "measured_ms": d.measured_ms,
            }
            for d in decisions
        ],
        "detected_after_iterations": found[0].detected - onset + 1 if found else None,
        "versions": dict(versions),
    }
