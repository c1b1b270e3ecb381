"""Shares of microbatches where no cheaper remedy is enough (`auto`), by real votes.

What ranks measure is simulated (voted_job.py), and so is what the planners of others offer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from adapt.voted_job import STEP, VotedJob
from run_records import read_log

from megatron_adaptra.adapt.loop import Offer
from megatron_adaptra.adapt.shares.ladder import PATIENCE, RECENT, Offered, known_remedies
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.plan.ladder import COLLECTIVE, ORDER, ROUTES
from megatron_adaptra.plan.shares.counts import SharePlan, Speed, share_by_speed

SOON = 10  # iterations in which a slow replica is found
FULL, SHARED = (8, 8, 8, 8), (9, 9, 9, 5)


class Planner:
    """Of a cheaper remedy: answers what it is set to."""

    def __init__(self) -> None:
        self.offer: Offer | None = None
        self.asked = 0

    def __call__(self) -> Offer | None:
        self.asked += 1
        return self.offer

    def answers(self, leaves: float) -> None:
        self.offer = Offer(0 if self.offer is None else self.offer.number + 1, leaves)


def log_of(folder: Path) -> Path:
    return folder / "decisions.jsonl"


def test_while_acting_is_off_what_routes_would_leave_counts_and_not_what_is_measured(
    tmp_path: Path,
) -> None:
    routes = Planner()
    job = VotedJob(4, log_of(tmp_path), offers={ROUTES: routes})
    job.loop._acts = lambda: False
    job.train(12)
    job.train(4, {3: 2.0})
    routes.answers(0.62)
    assert set(job.train(2 * PATIENCE, {3: 2.0})) == {FULL}
    job.close()
    assert read_log(log_of(tmp_path)) == []


def test_routes_that_are_enough_leave_counts_as_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They come into force some iterations later, and then no replica is slow any more."""
    routes = Planner()
    job = VotedJob(4, log_of(tmp_path), offers={ROUTES: routes})
    job.train(12)
    job.train(4, {3: 2.0})
    routes.answers(0.62)
    assert set(job.train(SOON, {3: 2.0})) == {FULL}
    assert set(job.train(2 * PATIENCE)) == {FULL}
    job.close()
    assert read_log(log_of(tmp_path)) == []
    text = capfd.readouterr().err
    assert text.count("counts stay") == 1
    assert (
        "replica 3 takes 2.0 times as long as the others: routes: an iteration is expected" in text
    )


@pytest.mark.parametrize("leaves", [1.0, 0.9])
def test_routes_that_leave_too_much_are_named_and_counts_change_at_once(
    leaves: float, tmp_path: Path
) -> None:
    routes = Planner()
    job = VotedJob(4, log_of(tmp_path), offers={ROUTES: routes})
    job.train(12)
    job.train(4, {3: 2.0})
    routes.answers(leaves)
    assert job.train(SOON, {3: 2.0})[-1] == SHARED
    job.close()
    (decision,) = read_log(log_of(tmp_path))
    assert decision["cheaper"][2]["remedy"] == ROUTES
    assert decision["cheaper"][2]["leaves_ms"] == pytest.approx(leaves * 1650)


def test_a_remedy_that_was_to_be_enough_and_did_nothing_is_not_waited_for_for_good(
    tmp_path: Path,
) -> None:
    """Whatever it offers; nor one whose planner never answers."""
    for number, answer in enumerate((0.6, None)):
        (folder := tmp_path / str(number)).mkdir()
        routes = Planner()
        job = VotedJob(4, log_of(folder), offers={ROUTES: routes})
        job.train(12)
        job.train(4, {3: 2.0})
        if answer is not None:
            routes.answers(answer)
        ran = job.train(PATIENCE + SOON, {3: 2.0})
        job.close()
        assert ran[-1] == SHARED
        assert PATIENCE - SOON <= ran.index(SHARED) <= PATIENCE + SOON
        (decision,) = read_log(log_of(folder))
        assert "measured" in decision["cheaper"][2]["why"]


def test_an_answer_to_an_earlier_change_is_none_to_this_one(tmp_path: Path) -> None:
    routes = Planner()
    routes.answers(1.0)
    job = VotedJob(4, log_of(tmp_path), offers={ROUTES: routes})
    job.train(3 * RECENT)
    assert set(job.train(SOON, {3: 2.0})) == {FULL}, "it waits for another one"
    routes.answers(1.0)
    assert job.train(SOON, {3: 2.0})[-1] == SHARED
    job.close()


def test_one_that_never_can_is_not_waited_for(tmp_path: Path) -> None:
    job = VotedJob(4, log_of(tmp_path), offers={ROUTES: lambda: Offer(0, 1.0, standing=True)})
    job.train(3 * RECENT)
    assert job.train(SOON, {3: 2.0})[-1] == SHARED
    job.close()


def test_a_collective_that_can_hide_no_more_than_it_takes_is_not_waited_for(
    tmp_path: Path,
) -> None:
    """50 ms of an iteration come after the last replica: the slow one is 800 ms late."""
    job = VotedJob(4, log_of(tmp_path), offers={COLLECTIVE: Planner()})
    job.train(12)
    assert job.train(SOON + 1, {3: 2.0})[-1] == SHARED
    job.close()
    (decision,) = read_log(log_of(tmp_path))
    bound = decision["cheaper"][1]
    assert (bound["remedy"], bound["why"][:7]) == (COLLECTIVE, "no less")
    assert bound["leaves_ms"] == pytest.approx(1650 - 1e3 * STEP / 3)


def test_what_a_collective_hides_while_one_is_late_does_not_count_for_shares(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """1.5 s of a reduction, of which 0.4 are hidden while replica 3 is 0.4 s late."""
    job = VotedJob(4, log_of(tmp_path), offers={COLLECTIVE: Planner()}, min_gain=0.1)
    job.train(12, step=1.5)
    assert set(job.train(PATIENCE + 2 * SOON, {3: 1.5}, step=1.1)) == {FULL}
    job.close()
    assert "no remedy makes it less; counts stay" in capfd.readouterr().err


def test_a_planner_that_fails_is_one_that_never_answers(tmp_path: Path) -> None:
    def fails() -> Offer | None:
        raise RuntimeError("gone")

    job = VotedJob(4, log_of(tmp_path), offers={ROUTES: fails})
    assert set(job.train(12)) == {FULL}
    assert set(job.train(SOON, {3: 2.0})) == {FULL}
    assert job.train(PATIENCE, {3: 2.0})[-1] == SHARED
    job.close()


def names(share: SharePlan, offered: Offered, measured: bool = False) -> list[tuple[str, bool]]:
    known, uncertain = known_remedies(share, share.predicted, offered, measured)
    assert uncertain <= {one.name for one in known}
    return [(one.name, one.name not in uncertain) for one in known]


def test_what_is_known_of_each_rung() -> None:
    share = share_by_speed([Speed(0.1)] * 3 + [Speed(0.2)], 8, 0.3)
    planner = Planner()
    offered = Offered({COLLECTIVE: planner, ROUTES: planner})
    assert names(share, offered)[1:3] == [(COLLECTIVE, False), (ROUTES, False)]
    bounds, _ = known_remedies(share, share.predicted, offered, False)
    assert bounds[1].leaves == pytest.approx(share.full - 0.3 * 2 / 6)
    assert bounds[2].leaves == pytest.approx(share.bound)
    planner.answers(2.0)  # no remedy leaves more than there is
    assert known_remedies(share, 1.0, offered, False)[0][2].leaves == share.full
    assert all(certain for _, certain in names(share, offered, measured=True))
    assert SyncPlan.full_of(4, 8) != share.sync
    without, _ = known_remedies(share, 1.0, Offered({}), False)
    assert [one.leaves for one in without] == [share.full, None, None, 1.0]
    assert without[0].name == ORDER
