"""One plan for several replicas by real votes: leader and members, over the loopback transport.

What workers measure is simulated (replica_job.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from adapt.replaying import replayed
from adapt.replica_job import MS, Job
from adapt.voted_ranks import VotedRanks
from run_records import read_record

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.record import RunRecord
from megatron_adaptra.adapt.routes.remedy import RouteRemedy
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.agree.agreement import Proposal, starting_ballot
from megatron_adaptra.agree.bundle import LINKS, SCHEDULE, Bundle, Links
from megatron_adaptra.diagnose.finding import Worker
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.replica_estimate import ReplicaEstimator
from megatron_adaptra.plan import server

SCHEMA = Path(__file__).parents[3] / "docs" / "decision-log.schema.json"
Prepare = Callable[[int, Proposal], None]


class Training(VotedRanks):
    """All workers of two replicas of three stages.

    `ran`: by iteration the bundle that all of them ran. `prepared`: by worker, the proposals that
    it was asked to prepare for.
    """

    def __init__(self, path: Path, mode: str, prepare: Prepare = lambda worker, one: None) -> None:
        self.job, self.ran = Job(2, 3, 8, mode), list[Bundle]()
        self.prepared: dict[int, list[Proposal]] = {worker: [] for worker in range(6)}

        def prepares(worker: int, proposal: Proposal) -> None:
            self.prepared[worker].append(proposal)
            prepare(worker, proposal)

        def new_loop() -> Loop[RouteRemedy]:
            log = DecisionLog(PlanDecision, path, RunRecord(path.with_name("replica-0.jsonl")))
            workers = [Worker(10 + worker, f"host{worker}") for worker in range(6)]
            rule = ReplanPolicy(sends="eager")
            remedy = RouteRemedy(self.job.start, self.job.estimator, rule, log, workers, mode)
            return Loop(remedy, announce=None)

        super().__init__(
            6, lambda: starting_ballot(self.job.start, links=Links()), new_loop, prepare=prepares
        )
        self.job.remedy = self.loop.remedy

    def train(self, iterations: int, **truth: object) -> list[Schedule]:
        """The schedules that ran; `truth`: what is different from now on."""
        self.job.train(0, **truth)
        for iteration in range(len(self.ran), len(self.ran) + iterations):
            self.ran.append(bundle := self._begin(iteration))
            self.job.run(bundle[SCHEDULE], bundle[LINKS].pairs)
            records = self.job.records(iteration)
            for controller, record in zip(self.controllers, records, strict=True):
                controller.report(record)
            self.until_dealt_with(iteration)
        return [bundle[SCHEDULE] for bundle in self.ran[-iterations:]]

    def close(self) -> None:
        super().close()
        self.loop.log.close()


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_a_slow_path_is_left_and_taken_again(mode: str, tmp_path: Path) -> None:
    """Its links are opened and probed first; then the partners swap; at the end they are back."""
    training = Training(tmp_path / "decisions.jsonl", mode)
    start = training.job.start
    assert all(one.same_as(start) for one in training.train(12))
    slow = training.train(25, paths={(1, 2): 60 * MS, (2, 1): 60 * MS})
    assert slow[-1].routes.cross_paths(8), "microbatches cross"
    healthy = training.job.took[5]
    assert training.job.took[-1] <= 1.1 * healthy
    first = next(i for i, bundle in enumerate(training.ran) if bundle[SCHEDULE] is not start)
    opened = next(i for i, bundle in enumerate(training.ran) if bundle[LINKS].pairs)
    assert opened + 3 <= first, "links are measured before a plan relies on them"
    used = {(min(p), max(p)) for p in slow[-1].routes.cross_paths(8)}
    assert used <= training.ran[opened][LINKS].pairs
    healed = training.train(25, paths={})
    assert healed[-1].same_as(start)
    training.close()
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    for line in lines:
        validator.validate(line)
    first_line = lines[0]
    assert {link["source"]["worker"] for link in first_line["links"]} == {"0.1", "0.2"}
    assert first_line["links"][0]["source"]["host"] in ("host1", "host2")
    # All were asked for links, and for each plan.
    assert len({len(mine) for mine in training.prepared.values()}) == 1


def test_a_replay_of_the_record_comes_to_the_same_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path / "decisions.jsonl", mode := "auto")
    training.train(12)
    training.train(25, paths={(1, 2): 60 * MS, (2, 1): 60 * MS})
    training.train(25, paths={})
    training.close()
    (run,) = read_record(tmp_path / "replica-0.jsonl")
    assert list(run.iterations) == list(range(62))
    assert run.about["mode"] == mode
    for row in run.iterations.values():
        assert [one.worker for one in row.reports] == list(range(6))
    assert run.seconds()[30] == pytest.approx(training.job.took[30], rel=1e-3)
    start = Schedule.from_json(run.about["start"])
    estimator = ReplicaEstimator.from_settings(run.about["estimators"])
    rule = ReplanPolicy(**run.about["rule"])
    log, mode = DecisionLog(PlanDecision, None), run.about["mode"]
    remedy = RouteRemedy(start, estimator, rule, log, (), mode)
    monkeypatch.setattr(remedy, "_search", server.search)
    plans = replayed(run, remedy)
    assert plans == [(d["detected"], d["plan"]) for d in run.decisions]
    assert len(plans) == 2
