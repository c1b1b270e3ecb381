"""The four decision loops, driven by scripts: all that comes out of them, in order, as JSON lines.

Nothing is measured, nothing is drawn without a seed, and nothing is sent: a leader without members
takes the reports of all ranks, one after the other, and its vote is decided at once. So each run
says the same, which files in goldens/ keep.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from adapt import hand_fed, replica_job
from adapt.voted_group import BUFFER, RATE, VotedGroup
from adapt.voted_job import STEP, VotedJob
from adapt.voted_ranks import VotedRanks
from agree.leading import workers
from patience import PATIENCE

from megatron_adaptra.adapt.leader import Leader
from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import Loop, Offer
from megatron_adaptra.adapt.pipeline.remedy import PipelineRemedy
from megatron_adaptra.adapt.record import RunRecord
from megatron_adaptra.adapt.reductions.decisions import ReductionDecision
from megatron_adaptra.adapt.reductions.remedy import ReductionRemedy
from megatron_adaptra.adapt.routes.remedy import RouteRemedy
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.agree.agreement import Ballot, DecisionStore, Proposal, starting_ballot
from megatron_adaptra.agree.bundle import LINKS, SCHEDULE, Bundle, Links
from megatron_adaptra.agree.reductions import ALL_REDUCE
from megatron_adaptra.agree.store import KeyValueStore
from megatron_adaptra.base import log, waits
from megatron_adaptra.base.errors import BadBundle
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.measure.iteration_record import IterationRecord
from megatron_adaptra.plan.ladder import COLLECTIVE

MS = 1e-3
LOG = "decisions.jsonl"
CLOCK = {"at", "job", "planning_ms"}  # fields that differ from run to run
LONG = {"plan", "digest", "conditions", "figures", "start", "now", "estimator", "estimators"}
RULE = ReplanPolicy(sends="eager")


def plain(data: Any, key: str = "") -> Any:
    """Leave out what differs from run to run, and shorten what nobody reads."""
    if key in CLOCK:
        return "-"
    if key in LONG and data is not None:
        return digest(data)
    if isinstance(data, float):
        return float(f"{data:.6g}")  # the last digits are those of a machine's library
    if isinstance(data, Mapping):
        return {str(key): plain(value, str(key)) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [plain(value) for value in data]
    return data


def varied(iteration: int) -> float:
    """Give the factor by which an iteration takes longer: no two neighbours are alike."""
    return 1 + iteration * 7 % 10 / 200


def digest(data: Any) -> str:
    text = data if isinstance(data, str) else json.dumps(plain(data), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Output:
    """An output keeps what a loop does: `lines` of JSON, each with its iteration, `at`."""

    def __init__(self) -> None:
        self.lines, self.at = list[str](), 0
        self._last: dict[str, Any] = {}  # by kind, the last one
        self._notes = set[str]()
        self._folded: dict[str, list[Any]] = {}

    def __call__(self, what: str, found: Any) -> None:
        self.lines.append(json.dumps({"at": self.at, what: plain(found)}, sort_keys=True))

    def changed(self, what: str, found: Any) -> None:
        """Add a line where this is other than before."""
        if self._last.get(what) != (found := plain(found)):
            self._last[what] = found
            self(what, found)

    def written(self, file: Path, text: str) -> None:
        """Take a line of a log of decisions, or of the record of a run, which has those, too."""
        line = json.loads(text)
        line.pop("reports", None)  # are what goes in
        if file.name == LOG or line["kind"] == "run":
            self("logs" if file.name == LOG else "records", line)
        else:
            self._folded.setdefault("record", []).append(line)

    def note(self, text: str, about: str = "") -> None:
        """Add a note as Vote does: once."""
        if (about or text) not in self._notes:
            self._notes.add(about or text)
            self("notes", text)

    def publish(self, status: Mapping[str, Any]) -> None:
        """Add a line where more of a status than delays has changed."""
        self._folded.setdefault("statuses", []).append(status)
        shown = {key: status[key] for key in status if key not in ("iteration", "delays")}
        self.changed("shows", shown)

    def listen_to(self, vote: Any) -> None:
        """Add what a loop asks of a `vote`, which begins."""
        self._last, self._notes = {}, set()
        propose, settle = vote.propose, vote.settle

        def proposed(iteration: int, bundle: Bundle) -> Proposal | None:
            made: Proposal | None = propose(iteration, bundle)
            about = {"after": iteration, "kinds": bundle.names, "bundle": bundle.digest[:12]}
            self("proposes", {**about, "swap": None if made is None else made.swap})
            return made

        def settled(proposal: Proposal) -> None:
            self("settles", {"number": proposal.number, "committed": proposal.committed})
            settle(proposal)

        vote.propose, vote.settle = proposed, settled
        vote.note, vote.publish = self.note, self.publish
        vote.failed = lambda what, error: self("fails", f"{what}: {error!r}")

    def end(self, **known: Any) -> None:
        """Add what is `known` when a run is over."""
        self("ends", known | {what: digest(rows) for what, rows in self._folded.items()})


@contextmanager
def caught() -> Iterator[Output]:
    """Take what is logged meanwhile, which goes nowhere else."""
    out = Output()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log.LogFile, "write", lambda file, line: out.written(file._path, line))
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron_adaptra.") and hasattr(module, "log_line"):
                patch.setattr(module, "log_line", lambda text: out("says", text))
        patch.setattr(waits, "STORE", PATIENCE)
        patch.setattr(waits, "SEARCH", PATIENCE)
        yield out


class Alone(VotedRanks):
    """A group of ranks reports to a leader, with no messages between them.

    `refuses`: so many proposals are not committed. `met`: see StageReport.
    """

    refuses, met = 0, ""
    out: Output

    def __init__(
        self, ranks: int, new_ballot: Callable[[], Ballot], new_loop: Callable[[], Any],
        first: int = 0,
    ) -> None:  # fmt: skip
        store, self.loop = dist.HashStore(), self._made(new_loop)
        decisions = DecisionStore(KeyValueStore("", lambda: store))
        self.out.at = first
        leader = Leader(new_ballot(), {}, decisions, self.loop, first=first, prepare=self._agree)
        self.out.listen_to(leader)
        self.controllers = [leader] * ranks

    def _made(self, new_loop: Callable[[], Any]) -> Any:
        return new_loop()

    def _agree(self, proposal: Proposal) -> None:
        if self.refuses:
            self.refuses -= 1
            raise BadBundle("it is refused")

    def _begin(self, iteration: int) -> Bundle:
        self.out.at = iteration
        bundle = self.leader.begin(iteration)
        self.loop.drain(PATIENCE)
        self.out.changed("runs", bundle.digest[:12])
        return bundle

    def until_dealt_with(self, iteration: int) -> None:
        self.loop.drain(PATIENCE)
        self.out.changed("offers", getattr(self.loop.remedy, "offer", None))

    def close(self) -> None:
        self.leader.close()
        self.loop.log.close()


class Planned(Alone):
    """A job of workers runs plans, and reports what a subclass says that they measure.

    `before`: the run that this one resumes.
    """

    world: Any
    links: Links | None = None
    new_loop: Callable[[Schedule, DecisionLog[PlanDecision]], Any]
    measured: Callable[[int, Bundle], list[IterationRecord]]

    def __init__(self, out: Output, folder: Path, ranks: int, before: Any = None) -> None:
        self.out, self._folder = out, folder
        self._reported = list[IterationRecord]()
        self._next = 0 if before is None else before._next
        start: Schedule = self.world.start
        resumed = None if before is None else before.leader.ballot.schedule
        written = DecisionLog(PlanDecision, folder / LOG, RunRecord(folder / "record.jsonl"))
        links = None if before is None else before.leader.in_force.values.get(LINKS)
        super().__init__(
            ranks, lambda: starting_ballot(start, resumed, links=links or self.links),
            lambda: self.new_loop(start, written), self._next,
        )  # fmt: skip

    def train(self, iterations: int, silent: Sequence[int] = (), **truth: Any) -> None:
        """Train on; `truth` is different from now on, and reports of `silent` workers are lost."""
        self.world.train(0, **truth)
        for iteration in range(self._next, self._next + iterations):
            records = self.measured(iteration, self._begin(iteration))
            for worker, record in enumerate(records):
                record.met = self.met
                report = record.report(self._reported[worker] if self._reported else None)
                if worker not in silent:
                    self.loop.report(report)
            self._reported = records
            self.until_dealt_with(iteration)
        self._next += iterations

    def resumed(self) -> Planned:
        """Begin another run, from where this one has ended."""
        return type(self)(self.out, self._folder, before=self)

    def close(self) -> None:
        super().close()
        self.out.end(state=self.loop.remedy.state(), delays=digest(self.loop.remedy.delays))


class Pipeline(Planned):
    """A pipeline of four stages trains, over Megatron's own messages at first."""

    def __init__(self, out: Output, folder: Path, before: Pipeline | None = None) -> None:
        self.world = hand_fed.Job(hand_fed.Truth(1 * MS) if before is None else before.world.truth)
        self._estimator = self.world.remedy.estimator
        if before is not None:
            self._estimator.resume(before.loop.remedy.state())
        super().__init__(out, folder, hand_fed.STAGES, before)

    def new_loop(self, start: Schedule, written: DecisionLog[PlanDecision]) -> Any:
        ranks = workers(hand_fed.STAGES)
        return Loop(PipelineRemedy(start, self._estimator, RULE, written, ranks))

    def measured(self, iteration: int, bundle: Bundle) -> list[IterationRecord]:
        truth = replace(self.world.truth, pace=varied(iteration))
        return truth.records(bundle[SCHEDULE], iteration)


class Routes(Planned):
    """A job of two replicas with three stages each has one plan."""

    links = Links()

    def __init__(self, out: Output, folder: Path, before: Routes | None = None) -> None:
        self.world = replica_job.Job()
        rng = self.world.rng  # no logarithm, whose last digits are those of a machine's library
        rng.lognormvariate = lambda mu, sigma: rng.uniform(1 - sigma, 1 + sigma)
        if before is not None:
            self.world.truth = before.world.truth
            for estimator in self.world.estimator.estimators:
                estimator.resume(before.loop.remedy.state())
        super().__init__(out, folder, 6, before)

    def new_loop(self, start: Schedule, written: DecisionLog[PlanDecision]) -> Any:
        return Loop(RouteRemedy(start, self.world.estimator, RULE, written, workers(6)))

    def measured(self, iteration: int, bundle: Bundle) -> list[IterationRecord]:
        self.world.run(bundle[SCHEDULE], bundle[LINKS].pairs)
        records = self.world.records(iteration)
        records[3].end -= 10 * MS  # one replica takes less than the other
        return records


class Reductions(VotedGroup, Alone):
    """A group of four ranks begins with reduction `first`; `sharded`: see VotedGroup."""

    def __init__(self, out: Output, folder: Path, first: int = 0, sharded: bool = False) -> None:
        self.out, self._folder = out, folder
        super().__init__(4, folder / LOG, 0.03, sharded=sharded, first=first)
        self.ran = [self.leader.in_force[ALL_REDUCE].choice] * first

    def train(self, iterations: int, **given: Any) -> None:
        for iteration in range(len(self.ran), len(self.ran) + iterations):
            super().train(1, longer=varied(iteration), **given)

    def resumed(self) -> Reductions:
        return type(self)(self.out, self._folder, len(self.ran))

    def close(self) -> None:
        known = self.loop.remedy.known()
        super().close()
        self.out.end(known=None if known is None else digest(known.to_json()))


class Observed(Reductions):
    """A group of four ranks keeps its reductions as they are."""

    def _made(self, new_loop: Callable[[], Any]) -> Any:
        log = DecisionLog(ReductionDecision, self._folder / LOG)
        return Loop(ReductionRemedy(range(8, 12), 0.02, log, "with nccl"))


class Shares(VotedJob):
    """A job of four replicas votes on shares. `refuses`: so many votes get lost on their way.

    `offered`: other reductions are allowed, whose planner has an `offer`.
    """

    refuses, offer = 0, Offer(0, 1.0)

    def __init__(self, out: Output, folder: Path, first: int = 0, offered: bool = False) -> None:
        self.out, self._folder = out, folder
        offers = {COLLECTIVE: lambda: self.offer} if offered else None
        super().__init__(4, folder / LOG, first=first, offers=offers)
        out.listen_to(self.ranks[0]._vote)

    def _begin(self, iteration: int) -> SyncPlan:
        self.out.at = iteration
        if self.refuses and self._voted is not None:
            self.refuses, self._voted = self.refuses - 1, None
        plan = super()._begin(iteration)
        self.out.changed("runs", plan.text())
        return plan

    def train(self, iterations: int, step: float = STEP, **given: Any) -> None:
        for iteration in range(len(self.ran), len(self.ran) + iterations):
            super().train(1, step=step * varied(iteration), **given)

    def resumed(self) -> Shares:
        return type(self)(self.out, self._folder, self.first + len(self.ran))

    def close(self) -> None:
        super().close()
        self.out.end(seen=self.loop.seen)


SETTINGS = {"refuses", "met", "delay", "microbatches", "offer"}  # of a run, from a step on
RESUMES = "another run goes on"
Step = str | tuple[int, dict[str, Any]]  # for so many iterations, what is different

_LINK = {(1, 2): 60 * MS, (2, 1): 60 * MS}
_SLOW, _HEALED = (20, {"slow": _LINK}), (20, {"slow": {}})
_MET: Step = (10, {"met": "ops meet other ranks"})
_PIPELINE: dict[str, list[Step]] = {
    "proposed": [(20, {}), _SLOW, _HEALED],
    "refused": [(20, {}), (30, {"slow": _LINK, "refuses": 2}), (25, {"slow": {}, "refuses": 1})],
    "undone": [(20, {}), (30, {"slow": _LINK, "hidden": 30 * MS}), (45, {"hidden": 0.0}), _HEALED],
    "lost": [(20, {}), (15, {"slow": _LINK, "silent": [2]}), _SLOW, (10, {"silent": [0]}), _HEALED],
    "resumed": [(20, {}), _SLOW, RESUMES, (20, {}), _HEALED, RESUMES, (10, {})],
    "met": [(20, {}), _SLOW, _MET, _HEALED, _SLOW],
    "bytes": [(20, {"wire": 20 * MS}), (20, {"slow": _LINK, "wire": 90 * MS}), _HEALED],
}
_PATHS, _WELL = (25, {"paths": _LINK}), (20, {"paths": {}, "slow": {}})
_ROUTES: dict[str, list[Step]] = {
    "proposed": [(20, {}), _PATHS, _WELL, (30, {"slow": {4: 2.0}}), _WELL],
    "lost": [(20, {}), (15, {"paths": _LINK, "silent": [2]}), _PATHS, (10, {"silent": [0]}), _WELL],
    "resumed": [(20, {}), _PATHS, RESUMES, (20, {}), _WELL, RESUMES, (10, {})],
    "met": [(20, {}), _PATHS, _MET, _WELL, _PATHS],
    "declined": [(20, {}), (10, {"slow": {4: 1.2}}), (20, {"slow": {4: 2.0}})],
}
_LATE = {2: BUFFER}
_REDUCTIONS: dict[str, list[Step]] = {
    "proposed": [(12, {}), (20, {"late": _LATE}), (20, {"late": {1: BUFFER}}), (20, {})],
    "ports": [(12, {}), (20, {"rates": [RATE, RATE, RATE / 2, RATE]}), (20, {})],
    "refused": [(12, {}), (30, {"late": _LATE, "refuses": 2}), (20, {"refuses": 1})],
    "undone": [(12, {}), (20, {"late": _LATE, "factor": 2.0}), (60, {"late": _LATE}), (15, {})],
    "lost": [(12, {}), (10, {"late": _LATE, "silent": [3]}), (20, {"late": _LATE}), (15, {})],
    # Its native begins again: what was in force is not kept.
    "resumed": [(12, {}), (20, {"late": _LATE}), RESUMES, (25, {"late": _LATE}), (15, {})],
}
_SHARDED: list[Step] = [(20, {}), (20, {"delay": 50 * MS}), (20, {"late": _LATE})]
_THIRD = {3: 2.0}
_SHARES: dict[str, list[Step]] = {
    "proposed": [(12, {}), (20, {"slow": _THIRD}), (20, {"slow": {1: 2.0}}), (20, {})],
    "refused": [(12, {}), (30, {"slow": _THIRD, "refuses": 2}), (20, {"refuses": 1})],
    "undone": [(12, {}), (20, {"slow": _THIRD, "away": 0.5}), (70, {"slow": _THIRD}), (20, {})],
    "lost": [(12, {}), (15, {"slow": _THIRD, "unknown": True}), (20, {"slow": _THIRD}), (20, {})],
    # So do equal counts.
    "resumed": [(12, {}), (20, {"slow": _THIRD}), RESUMES, (25, {"slow": _THIRD}), (20, {})],
    "declined": [(12, {}), (20, {"slow": _THIRD, "step": 60 * STEP}), (30, {"slow": _THIRD})],
    "anew": [
        (12, {}), (20, {"slow": _THIRD}), (25, {"slow": _THIRD, "microbatches": 16}),
        (5, {"microbatches": 1}),
    ],
}  # fmt: skip
SCRIPTS: dict[str, tuple[Callable[[Output, Path], Any], list[Step]]] = {
    **{f"pipeline-{name}": (Pipeline, steps) for name, steps in _PIPELINE.items()},
    **{f"routes-{name}": (Routes, steps) for name, steps in _ROUTES.items()},
    **{f"reductions-{name}": (Reductions, steps) for name, steps in _REDUCTIONS.items()},
    "reductions-sharded": (partial(Reductions, sharded=True), _SHARDED),
    "reductions-observed": (
        Observed, [(12, {}), (9, {"late": _LATE}), (20, {"late": {1: BUFFER}}), (15, {})],
    ),
    **{f"shares-{name}": (Shares, steps) for name, steps in _SHARES.items()},
    "shares-offered": (
        partial(Shares, offered=True),
        [(12, {}), (40, {"slow": _THIRD, "offer": Offer(1, 0.5)}), (20, {})],
    ),
}  # fmt: skip


def output_of(name: str, folder: Path) -> list[str]:
    """Run a script, whose files go to an empty `folder`, and return its lines."""
    new, steps = SCRIPTS[name]
    with caught() as out:
        run = new(out, folder)
        try:
            for step in steps:
                if isinstance(step, str):
                    run.close()
                    run = run.resumed()
                    continue
                iterations, given = step
                for setting in SETTINGS & given.keys():
                    setattr(run, setting, given[setting])
                run.train(iterations, **{k: v for k, v in given.items() if k not in SETTINGS})
        finally:
            run.close()
    return out.lines
