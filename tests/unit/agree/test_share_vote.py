"""What ranks learn of each other by their vote on shares, by real processes."""

from __future__ import annotations

from typing import Any

import pytest
from patience import PATIENCE
from transport.ranks import RankFixture, run

from megatron_adaptra.agree.share_vote import (
    DIFFERENT,
    ENDED,
    FAILED,
    READY,
    Given,
    ShareVote,
    Voted,
)
from megatron_adaptra.ir.sync import SyncPlan
from megatron_adaptra.measure.host_use import HostUse

REPLICAS = (0, 0, 1, 1)  # of each rank
PLAN = SyncPlan.full_of(2, 4).text()
MOST, LESS = (HostUse(queued, 0.0, 0.5, 0.0, 1.0, 2) for queued in (0.5, 0.2))
# By iteration, the seconds that each rank has measured, and what all learn.
MEASURED: list[tuple[tuple[Any, ...], Any]] = [
    ((0.25, 0.125, 0.5, 0.75), (0.25, 0.75)),
    ((0.25, None, 0.5, 0.75), None),
    ((0.0, 1e-9, 4e5, 0.0), (1e-9, 4e5)),
    ((-0.25, 0.125, 0.5, 0.75), None),
    ((0.25, 0.125, float("nan"), 0.75), None),
    ((0.25, 0.125, 0.5, float("inf")), None),
    ((0.25, 0.125, "0.5", 0.75), None),
]
# By iteration, the word and the plan of one rank, and the word that all learn.
WORDS = [
    (ENDED, PLAN, ENDED),
    (FAILED, PLAN, FAILED),
    (READY, "another", DIFFERENT),
    (FAILED, "another", FAILED),
    (READY, PLAN, READY),
]


def votes(me: RankFixture, given: list[tuple[int, str, Given]]) -> list[Voted]:
    """What this rank learns where it gives that, one after the other."""
    vote = ShareVote(2, PATIENCE)
    found = []
    for word, plan, one in given:
        vote.start(word, plan, REPLICAS[me.rank], one)
        found.append(vote.result())
    me.meet()
    vote.close()
    return found


def learned(*given: list[tuple[int, str, Given]]) -> list[Voted]:
    """What all ranks learn alike of what is `given`, by rank and iteration."""

    rows = run("gloo", _of_rank, list(given), ranks=len(REPLICAS))
    assert all(row == rows[0] for row in rows)
    return rows[0]


def _of_rank(me: RankFixture, given: list[Any]) -> list[Voted]:
    return votes(me, given[me.rank])


def test_all_ranks_learn_the_seconds_of_each_replica_or_that_a_rank_does_not_know_them() -> None:
    """A replica takes as long as the last of its ranks; what is nonsense is not known."""
    given = [[(READY, PLAN, Given(row[rank])) for row, _ in MEASURED] for rank in range(4)]
    for voted, (_, wanted) in zip(learned(*given), MEASURED, strict=True):
        assert voted[0] == READY
        assert voted.seconds == (wanted and pytest.approx(wanted))
        assert voted[2:] == ((None, None), None)


def test_a_word_of_one_rank_is_that_of_all() -> None:
    well = [(READY, PLAN, Given(0.5))] * len(WORDS)
    other = [(word, plan, Given(0.5)) for word, plan, _ in WORDS]
    for voted, (_, _, wanted) in zip(learned(well, well, other, well), WORDS, strict=True):
        assert voted.word == wanted
        assert voted.seconds == (0.5, 0.5)


@pytest.mark.parametrize("counts", ["planted", -1, (4,), (0, 8), (-4, 12), (4.0, 4.0), (True, 7)])
def test_what_are_no_counts_is_not_proposed(counts: Any) -> None:
    given: list[Any] = [[(READY, PLAN, Given(0.5, counts, counts))]]
    well: list[Any] = [[(READY, PLAN, Given(0.5))]] * 3
    assert learned(*given, *well) == [Voted(READY, (0.5, 0.5), (None, None), None)]


def test_of_a_replica_the_rank_that_waits_most_counts_and_the_first_one_proposes() -> None:
    uses = [LESS, MOST, LESS, None]
    given = [[(READY, PLAN, Given(0.5, use))] for use in uses]
    (_, plan, first), *_ = given[0]
    given[0].append((READY, plan, first._replace(counts=(1, 7))))
    for row in given[1:]:
        row.append((READY, PLAN, Given()))
    without, proposed = learned(*given)
    assert without[2:] == ((MOST, LESS), None)
    assert proposed == Voted(READY, None, (LESS, None), (1, 7))
