"""The figures of a plan of several replicas: of each worker, and of each move."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from megatron_adaptra.base.units import size
from megatron_adaptra.cli.job import Job
from megatron_adaptra.cli.output import Table, ms
from megatron_adaptra.cli.replicas.source import SHARE, Baselines
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan.routes.reroute import ReplicaPlan
from megatron_adaptra.plan.routes.words import loads, loads_in_words
from megatron_adaptra.plan.shares.pipelines import PipelineShares

MOST_ROWS = 32  # of the table of workers
EXPLAINED = (
    "away from home: microbatches at stages of another replica; messages: in an iteration, from "
    "one replica to another; more in flight: the most microbatches that a worker holds beyond "
    "1F1B's; a dearer move may make use of the cheaper ones"
)


def decision(move: str, schedule: Schedule) -> str:
    """Describe the `move` of the `schedule`: the work that workers take over from others."""
    return f"{move}: {loads_in_words(schedule) or 'nothing is moved'}"


def in_table(move: str) -> str:
    """The name of a `move`, for tables and pictures."""
    return "none, best order" if move == "none" else move


def between_replicas(schedule: Schedule) -> int:
    """Messages of an iteration that go from one replica to another: two where a route crosses."""
    routes, crossing = schedule.routes, 0
    for home in range(schedule.replicas):
        for microbatch in range(schedule.microbatches):
            at = [routes.worker(stage, microbatch, home) for stage in range(schedule.stages)]
            replicas = [worker // schedule.stages for worker in at]
            crossing += sum(one != other for one, other in pairwise(replicas))
    return 2 * crossing


def runs_for_others(schedule: Schedule) -> list[int]:
    """Return per worker the microbatches of other replicas that it runs in `schedule`."""
    count = Counter(
        worker
        for worker, line in enumerate(schedule.order)
        for op in line
        if op.kind is Kind.F and op.home != worker // schedule.stages
    )
    return [count[worker] for worker in range(len(schedule.order))]


def one_f_one_b_peaks(conditions: ReplicaConditions) -> list[float]:
    """Return per worker the microbatches that 1F1B holds in flight.

    `conditions`: of all workers.
    """
    stages, count = conditions.stages, conditions.microbatches
    return [float(min(stages - w % stages, count)) for w in range(conditions.workers)]


def headline(plan: ReplicaPlan, base: Baselines) -> str:
    """Describe how long the `plan` takes beside the baselines `base`."""
    parts = [f"{ms(plan.predicted)} ms an iteration"]
    if base.untreated:
        parts.append(f"{_times(base.untreated, plan.predicted)} as fast as untreated 1F1B "
                     f"({ms(base.untreated)} ms)")  # fmt: skip
    if base.healthy:
        parts.append(f"{plan.predicted / base.healthy:.3f} x healthy 1F1B ({ms(base.healthy)} ms)")
    if plan.lower_bound:
        reached = "the lower bound, which no schedule can beat"
        if plan.gap >= 5e-5:
            reached = f"{plan.gap:.1%} above the lower bound of {ms(plan.lower_bound)} ms"
        parts.append(reached)
    return ", ".join(parts)


def worker_table(plan: ReplicaPlan, job: Job) -> Table:
    """A row per worker; where they are many, only of those that are unusual.

    Args:
        plan: of the job.
        job: for bytes of activations.
    """
    c, schedule = plan.conditions, plan.schedule
    others, given = runs_for_others(schedule), _given_away(plan)
    shares, sizes = busy_shares(plan), job.nbytes(plan.peak_in_flight)
    shown = list(range(c.workers))
    if c.workers > MOST_ROWS:
        known = [w for w in shown if _state(c, w)]
        moved = [w for w in shown if (others[w] or given[w]) and w not in known]
        shown = sorted([*known, *moved][:MOST_ROWS])
    rows = []
    for worker in shown:
        held = f"{plan.peak_in_flight[worker]:g}" + (f" ({size(sizes[worker])})" if sizes else "")
        budget = c.activation_budget[worker]
        alive = worker not in c.failed
        rows.append(
            (
                c.name(worker) + _state(c, worker),
                str(sum(op.kind is Kind.F for op in schedule.order[worker])) if alive else "",
                str(others[worker]) if alive else "",
                str(given[worker]),
                f"{100 * shares[worker]:.1f} %" if alive else "",
                held if alive else "",
                ("no limit" if math.isinf(budget) else f"{budget:g}") if alive else "",
            )
        )
    head = ("worker", "microbatches", "of others", "run elsewhere", "computes", "peak in flight")
    return Table("", (*head, "budget"), rows)


def hidden(plan: ReplicaPlan, table: Table) -> str:
    """Describe the workers of the `plan` that the `table` leaves out; empty where it has all."""
    left = plan.conditions.workers - len(table.rows)
    if not left:
        return ""
    moved = "; --json has all" if len(table.rows) == MOST_ROWS else " run what is their own"
    return f"{left} more workers{moved}"


def move_table(
    plan: ReplicaPlan, job: Job, base: Baselines, shares: PipelineShares | None = None
) -> Table:
    """Return a table of each move's gain and cost, after the baselines `base`.

    Args:
        plan: of the job.
        job: for bytes of activations and messages.
        base: what the moves are compared with.
        shares: of microbatches, instead of a move; None to leave them out.
    """
    c = plan.conditions
    first = base.untreated or next((m.seconds for m in plan.moves), None)
    rows = []
    if base.untreated:
        rows.append(("1F1B, untreated", *_gains(base.untreated, first, base), "0", "0", "0"))
    for move in plan.moves:
        crossing = between_replicas(move.schedule)
        text = f"{crossing}"
        if crossing and c.pipeline.message_bytes:
            text += f" ({size(crossing * c.pipeline.message_bytes)})"
        cells = (f"{move.moved}", text, _most_more(move.in_flight, job))
        rows.append((in_table(move.name), *_gains(move.seconds, first, base), *cells))
    if shares is not None:
        away = sum(max(0, count - c.microbatches) for count in shares.sync.counts) * c.stages
        peaks = [peak for one in shares.plans for peak in one.peak_in_flight]
        cells = (f"{away}", "0", _most_more(peaks, job))
        rows.append((SHARE, *_gains(shares.predicted, first, base), *cells))
    if base.healthy:
        rows.append(("1F1B, all healthy", *_gains(base.healthy, first, base), "", "", ""))
    rows.append(("lower bound", *_gains(plan.lower_bound, first, base), "", "", ""))
    head = ("move", "iteration, ms", "gain", "x healthy 1F1B", "away from home", "messages")
    return Table("", (*head, "more in flight"), rows)


def _gains(seconds: float, first: float | None, base: Baselines) -> tuple[str, str, str]:
    healthy = f"{seconds / base.healthy:.3f}" if base.healthy else ""
    return ms(seconds), _times(first, seconds) if first else "", healthy


def _times(seconds: float, faster: float) -> str:
    return f"{seconds / faster:.2f} x" if faster else ""


def _most_more(peaks: Sequence[float], job: Job) -> str:
    """Return the most that a worker holds in addition to 1F1B's microbatches, and its name."""
    c = job.replicas
    assert c is not None
    usual = one_f_one_b_peaks(c)
    more = [held - base for held, base in zip(peaks, usual, strict=True)]
    sizes = job.nbytes([max(0.0, each) for each in more])
    worker = max(range(c.workers), key=lambda w: (sizes[w] if sizes else more[w], -w))
    if more[worker] <= 1e-9:
        return "0"
    nbytes = f", {size(sizes[worker])}" if sizes else ""
    return f"+{more[worker]:g}{nbytes} on {c.name(worker)}"


def _given_away(plan: ReplicaPlan) -> list[int]:
    """Return per worker the microbatches of its replica that another one runs at its stage."""
    out = [0] * plan.conditions.workers
    for stage, home, _ in plan.schedule.routes.moved:
        out[home * plan.schedule.stages + stage] += 1
    return out


def busy_shares(plan: ReplicaPlan) -> list[float]:
    """Return each worker's compute as a share of the `plan`'s iteration without its step."""
    seconds = plan.predicted - plan.conditions.pipeline.step_seconds
    busy = [plan.timeline.busy(worker) for worker in range(plan.conditions.workers)]
    return [each / seconds if seconds else 0.0 for each in busy]


def _state(c: ReplicaConditions, worker: int) -> str:
    if worker in c.failed:
        return ", dead"
    times = c.slow.get(worker, 1.0)
    return f", {times:g}x slow" if times != 1 else ""


def plan_json(plan: ReplicaPlan, move: str, job: Job, base: Baselines) -> dict[str, Any]:
    """Return a `plan` of that `move` for JSON; --schedule reads it back from the ops in `workers`.

    Args:
        plan: of the job.
        move: that was chosen.
        job: for bytes of activations.
        base: what the plan is compared with.
    """
    c = plan.conditions
    nbytes = job.nbytes(plan.peak_in_flight)

    def named(values: Sequence[Any]) -> dict[str, Any]:
        return {c.name(worker): value for worker, value in enumerate(values)}

    return {
        **plan.schedule.to_json(),
        "move": move,
        "why": decision(move, plan.schedule),
        "predicted_ms": 1e3 * plan.predicted,
        "lower_bound_ms": 1e3 * plan.lower_bound,
        "gap": plan.gap,
        "untreated_ms": None if base.untreated is None else 1e3 * base.untreated,
        "healthy_1f1b_ms": None if base.healthy is None else 1e3 * base.healthy,
        "peak_in_flight": named(plan.peak_in_flight),
        "peak_bytes": None if nbytes is None else named(nbytes),
        "activation_budget": named([None if math.isinf(b) else b for b in c.activation_budget]),
        "busy_share": named(busy_shares(plan)),
        "runs_for_others": named(runs_for_others(plan.schedule)),
        "loads": [
            {
                "home": one.home,
                "replica": one.replica,
                "stages": [one.first, one.last],
                "microbatches": list(one.microbatches),
            }
            for one in loads(plan.schedule)
        ],
        "moves": [
            {
                "name": one.name,
                "predicted_ms": 1e3 * one.seconds,
                "away_from_home": one.moved,
                "messages_between_replicas": between_replicas(one.schedule),
                "peak_in_flight": named(one.in_flight),
                "why": decision(one.name, one.schedule),
            }
            for one in plan.moves
        ],
        "conditions": c.to_json(),
    }
