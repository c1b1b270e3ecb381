"""The log of decisions: JSON lines with what was predicted and what came of it.

Each line has its `kind`, the `job` and `number` of its decision, and `at`, seconds since 1970:

- `decision`: all that is known when it is proposed;
- `vote`: whether all ranks have `committed` it;
- `prediction`: what an iteration is expected to take as the model knows it later, `refreshed_ms`;
- `outcome`: what iterations have taken, `measured_ms`.

docs/decision-log.schema.json describes them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.log import LogFile
from megatron_adaptra.plan.base import Plan
from megatron_adaptra.plan.link_words import link_in_words, out_of_bandwidth, ports_in_words
from megatron_adaptra.runtime.record import RunRecord
from megatron_adaptra.runtime.trial import in_words

VERSION = 1
OUTCOME = 3  # iterations whose median is the measured outcome of a decision
WARMUP = (
    "warmup: forwards of each stage before its first backward, one more than Megatron's "
    "num_warmup_microbatches"
)
_IN_SENTENCE = 2  # links of whose ends the log of the training speaks


class Worker(NamedTuple):
    """One stage of one replica: its global rank, and the name of its host."""

    rank: int
    host: str


@dataclass(frozen=True)
class LinkEnd:
    """One end of a link. `through`: the interface, RDMA ports or `memory` there; "" if unknown.

    `worker`: replica and stage, `1.2`, where replicas are planned together; else "".
    """

    stage: int
    rank: int
    host: str
    through: str
    worker: str = ""


@dataclass(frozen=True)
class LinkChange:
    """A link that a decision is for, and what a message takes there.

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
        """What a message takes now."""
        return self.delay_ms + self.wire_ms


@dataclass
class Decision:
    """A change of plan. Times are milliseconds, as in every report.

    Args:
        number: of decisions made before it in this job.
        iteration: the first one on the new plan.
        detected: the one whose reports have led to it.
        kinds: of values that change, in a Bundle.
        links: it is for them; empty where memory, better knowledge of the costs, or slower
            iterations are the reason.
        why: the reason, in one sentence.
        warmup_before, warmup_after: warmup depth by stage, of several replicas by worker.
        predicted_ms: an iteration on the new plan.
        predicted_without_ms: an iteration under the same conditions on the plan before.
        stock: what unchanged Megatron would do under the same conditions.
        lower_bound_ms: no plan takes less under the same conditions.
        planning_ms: what planning took.
        again: where it undoes a plan, the iteration from which on that is tried again; else None.
        digest, plan: of the new schedule, and its text form.
        conditions: it was made for; see `Conditions.to_json`, and of several replicas
            `ReplicaConditions.to_json`.
        committed: all ranks run it.
        refreshed_ms: predicted again for the iterations to come, uncorrected, once all that the
            model uses was measured under the plan. Ops take longer while a pipeline stalls.
        measured_ms: the median of `samples`; None while it is not known.
        samples: iterations on the plan, but the first one.
    """

    number: int
    iteration: int
    detected: int
    kinds: list[str]
    links: list[LinkChange]
    why: str
    warmup_before: list[int]
    warmup_after: list[int]
    predicted_ms: float
    predicted_without_ms: float
    stock: Timeline
    lower_bound_ms: float
    planning_ms: float
    digest: str
    plan: str
    conditions: dict[str, Any]
    again: int | None = None
    committed: bool = False
    refreshed_ms: float | None = None
    measured_ms: float | None = None
    samples: list[float] = field(default_factory=list, repr=False)

    def to_json(self) -> dict[str, Any]:
        """What a line of the log has when the decision is proposed."""
        later = ("stock", "committed", "refreshed_ms", "measured_ms", "samples")
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in later}
        links = [asdict(link) for link in self.links]
        return {**data, "links": links, "stock_ms": 1e3 * self.stock.makespan}


class DecisionLog:
    """Decisions as JSON lines, appended to a file.

    Args:
        path: the file; nothing is written if None.
        record: of the run, which gets the same lines.

    `last`: the decision that has come into force last. `made`, `in_force`: how many there are.
    """

    def __init__(self, path: Path | None, record: RunRecord | None = None) -> None:
        self.record = record or RunRecord(None)
        self.last: Decision | None = None
        self.made = self.in_force = 0
        self._awaited: list[Decision] = []  # committed, the outcome not known
        self._job = secrets.token_hex(4)  # jobs, and starts of a job, may share a file
        self._file = None if path is None else LogFile(path, "decisions")

    def add(self, decision: Decision) -> None:
        """Log a decision that is proposed."""
        self.made += 1
        self._write("decision", decision, version=VERSION, **decision.to_json())

    def commit(self, decision: Decision) -> None:
        """A decision of the log comes into force."""
        decision.committed, self.last = True, decision
        self.in_force += 1
        self._awaited.append(decision)
        self._write("vote", decision, committed=True)

    def refuse(self, decision: Decision) -> None:
        """A decision of the log does not come into force: not all ranks could take it in time."""
        self._write("vote", decision, committed=False)

    def record_outcome(self, ran: int, seconds: float) -> None:
        """Iteration `ran` took `seconds`; the first one on a plan does not count."""
        in_force = [d for d in self._awaited if d.iteration <= ran][-1:]
        if not in_force:
            return
        decision = in_force[0]
        for over in self._awaited[: self._awaited.index(decision)]:
            self._end(over)
        if decision.iteration == ran:
            return
        decision.samples.append(1e3 * seconds)
        if len(decision.samples) == OUTCOME:
            self._end(decision)

    def refresh(self, decision: Decision, predicted_ms: float) -> None:
        """An iteration on this plan is expected to take `predicted_ms` now."""
        decision.refreshed_ms = predicted_ms
        self._write("prediction", decision, refreshed_ms=predicted_ms)

    def measure(self, decision: Decision, measured_ms: float | None) -> None:
        """An iteration on this plan has taken `measured_ms`; None: no iteration has run on it."""
        decision.measured_ms = measured_ms
        self._awaited = [d for d in self._awaited if d is not decision]
        self._write("outcome", decision, measured_ms=measured_ms)

    def settle(self) -> None:
        """A run is over: write what is known of its last outcome."""
        for decision in self._awaited:
            self._end(decision)

    def close(self) -> None:
        """The same, and wait for the files, ten seconds at most for each."""
        self.settle()
        if self._file is not None:
            self._file.close()
        self.record.close()

    def _end(self, decision: Decision) -> None:
        self.measure(decision, median(decision.samples) if decision.samples else None)

    def _write(self, kind: str, decision: Decision, **known: Any) -> None:
        at = round(time.time(), 3)
        line = {"kind": kind, "job": self._job, "number": decision.number, "at": at, **known}
        if self._file is not None:
            self._file.write(json.dumps(line))
        self.record.decision(line)


def sentence(decision: Decision) -> str:
    """A decision in force, for the log of the training."""
    return (  # Megatron's log counts from one
        f"from iteration {decision.iteration + 1} on, {decision.why}; an iteration is expected to "
        f"take {decision.predicted_ms:.4g} ms, without {decision.predicted_without_ms:.4g}"
        f"{_ends(decision.links)}{in_words(decision.again)}"
    )


def _ends(links: Sequence[LinkChange]) -> str:
    """Where the slowest links are: what to look at. Both directions of a link count once."""
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
    """The decision in one sentence, for people.

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
    """Why links change nothing, if bytes are what takes long there; else empty.

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
    """The decision in one sentence, where it has turned out what Megatron's own messages cost.

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
    """What going back to the first plan means, for people."""
    what = "Megatron's own messages" if start.schedule.stock else "1F1B"
    return f"back to {what} ({warmups(current, start)})"


def why_undone(after: float, before: float, back: str) -> str:
    """The decision in one sentence, where iterations have become slower.

    Args:
        after: seconds of an iteration, as measured.
        before: the same on the plan before, which comes back.
        back: what that means, for people.
    """
    return f"iterations take {1e3 * after:.4g} ms, on the plan before {1e3 * before:.4g} ms: {back}"


def warmups(current: Plan, plan: Plan) -> str:
    """Both plans' warmup depths, for people."""
    old, new = (",".join(map(str, p.schedule.warmup)) for p in (current, plan))
    return f"warmup {old} -> {new}"
