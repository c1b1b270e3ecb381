"""The published measurements, and what we predict for the same profiles."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.cli.profile import CARRIED, conditions_of
from megatron_adaptra.cli.tradeoff import within
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.plan import make_plan

METHODS = ("1F1B", "ZB", "ZB-CPU", "ZB-CPU-ReSchedule")
# What is planned within a budget: times the number of stages, and whether with recompute.
BUDGETS = (
    ("p", 1, False),
    ("p + recompute", 1, True),
    ("2p", 2, False),
    ("2p + recompute", 2, True),
)


@dataclass(frozen=True)
class Experiment:
    """`measured`: milliseconds by method; `plan_ms`: what the source's own planner predicted."""

    name: str
    conditions: Conditions
    plan_ms: float
    measured: dict[str, float]


@dataclass(frozen=True)
class Prediction:
    """Milliseconds. `budgets`: by the names in BUDGETS; `peak`: what `adaptive` holds at most."""

    stock: float
    bound: float
    adaptive: float
    peak: float
    budgets: dict[str, float]


def experiments(name: str | None = None) -> list[Experiment]:
    """All that were published, or the one called `name`; BadInput if there is none."""
    folder = Path(__file__).with_name("published")
    profiles = json.loads((folder / "pipemorph_profiles.json").read_text("utf-8"))
    rows = csv.DictReader((folder / "pipemorph_measured.csv").read_text("utf-8").splitlines())
    measured: dict[str, dict[str, float]] = {}
    for row in rows:
        key = "{experiment}-{model}-{slow_links}-{delay_ms}ms".format(**row)
        measured.setdefault(key, {})[row["method"]] = float(row["iteration_ms"])
    names = [profile["name"] for profile in profiles]
    if name is not None and name not in names:
        raise BadInput("--name", name, f"one of {', '.join(names)}")
    return [
        Experiment(
            profile["name"],
            conditions_of({k: v for k, v in profile.items() if k not in CARRIED}),
            float(profile["published_plan_ms"]),
            measured[profile["name"]],
        )
        for profile in profiles
        if name in (None, profile["name"])
    ]


def predict(conditions: Conditions) -> Prediction:
    """Plan with 1F1B, and with the adaptive policy within every budget."""
    plan = make_plan(conditions, "adaptive")
    return Prediction(
        stock=1e3 * make_plan(conditions, "1f1b").predicted,
        bound=1e3 * plan.lower_bound,
        adaptive=1e3 * plan.predicted,
        peak=max(plan.peak_in_flight),
        budgets={
            name: 1e3 * _within(conditions, times * conditions.stages, recompute)
            for name, times, recompute in BUDGETS
        },
    )


def _within(conditions: Conditions, budget: float, recompute: bool) -> float:
    return make_plan(within(replace(conditions, recompute=recompute), budget)).predicted


def _ratios(e: Experiment, p: Prediction) -> dict[str, float]:
    out = {
        "predicted / measured 1F1B": p.stock / e.measured["1F1B"],
        "measured 1F1B / ReSchedule": e.measured["1F1B"] / e.measured["ZB-CPU-ReSchedule"],
        "predicted 1F1B / adaptive": p.stock / p.adaptive,
        "published plan / lower bound": e.plan_ms / p.bound,
        "adaptive / lower bound": p.adaptive / p.bound,
    }
    within = {
        f"adaptive within {name} / lower bound": ms / p.bound for name, ms in p.budgets.items()
    }
    return {**out, **within}


def summary(pairs: Sequence[tuple[Experiment, Prediction]]) -> dict[str, dict[str, float]]:
    """Mean, lowest and highest of each ratio, by its name."""
    each = [_ratios(e, p) for e, p in pairs]
    return {
        name: {
            "mean": fmean(one[name] for one in each),
            "lowest": min(one[name] for one in each),
            "highest": max(one[name] for one in each),
        }
        for name in each[0]
    }


def as_json(pairs: Sequence[tuple[Experiment, Prediction]]) -> dict[str, Any]:
    """What `reproduce.py --json` prints."""
    return {
        "source": "arXiv:2504.19232",
        "profiles": [
            {
                "name": e.name,
                "measured_ms": e.measured,
                "published_plan_ms": e.plan_ms,
                "stock_ms": p.stock,
                "lower_bound_ms": p.bound,
                "adaptive_ms": p.adaptive,
                "adaptive_peak_in_flight": p.peak,
                "adaptive_within_budget_ms": p.budgets,
            }
            for e, p in pairs
        ],
        "summary": summary(pairs),
    }
