"""How many microbatches replicas run, with what goes round between their ranks.

What ranks measure is simulated (voted_job.py).
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from adapt.voted_job import MICROBATCH, STEP, VotedJob
from run_records import read_log
from seeding import new_seed

from megatron_adaptra.adapt.counts_vote import SYNC
from megatron_adaptra.adapt.shares.ladder import cheaper_remedies
from megatron_adaptra.adapt.trial import FIRST_BLOCK
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.base.errors import BadBundle, BadInput
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.measure.host_use import HostUse
from megatron_adaptra.plan.shares.counts import Speed

SOON = 10  # iterations in which a slow replica is found, and one that is fast again
FULL = (8, 8, 8, 8)
FIRST = 1_000_000  # iteration of a run that does not begin with the first one
SCHEMA = Path(__file__).parents[3] / "docs" / "decision-log.schema.json"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def changes(ran: list[tuple[int, ...]]) -> int:
    return sum(a != b for a, b in pairwise(ran))


def test_a_slow_replica_gets_fewer_moves_and_is_fast_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "decisions.jsonl"
    job = VotedJob(4, log, first=FIRST)
    assert set(job.train(12)) == {FULL}
    ran = job.train(SOON + 1, {3: 2.0})
    assert ran[-1] == (9, 9, 9, 5)
    assert changes(ran) == 1
    assert job.took[-1] <= 0.66 * job.took[12]
    moved = job.train(SOON + 1, {1: 2.0})
    assert moved[-1] == (9, 5, 9, 9)
    healed = job.train(SOON + 1)
    assert healed[-1] == FULL
    job.close()
    found = lines(log)
    schema = json.loads(SCHEMA.read_text())
    for line in found:
        jsonschema.validate(line, schema)
    first, *_, last = read_log(log)
    assert (first["before"], first["after"], first["slow"]) == ([8] * 4, [9, 9, 9, 5], [3])
    assert first["predicted_ms"] == pytest.approx(1e3 * (10 * MICROBATCH + STEP))
    assert first["full_ms"] == pytest.approx(1e3 * (16 * MICROBATCH + STEP))
    assert first["measured_ms"] == pytest.approx(first["predicted_ms"])
    assert [one["remedy"] for one in first["cheaper"]] == [
        "another order in the pipeline", "shares of a collective", "routes",
    ]  # fmt: skip
    assert first["cheaper"][1]["leaves_ms"] == pytest.approx(1e3 * 16 * MICROBATCH)
    assert last["after"] == [8] * 4
    text = capfd.readouterr().err
    assert "replica 3 runs 5 microbatches, replicas 0, 1 and 2 run 9" in text
    assert "with 8 each 1650; shares of a collective would leave 1600" in text
    assert "each replica runs its own 8 microbatches" in text
    rows = [one for one in lines(tmp_path / "sync.jsonl") if one["kind"] == "iteration"]
    assert rows[-1]["microbatches"] == list(FULL)
    assert [row["iteration"] for row in rows] == list(range(FIRST, FIRST + len(job.ran)))
    assert rows[15]["took"] == pytest.approx(job.took[15])


def test_a_decision_has_what_the_slow_replica_waits_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = VotedJob(4, tmp_path / "decisions.jsonl")
    job.train(12)
    uses = {3: HostUse(0.4, 0.6, 0.0, 0.0, 1.3, 2), 1: HostUse(0.2, 0.6, 0.0, 0.0, 1.1, 2)}
    job.train(SOON + 1, {3: 2.0}, uses=uses)
    job.close()
    text = capfd.readouterr().err
    waits = "processes that are not of this job use 1.3 of 2 cores"
    assert (
        f"times as long as the others; replica 3: it waits for a core for 40% of the time: {waits}"
        in text
    )
    assert "replica 1: it waits" not in text


def test_of_a_replica_the_rank_counts_that_waits_most() -> None:
    """Of the numbers that go round with a vote the largest one counts."""
    most, less = HostUse(0.5, 0.4, 0.0, 0.1, 1.3, 2), HostUse(0.49, 2.0, 300.0, 20.0, 9999.0, 384)
    assert most.packed() > less.packed() > 0
    assert HostUse(1.0, 9e9, 9e9, 9e9, 9e9, 9999).packed() < 2**63
    assert HostUse.unpacked(most.packed()) == most._replace(own=0.0)
    assert HostUse.unpacked(less.packed()) == less._replace(own=0.0, others=819.1)
    assert HostUse.unpacked(most.packed()).in_words() == most.in_words()


def test_without_a_material_gain_all_run_as_many(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = VotedJob(4, tmp_path / "decisions.jsonl", min_gain=0.5)
    assert set(job.train(30, {3: 2.0})) == {FULL}
    job.close()
    assert lines(tmp_path / "decisions.jsonl") == []
    assert capfd.readouterr().err.count("less than --adaptra-min-gain 50%; counts stay") == 1


def test_one_microbatch_each_cannot_be_shared_which_is_noted_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = VotedJob(4, tmp_path / "decisions.jsonl", microbatches=1)
    assert set(job.train(20, {3: 2.0})) == {(1, 1, 1, 1)}
    job.close()
    assert capfd.readouterr().err.count("cannot help") == 1


@pytest.mark.parametrize("every", [1, 7, 20])
def test_a_straggler_that_rotates_changes_counts_once_per_change(
    every: int, tmp_path: Path
) -> None:
    job = VotedJob(4, tmp_path / "decisions.jsonl")
    job.train(8)
    turns = 60 // every
    for turn in range(turns):
        job.train(every, {turn % 4: 2.0})
    job.close()
    assert changes(job.ran) <= turns
    if every == 1:
        assert changes(job.ran) == 0


def test_counts_that_are_slower_than_before_go_back_and_wait(tmp_path: Path) -> None:
    job = VotedJob(4, tmp_path / "decisions.jsonl")
    job.train(8)
    ran = job.train(2 * SOON, {3: 2.0}, away=0.5)
    assert (9, 9, 9, 5) in ran
    assert ran[-1] == FULL
    # Another one is slow: nothing is tried for a while, ...
    assert set(job.train(FIRST_BLOCK - SOON, {2: 2.0}, away=0.5)) == {FULL}
    assert job.train(2 * SOON, {2: 2.0})[-1] == (9, 9, 5, 9)  # ... and then it is
    job.close()
    reasons = [one["why"] for one in read_log(tmp_path / "decisions.jsonl")]
    assert ["iterations take" in why for why in reasons] == [False, True, False]


EIGHT = (9, 9, 8, 6, 8, 8, 8, 8)  # of eight replicas, one of which takes 1.4 times as long


def held_up(job: VotedJob, iterations: int, what: str, factor: float) -> list[tuple[int, ...]]:
    """Iterations in which all replicas compute for longer, or only wait for longer afterwards."""
    slow = {3: 1.4}
    if what == "step":
        return job.train(iterations, slow, step=STEP + (factor - 1) * 10 * MICROBATCH)
    return job.train(iterations, {r: factor * slow.get(r, 1.0) for r in range(8)})


def test_in_a_long_run_in_which_all_are_slow_from_time_to_time_no_counts_are_off_for_good(
    tmp_path: Path,
) -> None:
    """Also just after they have come into force."""
    rng = random.Random(new_seed())
    job = VotedJob(8, tmp_path / "decisions.jsonl")
    job.train(20)
    ran = job.train(rng.randint(8, 12), {3: 1.4})
    while len(ran) < 1500:
        longer, what = rng.choice([6, 20, 60]), rng.choice(["all", "step"])
        ran += held_up(job, longer, what, rng.uniform(1.1, 2.0))
        ran += job.train(rng.choice([10, 40, 100]), {3: 1.4})
    ran += job.train(2 * FIRST_BLOCK, {3: 1.4})
    job.close()
    assert ran[-1] == EIGHT
    assert sum(one == EIGHT for one in ran) >= 0.8 * len(ran)


def test_what_cheaper_remedies_would_leave() -> None:
    speeds = [Speed(0.1, 0.3), Speed(0.2, 0.6)]  # pipelines of 4 stages
    pipeline, collective, routes = cheaper_remedies(speeds, 8, 0.05, 4)
    assert pipeline.leaves == pytest.approx(8 * 0.2 + 0.05)  # no fill and no drain
    assert collective.leaves == pytest.approx(8 * 0.2 + 0.6)  # no reduction and no step
    assert routes.leaves is None
    alone, collective, routes = cheaper_remedies([Speed(0.1), Speed(0.2)], 8, 0.05, 1)
    assert alone.to_json() == {
        "remedy": "another order in the pipeline", "leaves_ms": pytest.approx(1650),
        "why": "one stage never waits for another",
    }  # fmt: skip
    assert routes.why == "it needs at least 2 stages"


@pytest.mark.parametrize("data", [None, 5, {}, "sync", "sync 8: 9 9", ["sync 8: 8 8"]])
def test_what_is_no_value_is_refused(data: object) -> None:
    with pytest.raises(BadInput):
        SYNC.read(data)


def test_a_value_travels_whole_and_only_for_as_many_replicas() -> None:
    value = SyncPlan(8, (9, 9, 9, 5))
    now = Bundle({SYNC: SyncPlan.full_of(4, 8)})
    read = now.read(Bundle({SYNC: value}).text)[SYNC]
    assert read == value
    with pytest.raises(BadBundle, match="it is for 3 replicas; here are 4"):
        now.read(Bundle({SYNC: SyncPlan(8, (9, 9, 6))}).text)
