"""Decisions on plans of pipelines and of routes between replicas, and their sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple

from megatron_adaptra.adapt.log import Decision
from megatron_adaptra.adapt.trial import in_words
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.plan.link_words import link_in_words, out_of_bandwidth, ports_in_words
from megatron_adaptra.plan.pipeline.base import Plan

WARMUP = (
    "warmup: forwards of each stage before its first backward, one more than Megatron's "
    "num_warmup_microbatches"
)
_IN_SENTENCE = 2  # links whose ends the log of the training names


class Worker(NamedTuple):
    """A worker runs one stage of one replica, on the host named `host`, as global rank `rank`."""

    rank: int
    host: str


@dataclass(frozen=True)
class LinkEnd:
    """A link end names one side of a link, and the interface that messages go through there.

    `through`: an interface, RDMA ports or `memory`; "" if unknown. `worker`: replica and stage,
    `1.2`, where replicas are planned together; else "".
    """

    stage: int
    rank: int
    host: str
    through: str
    worker: str = ""


@dataclass(frozen=True)
class LinkChange:
    """A link change describes a link that a decision is for, and what a message takes there.

    `delay_before_ms`: all of it, as it was planned for. `delay_ms`: on the way. `wire_ms`: for its
    bytes, at `bandwidth` bytes per second; None where that is too little to matter.
    """

    source: LinkEnd
    target: LinkEnd
    delay_before_ms: float
    delay_ms: float
    wire_ms: float = 0.0
    bandwidth: float | None = None

    @property
    def message_ms(self) -> float:
        """The milliseconds that a message takes now."""
        return self.delay_ms + self.wire_ms


@dataclass(kw_only=True)
class PlanDecision(Decision):
    """A plan decision changes the schedule of one pipeline, or that of all replicas.

    Args:
        kinds: of values that change, in a Bundle.
        links: it is for them; empty where memory, better knowledge of the costs, or slower
            iterations are the reason.
        warmup_before, warmup_after: warmup depth by stage, of several replicas by worker.
        predicted_ms: an iteration on the new plan.
        predicted_without_ms: an iteration under the same conditions on the plan before.
        stock: what unchanged Megatron would do under the same conditions.
        lower_bound_ms: no plan takes less under the same conditions.
        digest, plan: of the new schedule, and its text form.
        conditions: it was made for; see `Conditions.to_json`, and of several replicas
            `ReplicaConditions.to_json`.
        refreshed_ms: predicted again for the iterations to come, uncorrected, once all that the
            model uses was measured under the plan. Ops take longer while a pipeline stalls.
    """

    KIND: ClassVar[str] = "decision"
    ABOUT: ClassVar[str] = "decisions"
    OUTCOME_ITERATIONS: ClassVar[int] = 3

    kinds: list[str]
    links: list[LinkChange]
    warmup_before: list[int]
    warmup_after: list[int]
    predicted_ms: float
    predicted_without_ms: float
    stock: Timeline
    lower_bound_ms: float
    digest: str
    plan: str
    conditions: dict[str, Any]
    refreshed_ms: float | None = None

    def to_json(self) -> dict[str, Any]:
        later = ("stock", "committed", "refreshed_ms", "measured_ms", "samples")
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in later}
        links = [asdict(link) for link in self.links]
        return {**data, "links": links, "stock_ms": 1e3 * self.stock.makespan}

    def sentence(self) -> str:
        return (  # Megatron's log counts from one
            f"from iteration {self.iteration + 1} on, {self.why}; an iteration is expected to "
            f"take {self.predicted_ms:.4g} ms, without {self.predicted_without_ms:.4g}"
            f"{_ends(self.links)}{in_words(self.again)}"
        )


def _ends(links: Sequence[LinkChange]) -> str:
    """Describe where the slowest links are. Both directions of a link count once."""
    pairs: dict[frozenset[int], LinkChange] = {}
    for link in sorted(links, key=lambda link: -max(link.message_ms, link.delay_before_ms)):
        pairs.setdefault(frozenset((link.source.rank, link.target.rank)), link)
    found = [
        f"; between rank {a.rank} on {a.host}{_through(a)} and rank {b.rank} on {b.host}"
        f"{_through(b)}"
        for a, b in [(link.source, link.target) for link in pairs.values()][:_IN_SENTENCE]
    ]
    return "".join(found)


def _through(end: LinkEnd) -> str:
    return f" ({end.through})" if end.through else ""


def why_swap(
    before: Mapping[tuple[int, int], float],
    conditions: Conditions,
    current: Plan,
    plan: Plan,
    back: bool,
    native: Conditions | None = None,
) -> str:
    """Describe the decision for changed links in one sentence, for people.

    Args:
        before: links that have changed, with the seconds that a message took there.
        conditions: what they are now.
        current: what is in force.
        plan: what comes.
        back: whether that is the one without any slow link.
        native: what they are now for Megatron's own messages, where these are in use.
    """
    links = _changes(before, conditions, native)
    if back:
        return f"{links}: {what_back(current, plan)}"
    rest = ", but not what its bytes take" if set(before) & set(conditions.full_links) else ""
    return f"{links}: {_remedies(current, plan)}{rest} ({warmups(current, plan)})"


def why_none(before: Mapping[tuple[int, int], float], conditions: Conditions) -> str:
    """Describe why slow links lead to no plan, if bytes take long there; else return no text.

    `before`, `conditions`: see `why_swap`.
    """
    if not any(conditions.wire(*link) for link in before):
        return ""
    text = (
        f"{_changes(before, conditions)}: no schedule is enough faster, so that the one in force "
        "stays"
    )
    full = set(before) & set(conditions.full_links)
    return f"{text}; {out_of_bandwidth(conditions)}" if full else text


def why_leave(
    link: tuple[int, int], conditions: Conditions, native: Conditions, current: Plan, plan: Plan
) -> str:
    """Describe the decision in one sentence, where Megatron's own messages cost too much.

    Args:
        link: where most of it is spent.
        conditions, native, current, plan: see `why_swap`.
    """
    return (
        f"Megatron's own messages hold up an iteration by {1e3 * current.extra:.3g} ms; most on "
        f"link {link[0]}->{link[1]}, which takes {_takes(link, conditions, native)}: "
        f"{_remedies(current, plan)} ({warmups(current, plan)})"
    )


def _remedies(current: Plan, plan: Plan) -> str:
    found = ["its messages leave the GPU's queue"] if current.schedule.stock else []
    if not found or current.schedule.warmup != plan.schedule.warmup:
        found.append("a deeper warmup hides it")
    return ", and ".join(found)


def _changes(
    before: Mapping[tuple[int, int], float],
    conditions: Conditions,
    native: Conditions | None = None,
) -> str:
    links = ", ".join(
        f"{a}->{b} takes {_takes((a, b), conditions, native)}, "
        + (f"before {1e3 * old:.3g} ms" if old else "from the start")
        for (a, b), old in before.items()
    )
    return f"link {links}{ports_in_words(conditions, before)}"


def _takes(link: tuple[int, int], conditions: Conditions, native: Conditions | None) -> str:
    takes = link_in_words(conditions, link)
    if native is not None:
        theirs = native.message_seconds(*link)
        if theirs >= 2 * conditions.message_seconds(*link):
            takes = f"{1e3 * theirs:.3g} ms for Megatron's messages, for ours {takes}"
    return takes


def what_back(current: Plan, start: Plan) -> str:
    """Describe going back to the first plan, with the warmup depths of both, for people."""
    what = "Megatron's own messages" if start.schedule.stock else "1F1B"
    return f"back to {what} ({warmups(current, start)})"


def why_undone(after: float, before: float, back: str) -> str:
    """Describe the decision in one sentence, where iterations have become slower.

    Args:
        after: seconds of an iteration, as measured.
        before: the same on the plan before, which comes back.
        back: what that means, for people.
    """
    return f"iterations take {1e3 * after:.4g} ms, on the plan before {1e3 * before:.4g} ms: {back}"


def warmups(current: Plan, plan: Plan) -> str:
    """Describe both plans' warmup depths, for people."""
    old, new = (",".join(map(str, p.schedule.warmup)) for p in (current, plan))
    return f"warmup {old} -> {new}"
