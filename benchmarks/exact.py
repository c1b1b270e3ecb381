"""The optimum of a small job, proven by OR-tools' CP-SAT solver (`pip install ortools`).

It shows how far the planners are from it; jobs as they run in production are too large for it.
Before a release this writes tests/unit/plan/small_optima.json, which has to stay as it is:

    python benchmarks/exact.py [CASES] [SECONDS PER CASE]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from exact_model import Model
from ortools.sat.python import cp_model

from megatron_adaptra.base.errors import AdaptraError, BadInput, ScheduleError
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Line, Schedule
from megatron_adaptra.model.bounds import lower_bound
from megatron_adaptra.plan.pipeline.base import PLANNERS
from megatron_adaptra.plan.pipeline.fixed import one_by_one
from megatron_adaptra.plan.pipeline.search.compaction import merge_backwards
from megatron_adaptra.plan.pipeline.search.job_shop import JobShop
from megatron_adaptra.sim.clock import simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))
from plan.small_cases import OPTIMA, small_case

MOST_OPS = 800  # 8 stages, 32 microbatches in halves: proven in half a minute; 0.4 GB of memory
TICKS = 1e9  # into which the time of a known schedule is divided
SECONDS = 60.0  # how long the solver may take
STARTS = ("1f1b", "zb-h1", "zb-h2", "interleaved", "warmup")  # the best that fits is improved


@dataclass(frozen=True)
class Optimum:
    """The best schedule found, its seconds, and the seconds that no schedule beats."""

    schedule: Schedule
    seconds: float
    bound: float
    proven: bool


def solve(
    conditions: Conditions, time_limit: float | None = None, hint: Schedule | None = None
) -> Optimum:
    """The fastest schedule within the budget that takes each kind of op in microbatch order.

    Its `why` says whether that is proven. Sends are eager.
    `time_limit`: seconds, and what is found by then depends on the machine. Without one the limit
    is `SECONDS` by the solver's count of its own steps: one release of OR-tools then finds the same
    schedule every time. `hint`: a schedule to start from, of use if it is one of those looked for.
    Raises BadInput, for a job that is too large too, and AdaptraError if the model is wrong.
    """
    count = _refuse(conditions)
    known = min(_starts(conditions, hint), key=lambda one: _seconds(one, conditions))
    seconds = _seconds(known, conditions)
    tick = (seconds - conditions.step_seconds) / TICKS or 1.0
    whole = in_ticks(conditions, tick)
    start = simulate(lower(known), whole)
    model = Model(whole, horizon=round(start.makespan))
    model.hint(start)

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # what several find depends on their race
    # Raising the bound until a schedule meets it beats lowering a schedule's time to the bound by
    # far (measured), as the bound that the precedences give is close. So does having no LP.
    solver.parameters.use_objective_lb_search = True
    solver.parameters.linearization_level = 0
    if time_limit is None:
        solver.parameters.max_deterministic_time = SECONDS
    else:
        solver.parameters.max_time_in_seconds = time_limit
    status = solver.solve(model.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        raise AdaptraError(f"the model is {solver.status_name(status)}")

    best = known
    if status != cp_model.UNKNOWN:
        found = replace(known, order=model.order(solver))
        if _seconds(found, conditions) < seconds * (1 - 1e-9):
            best = found
    if conditions.split:
        merged = merge_backwards(JobShop(conditions), best)
        if _seconds(merged, conditions) <= _seconds(best, conditions) * (1 + 1e-12):
            best = merged
    seconds = _seconds(best, conditions)
    # The model has halves only: of backwards that take less in one piece it proves nothing. Nor of
    # ports: there a gradient may wait for W, so that another message goes first.
    modelled = not (conditions.split and (conditions.backward or conditions.ports))
    proven = modelled and status == cp_model.OPTIMAL
    bound = 0.0
    if modelled:  # every op, and every message, may have been rounded by a tick
        bound = (solver.best_objective_bound - 2 * count) * tick + conditions.step_seconds
    if not proven:
        bound = max(bound, lower_bound(conditions))
    bound = min(max(bound, 0.0), seconds)
    kinds = ", ".join(["F", *(["I", "W"] if conditions.split else ["B"])])
    if conditions.recompute:
        kinds += " and R in microbatch order"
    none = f"no order of {kinds} within the budget is"
    gap = 1 - bound / seconds if seconds else 0.0
    why = f"optimal: {none} faster" if proven else f"best found in time: {none} {gap:.1%} faster"
    return Optimum(replace(best, policy="exact", why=why), seconds, bound, proven)


def _refuse(conditions: Conditions) -> int:
    """The number of ops; raises BadInput for what is not modelled, or too much."""
    if conditions.shared:
        raise BadInput("cores", conditions.cores, "a device per stage is modelled")
    kinds = 2 + conditions.split + conditions.recompute
    count = kinds * conditions.stages * conditions.chunks * conditions.microbatches
    if count > MOST_OPS:
        allowed = f"at most {MOST_OPS} (F, B or I and W, R)"
        raise BadInput("ops", count, allowed)
    return count


def in_ticks(conditions: Conditions, tick: float) -> Conditions:
    """The same job in whole ticks of `tick` seconds.

    No op takes less than one, so that no two start together.
    """
    chunks = conditions.chunks

    def ticks(kind: Kind) -> tuple[float, ...]:
        each = (conditions.seconds(kind, s) / chunks for s in range(conditions.stages))
        return tuple(chunks * max(1.0, round(one / tick)) for one in each)

    links = {}
    for way, link in conditions.links.items():
        wire = round(conditions.message_bytes / link.bandwidth / tick)
        bandwidth = 1.0 / wire if wire else float("inf")
        links[way] = LinkState(float(round(link.delay / tick)), bandwidth)
    through = {stage: round(conditions.port(stage) / tick) for stage in conditions.ports}
    ports = {stage: 1.0 / one for stage, one in through.items() if one}
    return replace(
        conditions,
        forward=ticks(Kind.F),
        backward_input=ticks(Kind.I if conditions.split else Kind.B),
        backward_weight=ticks(Kind.W) if conditions.split else (0.0,) * conditions.stages,
        backward=(),
        recomputation=ticks(Kind.R) if conditions.recomputation else (),
        links=links,
        ports=ports,
        message_bytes=1.0,
        step_seconds=0.0,
    )


def _starts(conditions: Conditions, hint: Schedule | None) -> Iterator[Schedule]:
    """Schedules of those looked for; the first needs no more memory than every job has."""
    yield one_by_one(conditions)
    shop = JobShop(conditions)
    schedules = [] if hint is None else [hint]
    for name in STARTS:
        with suppress(BadInput):  # a policy that is not for this job
            schedules.append(PLANNERS[name](conditions, "eager", None))
    kinds = {Kind.F, *((Kind.I, Kind.W) if conditions.split else (Kind.B,))}
    kinds |= {Kind.R} if conditions.recompute else set()
    for schedule in schedules:
        if conditions.split:
            schedule = replace(schedule, order=shop.lines(shop.order_of(schedule)))
        ops = {op for line in schedule.order for op in line}
        ordered = all(map(_in_order, schedule.order)) and {op.kind for op in ops} <= kinds
        with suppress(ScheduleError):
            check(lower(schedule), conditions.activation_budget)
            if ordered:
                yield schedule


def _in_order(line: Line) -> bool:
    """Whether each kind of op of each chunk is taken in microbatch order."""
    lines: dict[tuple[Kind, int], list[int]] = {}
    for op in line:
        lines.setdefault((op.kind, op.chunk), []).append(op.microbatch)
    return all(a < b for one in lines.values() for a, b in pairwise(one))


def _seconds(schedule: Schedule, conditions: Conditions) -> float:
    return simulate(lower(schedule), conditions).makespan


def write_optima(cases: int = 200, seconds: float = 10.0) -> None:
    """{seed: {"seconds", "bound", "proven"}} of `small_case`, as the solver finds them."""
    optima, proven = {}, 0
    for seed in range(cases):
        began = time.perf_counter()
        found = solve(small_case(seed), seconds)
        proven += found.proven
        optima[seed] = {"seconds": found.seconds, "bound": found.bound, "proven": found.proven}
        took = time.perf_counter() - began
        print(f"{seed}: {found.seconds:.6g} in {took:.2f} s, {proven} of {seed + 1} proven")
        rows = (f'"{seed}": {json.dumps(one)}' for seed, one in optima.items())
        OPTIMA.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    write_optima(*map(int, sys.argv[1:2]), *map(float, sys.argv[2:3]))
