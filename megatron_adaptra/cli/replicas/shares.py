"""`--policy share`: fewer microbatches for slow replicas, printed, and drawn."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_adaptra.base.errors import BadInput, shown
from megatron_adaptra.base.units import whole
from megatron_adaptra.cli.job import Job, in_words, title_of
from megatron_adaptra.cli.once import given
from megatron_adaptra.cli.output import Table, ms, note, print_json, progress, say, show_table
from megatron_adaptra.cli.plugin import RULE
from megatron_adaptra.cli.replicas.figures import MOST_ROWS
from megatron_adaptra.cli.replicas.source import SHARE
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.plan.ladder import FULL, Ladder, Remedy, ladder_in_words
from megatron_adaptra.plan.remedies import plan_remedies
from megatron_adaptra.plan.shares.counts import shares_in_words
from megatron_adaptra.plan.shares.pipelines import PipelineShares, share_pipelines
from megatron_adaptra.view.drawing import Drawing
from megatron_adaptra.view.pipeline import shares_gantt

SAME = 1.0005  # gains below are shown as none
CANNOT = (
    "one microbatch per replica: there is nothing to share out, so that shares cannot help; with "
    "more and smaller ones (--microbatches) they can"
)
ROUTES = "adaptra compare, with the same flags, shows each way to move microbatches, and the bound"
EXPLAINED = (
    "weight: by what a replica's mean loss is multiplied, so that each sample counts the same; of "
    "others: microbatches whose samples stock gives to another replica"
)


def wants_shares(args: argparse.Namespace, job: Job) -> bool:
    """Return whether to share out microbatches; raises BadInput for flags that contradict it.

    `job`: that the flags describe.
    """
    asked = "policy" in given(args)
    counts = getattr(args, "counts", None)
    wanted = args.policy == SHARE or (not asked and (job.whole or counts is not None))
    if getattr(args, "schedule", None) is not None:
        wanted = False
    if wanted and job.replicas is None:
        flag, value = ("--counts", counts) if args.policy != SHARE else ("--policy", SHARE)
        allowed = "microbatches are shared out among replicas; give --replicas"
        raise BadInput(flag, value, allowed)
    if counts is not None and not wanted:
        raise BadInput("--counts", counts, "they go with --policy share, and with no --schedule")
    for flag in ("explain", "failures", "samples"):
        if wanted and getattr(args, flag, None):
            allowed = f"it does not go with --policy {SHARE}"
            raise BadInput(f"--{flag}", getattr(args, flag), allowed)
    return wanted


def shares_of(args: argparse.Namespace, job: Job) -> PipelineShares:
    """The plan for a `job` of several replicas.

    Raises BadInput: --counts that do not share out the global batch, a worker that is dead, or
    activations that do not fit.
    """
    assert job.replicas is not None  # the caller has looked
    counts = None
    try:
        if args.counts is not None:
            counts = _counts(args.counts)
            SyncPlan(job.replicas.microbatches, counts)
        return share_pipelines(job.replicas, args.sends, counts)
    except BadInput as error:
        if error.field.startswith("count"):
            one = error.field if error.field.startswith("count of") else ""
            which = f"{one} is {shown(error.value)}: " if one else ""
            raise BadInput("--counts", args.counts, which + error.allowed) from None
        if error.field in ("failed", "activation_budget"):
            key = "slow" if error.field == "failed" else error.field
            raise BadInput(job.field(key), error.value, error.allowed) from None
        raise


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(whole(word) for word in text.split(","))
    except ValueError:
        allowed = "it has to be whole numbers with commas between, one per replica"
        raise BadInput("--counts", text, allowed) from None


def run_shares(args: argparse.Namespace, job: Job) -> int:
    """Plan, and print the counts, the weights and what an iteration takes; the exit status.

    `job`: of several replicas. Raises BadInput, see `shares_of`.
    """
    with progress("planning", lines=True):
        plan = shares_of(args, job)
        ladder = ladder_of(job, args.sends) if args.counts is None else None
    if job.taken:
        note(job.taken)
    if args.json:
        print_json({**shares_json(plan), "ladder": None if ladder is None else ladder.to_json()})
        return 0
    say(in_words(job.conditions, job.replicas))
    say(f"{SHARE}: {shares_in_words(plan.sync)}")
    say(headline(plan))
    show_table(_table(plan))
    say(EXPLAINED)
    if ladder is not None:
        show_table(ladder_table(ladder))
        say(f"auto: {ladder_in_words(ladder, RULE.min_gain)}")
    if (words := why_not(plan)) is not None:
        say(words)
    elif job.conditions.stages > 1:
        say(ROUTES)
    return 0


def headline(plan: PipelineShares) -> str:
    """Describe the time of an iteration with the `plan`, without it, and its lower bound."""
    each = plan.sync.microbatches
    text = f"{ms(plan.predicted)} ms an iteration"
    if not plan.sync.full:
        text += f", with {each} each {ms(plan.full)} ms ({plan.gain:.2f} x)"
    return f"{text}; with parts of microbatches it would be {ms(plan.bound)} ms at least"


def why_not(plan: PipelineShares) -> str | None:
    """Why the counts of a `plan` do not help; None where they do."""
    if plan.sync.microbatches == 1:
        return CANNOT
    if plan.gain < 1 / SAME:
        return "these counts make an iteration slower"
    if plan.gain < SAME and plan.full > plan.bound * SAME:
        return "no whole microbatch can move and make an iteration faster"
    return "no replica is slow: each keeps its own microbatches" if plan.gain < SAME else None


def _rows(plan: PipelineShares) -> list[tuple[str, ...]]:
    """A row per replica; where they are many, one for all that are alike."""
    sync, c = plan.sync, plan.conditions
    assert c is not None
    alike: dict[tuple[str, ...], list[int]] = {}
    for replica, count in enumerate(sync.counts):
        slow = max(c.slow.get(replica * c.stages + stage, 1.0) for stage in range(c.stages))
        row = (
            f", {slow:g}x slow" * (slow != 1),
            str(count),
            str(sync.weight(replica)),
            str(sum(home != replica for home, _ in sync.share(replica))),
            ms(plan.seconds[replica]),
            ms(plan.before[replica].predicted),
        )
        alike.setdefault(row if sync.replicas > MOST_ROWS else (*row, str(replica)), []).append(
            replica
        )
    return [
        (
            f"{replicas[0]}{row[0]}" if not replicas[1:] else f"{len(replicas)} alike{row[0]}",
            *row[1:6],
        )
        for row, replicas in alike.items()
    ]


def _table(plan: PipelineShares) -> Table:
    each = plan.sync.microbatches
    columns = ("replica", "microbatches", "weight", "of others", "takes, ms", f"with {each}, ms")
    return Table("", columns, _rows(plan))


def shares_json(plan: PipelineShares) -> dict[str, Any]:
    """The object that --json prints of a `plan`."""
    sync, c = plan.sync, plan.conditions
    assert c is not None
    return {
        "policy": SHARE,
        "why": shares_in_words(sync),
        "why_not": why_not(plan),
        "microbatches": sync.microbatches,
        "counts": list(sync.counts),
        "weights": [str(sync.weight(replica)) for replica in range(sync.replicas)],
        "shares": [[list(pair) for pair in sync.share(r)] for r in range(sync.replicas)],
        "text": sync.text(),
        "predicted_ms": 1e3 * plan.predicted,
        "full_ms": 1e3 * plan.full,
        "lower_bound_ms": 1e3 * plan.bound,
        "gain": plan.gain,
        "replica_ms": [1e3 * seconds for seconds in plan.seconds],
        "replica_full_ms": [1e3 * one.predicted for one in plan.before],
        "conditions": c.to_json(),
    }


def shares_drawing(args: argparse.Namespace, job: Job) -> tuple[Drawing, PipelineShares]:
    """The picture of an iteration of all replicas, in stock and with shares; and what it shows.

    `job`: of several replicas. Raises BadInput, see `shares_of`.
    """
    plan = shares_of(args, job)
    if job.taken:
        note(job.taken)
    before, after = plan.timelines()
    assert plan.conditions is not None
    each = plan.sync.microbatches
    drawing = Drawing(
        SHARE,
        ": ".join(filter(None, (title_of(args), in_words(job.conditions, job.replicas)))),
        shares_in_words(plan.sync),
        shares_gantt(before, after, plan.conditions),
        plan.bound,
        f"An iteration with {each} microbatches each (full), and with shares",
        plan.predicted,
    )
    return drawing, plan


def ladder_of(job: Job, sends: str) -> Ladder | None:
    """All remedies for a `job` of several replicas; None where its activations do not fit.

    `sends`: "eager" or "rendezvous".
    """
    assert job.replicas is not None  # the caller has looked
    try:
        return plan_remedies(job.replicas, sends, RULE.min_gain)
    except BadInput:
        return None


def ladder_table(ladder: Ladder) -> Table:
    """Return a table of the remedies of a `ladder`: the time each leaves, or why it is refused."""
    rungs = (Remedy(FULL, ladder.full, "nothing changes"), *ladder.remedies)
    return Table(
        "",
        ("remedy, the cheapest first", "iteration, ms", "gain", "how"),
        [_row(one, ladder) for one in rungs],
    )


def _row(one: Remedy, ladder: Ladder) -> tuple[str, ...]:
    name = one.name + ", chosen" * (one.name == ladder.chosen)
    if one.leaves is None:
        return name, "–", "–", one.why
    gain = f"{ladder.full / one.leaves:.2f} x" if one.leaves else ""
    return name, ms(one.leaves), gain, one.why
