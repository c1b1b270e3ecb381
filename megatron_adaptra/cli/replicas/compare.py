"""`adaptra compare` for several replicas: 1F1B as it is, and each move, beside each other."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.files import results_folder
from megatron_adaptra.cli.job import Job, in_words, title_of
from megatron_adaptra.cli.output import (
    Table,
    finish,
    ms,
    note,
    progress,
    say,
    show_table,
)
from megatron_adaptra.cli.replicas.figures import (
    EXPLAINED,
    decision,
    headline,
    in_table,
    move_table,
    plan_json,
)
from megatron_adaptra.cli.replicas.shares import shares_json
from megatron_adaptra.cli.replicas.source import (
    MOVES,
    SHARE,
    Baselines,
    baselines,
    chosen_move,
    plan_within,
)
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.plan.routes.reroute import ReplicaPlan
from megatron_adaptra.plan.shares.counts import shares_in_words
from megatron_adaptra.plan.shares.pipelines import PipelineShares, share_pipelines
from megatron_adaptra.view.html.page import header, page, section, table, tiles

UNTREATED = "1F1B, untreated"


class Within(NamedTuple):
    """The plan within one budget, in microbatches per worker; None for the job's own."""

    budget: float | None
    plan: ReplicaPlan

    @property
    def name(self) -> str:
        """For a head of a column."""
        if self.budget is None:
            return "the job's budget"
        return "no limit" if math.isinf(self.budget) else f"{self.budget:g}"


def compare_replicas(args: argparse.Namespace, job: Job, budgets: Sequence[float]) -> int:
    """Plan a `job` of several replicas within its own budget and each of `budgets`; the status."""
    conditions = job.replicas
    assert conditions is not None  # the caller has looked
    folder = results_folder(Path(args.out)) if args.out else None
    found = []
    with progress("planning", lines=True) as at:
        for i, budget in enumerate((None, *budgets), start=1):
            at(f"{i} of {1 + len(budgets)} budgets")
            one = conditions if budget is None else within(conditions, budget)
            found.append(Within(budget, plan_within(args, one)))
        at("1F1B to compare with")
        base = baselines(conditions, args.sends)
    own, shares = found[0].plan, _shares(args, job)
    move = chosen_move(own)
    data = _json(found, job, base, shares)
    leads = [in_words(job.conditions, conditions), decision(move, own.schedule)]
    cells = move_table(own, job, base, shares)

    def html() -> str:
        first = headline(own, base).partition(" (")[0]  # the other figures are on the tiles
        return page(
            first,
            header(title_of(args), first, leads),
            tiles([(f"{ms(seconds)} ms", name) for name, seconds in _seconds(own, base).items()]),
            section("What each move gains", table(cells.columns, cells.rows)),
        )

    def show() -> None:
        for line in (*leads, headline(own, base)):
            say(line)
        show_table(cells)
        say(EXPLAINED)
        if shares is not None:
            say(f"{SHARE}: {shares_in_words(shares.sync)}")
        if budgets:
            say("milliseconds of an iteration, by activation budget of a worker in microbatches")
            show_table(_budget_table(found, base))

    return finish(args, folder, "compare", data, html, show)


def within(conditions: ReplicaConditions, budget: float) -> ReplicaConditions:
    """The same job, of these `conditions`, with `budget`, in microbatches, on every worker."""
    pipeline = replace(conditions.pipeline, activation_budget=(budget,) * conditions.stages)
    return replace(conditions, pipeline=pipeline, activation_budget=())


def _seconds(plan: ReplicaPlan, base: Baselines) -> dict[str, float]:
    named = {chosen_move(plan): plan.predicted}
    if base.untreated:
        named[UNTREATED] = base.untreated
    if base.healthy:
        named["1F1B, all healthy"] = base.healthy
    return {**named, "lower bound": plan.lower_bound}


def _shares(args: argparse.Namespace, job: Job) -> PipelineShares | None:
    """Shares of microbatches instead of a move; None where none can be."""
    if job.taken:
        note(job.taken)
    assert job.replicas is not None
    try:
        return share_pipelines(job.replicas, args.sends)
    except BadInput:
        return None


def _budget_table(found: Sequence[Within], base: Baselines) -> Table:
    rows = []
    for name in MOVES:
        cells = []
        for one in found:
            known = {move.name: move.seconds for move in one.plan.moves}
            cells.append(ms(known[name]) if name in known else "–")
        if set(cells) != {"–"}:
            rows.append((in_table(name), *cells))
    rows.append(("lower bound", *(ms(one.plan.lower_bound) for one in found)))
    if base.healthy:
        rows.append(("1F1B, all healthy", *[ms(base.healthy)] * len(found)))
    return Table("", ("move", *(one.name for one in found)), rows)


def _json(
    found: Sequence[Within], job: Job, base: Baselines, shares: PipelineShares | None
) -> dict[str, Any]:
    own = found[0].plan
    return {
        **plan_json(own, chosen_move(own), job, base),
        "share": None if shares is None else shares_json(shares),
        "budgets": [
            {
                "activation_budget": None if math.isinf(one.budget) else one.budget,
                "lower_bound_ms": 1e3 * one.plan.lower_bound,
                "moves": {move.name: 1e3 * move.seconds for move in one.plan.moves},
            }
            for one in found
            if one.budget is not None
        ],
    }
