"""The ladder of remedies for slow replicas, as `--adaptra-sync auto` climbs it, printed."""

from __future__ import annotations

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.cli.job import Job
from megatron_adaptra.cli.output import Table, ms
from megatron_adaptra.plan.ladder import FULL, Ladder, Remedy, ladder_in_words
from megatron_adaptra.plan.remedies import plan_remedies

COLUMNS = ("remedy, the cheapest first", "iteration, ms", "gain")


def ladder_of(job: Job, sends: str) -> Ladder | None:
    """All remedies for a `job` of several replicas; None where its activations do not fit.

    `sends`: "eager" or "rendezvous".
    """
    assert job.replicas is not None  # the caller has looked
    try:
        return plan_remedies(job.replicas, sends, _min_gain())
    except BadInput:
        return None


def ladder_table(ladder: Ladder) -> Table:
    """Return a table of the remedies of a `ladder`: the time each leaves, or why it is refused."""
    rungs = (Remedy(FULL, ladder.full, "nothing changes"), *ladder.remedies)
    return Table("", (*COLUMNS, "how"), [_row(one, ladder) for one in rungs])


def _row(one: Remedy, ladder: Ladder) -> tuple[str, ...]:
    name = one.name + ", chosen" * (one.name == ladder.chosen)
    if one.leaves is None:
        return name, "–", "–", one.why
    gain = f"{ladder.full / one.leaves:.2f} x" if one.leaves else ""
    return name, ms(one.leaves), gain, one.why


def ladder_line(ladder: Ladder) -> str:
    """Name in a sentence the remedy of a `ladder` that `auto` takes."""
    return f"auto: {ladder_in_words(ladder, _min_gain())}"


def _min_gain() -> float:
    """Return the share of an iteration that a plan has to save without `--adaptra-min-gain`."""
    from megatron_adaptra.config import AdaptraConfig  # starts slowly, and few jobs need it

    return AdaptraConfig().min_gain
