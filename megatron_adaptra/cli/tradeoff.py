"""The trade-off of memory and time: every policy in every budget, and the delay budgets hide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.model.bounds import lower_bound, unlimited_bound
from megatron_adaptra.plan import PLANNERS, Plan

DEFAULT = "warmup"  # what the plugin plans with by default
LEVERS = {"adaptive": False, "adaptive + recompute": True}  # row -> whether it may recompute
SLOWDOWN = 0.05  # share of an iteration: a delay that costs no more counts as hidden
MOST = 64.0  # times the job's delays, beyond which nothing differs

# (conditions, policy) -> plan
Make = Callable[[Conditions, str], Plan]


class Cell(NamedTuple):
    """A cell holds the `seconds` of an iteration, and the microbatches on the fullest stage."""

    seconds: float
    peak: float


@dataclass(frozen=True)
class Row:
    """A row holds a policy's times: `cells[i]` in budget i, or None; `unlimited` without one."""

    name: str
    unlimited: Cell
    cells: tuple[Cell | None, ...]

    @property
    def fixed(self) -> bool:
        """True where the policy takes no notice of the budget."""
        return self.name not in (DEFAULT, *LEVERS) and {c for c in self.cells if c} <= {
            self.unlimited
        }


@dataclass(frozen=True)
class Comparison:
    """A comparison holds rows of policies in columns of budgets, and bounds in seconds.

    `tolerance[row][i]`: the largest multiple of the job's delays that budget i hides. `bound`: no
    schedule beats it, whatever its memory; `bounds[i]`: within budget i, if nothing is recomputed.
    """

    conditions: Conditions
    budgets: tuple[float, ...]
    bound: float
    bounds: tuple[float, ...]
    rows: tuple[Row, ...]
    refused: dict[str, str]  # policy -> why it takes no such job
    tolerance: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def adaptive(self) -> list[Row]:
        """The rows of the levers; none where `adaptive` takes no such job."""
        return [row for row in self.rows if row.name in LEVERS]


def default_budgets(conditions: Conditions) -> tuple[float, ...]:
    """Return budgets in microbatches: 1, 1.5, 2 and 3 times 1F1B's, the job's own, and no limit."""
    stages, count = conditions.stages, conditions.microbatches
    own = (
        set(conditions.activation_budget) if len(set(conditions.activation_budget)) == 1 else set()
    )
    some = {float(math.ceil(times * stages)) for times in (1, 1.5, 2, 3)} | own
    return (*sorted(budget for budget in some if budget < count), math.inf)


def names_of_rows() -> tuple[str, ...]:
    """Return the policies' names: the plugin's default, its other policies, then all others."""
    return (DEFAULT, *LEVERS, *sorted(set(PLANNERS) - {DEFAULT, "adaptive"}))


def compare(conditions: Conditions, budgets: Sequence[float], make: Make) -> Comparison:
    """Plan the job with every policy within each of `budgets`, in microbatches per stage."""
    rows, refused = [], {}
    for name in names_of_rows():
        policy, recompute = ("adaptive", LEVERS[name]) if name in LEVERS else (name, False)
        job = replace(conditions, recompute=recompute)
        try:
            unlimited = _cell(make(within(job, math.inf), policy))
        except BadInput as error:
            if error.field == "--time-limit":
                raise
            refused[name] = f"{error.field} {error.value}: {error.allowed}"
            continue
        cells = (unlimited if math.isinf(b) else _fitting(job, b, policy, make) for b in budgets)
        rows.append(Row(name, unlimited, tuple(cells)))
    kept = replace(conditions, recompute=False)
    bounds = tuple(lower_bound(within(kept, budget)) for budget in budgets)
    bound = unlimited_bound(conditions)
    return Comparison(conditions, tuple(budgets), bound, bounds, tuple(rows), refused)


def within(conditions: Conditions, budget: float) -> Conditions:
    """Return the same job with `budget`, in microbatches, on every stage."""
    return replace(conditions, activation_budget=(budget,) * conditions.stages)


def slower(conditions: Conditions, times: float) -> Conditions:
    """Return the same job with every delay `times` as long."""
    links = {
        pair: link._replace(delay=times * link.delay, jitter=times * link.jitter)
        for pair, link in conditions.links.items()
    }
    return replace(conditions, links=links)


def delay_tolerance(conditions: Conditions, make: Make) -> float:
    """The largest multiple of the delays that `adaptive` hides (see SLOWDOWN).

    The multiple is right to 3 %; the planner is no smooth function anyway.
    """
    most = (1 + SLOWDOWN) * make(slower(conditions, 0.0), "adaptive").predicted

    def hides(times: float) -> bool:
        return make(slower(conditions, times), "adaptive").predicted <= most * (1 + 1e-9)

    low, high = 0.0, 1.0
    while high <= MOST and hides(high):
        low, high = high, 2 * high
    while high <= MOST and high - low > 0.03 * high and high > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if hides(middle) else (low, middle)
    return low


def _fitting(job: Conditions, budget: float, policy: str, make: Make) -> Cell | None:
    try:
        cell = _cell(make(within(job, budget), policy))
    except BadInput as error:
        if error.field == "--time-limit":
            raise
        return None
    return cell if cell.peak <= budget + 1e-9 else None


def _cell(plan: Plan) -> Cell:
    return Cell(plan.predicted, max(plan.peak_in_flight))
