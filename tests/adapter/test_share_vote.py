"""What ranks learn of each other by their vote on shares, by real processes."""

from __future__ import annotations

import pytest
from patience import PATIENCE
from transport.ranks import RankFixture, run

from megatron_adaptra.ir.sync import SyncPlan

REPLICAS = (0, 0, 1, 1)  # of each rank
PLAN = SyncPlan.full_of(2, 4).text()
# By iteration, the seconds that each rank has measured, and what all learn.
MEASURED = [
    ((0.25, 0.125, 0.5, 0.75), (0.25, 0.75)),
    ((0.25, None, 0.5, 0.75), None),
    ((0.0, 1e-9, 4e5, 0.0), (1e-9, 4e5)),
    ((-0.25, 0.125, 0.5, 0.75), None),
    ((0.25, 0.125, float("nan"), 0.75), None),
    ((0.25, 0.125, 0.5, float("inf")), None),
]


def votes(me: RankFixture) -> list[tuple[int, tuple[float, ...] | None]]:
    from megatron_adaptra.adapter.sync.share_vote import DIFFERENT, ENDED, FAILED, READY, ShareVote

    vote = ShareVote(2, PATIENCE)
    found = []
    for seconds, _ in MEASURED:
        vote.start(READY, PLAN, REPLICAS[me.rank], seconds[me.rank])
        found.append(tuple(vote.result()))
    words = [(ENDED, PLAN), (FAILED, PLAN), (READY, "another"), (FAILED, "another")]
    for word, plan in words:
        word, plan = (word, plan) if me.rank == 2 else (READY, PLAN)
        vote.start(word, plan, REPLICAS[me.rank], 0.5)
        found.append(tuple(vote.result()))
    me.meet()
    vote.close()
    assert [word for word, _ in found[-4:]] == [ENDED, FAILED, DIFFERENT, FAILED]
    return found


def test_all_ranks_learn_the_seconds_of_each_replica_or_that_a_rank_does_not_know_them() -> None:
    """A replica takes as long as the last of its ranks; what is nonsense is not known."""
    rows = run("gloo", votes, ranks=len(REPLICAS))
    assert all(row == rows[0] for row in rows)
    for (word, seconds), (_, wanted) in zip(rows[0], MEASURED, strict=False):
        assert word == 0
        assert seconds == (wanted and pytest.approx(wanted))
    assert [seconds for _, seconds in rows[0][-4:]] == [(0.5, 0.5)] * 4, "whatever the words"
