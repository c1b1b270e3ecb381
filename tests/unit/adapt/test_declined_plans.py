"""A plan that gained too little by a few samples is looked at again once there are more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapt import hand_fed, replica_job
from adapt.golden_runs import Pipeline, caught
from seeding import new_seed

from megatron_adaptra.adapt.schedules.remedy import AGAIN, LEARN

MS = 1e-3
Job = hand_fed.Job | replica_job.Job
HALF_SPEED = {4: 2.0}  # worker 1.1 of 2 x 3


@pytest.fixture(params=["a slow link of a pipeline", "a slow worker of replicas"])
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Job, Any]:
    """A job, and what is slow in it; no other worker ever takes longer."""
    if "link" in request.param:
        return hand_fed.Job(hand_fed.Truth(1 * MS)), dict.fromkeys([(1, 2), (2, 1)], 40 * MS)
    monkeypatch.setattr(replica_job, "BURSTS", 0.0)
    return replica_job.Job(seed=new_seed()), HALF_SPEED


def declined(job: Job, slow: Any, healed: bool = False) -> list[int]:
    """No plan gains enough by the first samples; the iterations of all searches for one.

    `healed`: nothing is slow any more.
    """
    searches, choose = list[int](), job.remedy._choose

    def counted(conditions: Any) -> Any:
        searches.append(len(job.ran))
        return choose(conditions)

    job.remedy._choose = counted  # type: ignore[method-assign]
    job.train(20)
    enough, job.remedy.rule = job.remedy.rule, replace(job.remedy.rule, min_gain=0.9)
    before = len(searches)
    for _ in range(20):
        if len(searches) == before:
            job.train(1, slow=slow)
    assert len(searches) > before
    assert job.changes == {}, job.reasons
    if healed:
        job.train(12, slow={})
    job.remedy.rule = enough
    return searches


def test_what_was_declined_is_looked_at_again(made: tuple[Job, Any]) -> None:
    job, slow = made
    searches = declined(job, slow)
    first = searches[-1]
    job.train(2 * LEARN)
    (change,) = job.changes.values()
    assert change.why.startswith(("link 1->2 takes", "worker 1.1 takes ")), job.reasons
    assert searches[-1] - first <= LEARN + 1


def test_what_really_gains_too_little_is_looked_at_for_a_while(made: tuple[Job, Any]) -> None:
    job, slow = made
    searches = declined(job, slow)
    job.remedy.rule = replace(job.remedy.rule, min_gain=0.9)
    before = len(searches)
    job.train(3 * AGAIN)
    assert job.changes == {}
    assert 2 <= len(searches) - before <= AGAIN // LEARN


def test_what_has_healed_is_looked_at_no_more(made: tuple[Job, Any]) -> None:
    job, slow = made
    searches = declined(job, slow, healed=True)
    before = len(searches)
    job.train(2 * AGAIN)
    assert job.changes == {}, job.reasons
    assert len(searches) == before


def test_a_link_that_flaps_gets_one_line(tmp_path: Path) -> None:
    with caught() as out:
        made = Pipeline(out, tmp_path)
        made.loop.remedy.rule = replace(made.loop.remedy.rule, min_gain=0.9)
        for seconds in (0.0, 40 * MS, 0.0, 60 * MS, 0.0, 80 * MS):
            made.train(20, slow={(1, 2): seconds} if seconds else {})
        made.close()
    notes = [line for line in out.lines if "the plan in force stays" in line]
    assert len(notes) == 1, notes
