"""Ranks that come late to the reductions of their group: found soon, and closed."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from diagnose.kept import Kept, places
from measure.late_ranks import messages
from seeding import new_seed

from megatron_adaptra.diagnose.finding import LATE
from megatron_adaptra.diagnose.late import AGREE, LateDiagnosis
from megatron_adaptra.measure.late_ranks import LateRanks

RANKS, PERIOD, BUFFER = 4, 0.4, 0.02  # seconds of an iteration, and of gradients through a port
LATER = 0.16


class Group:
    """The second stages of four replicas."""

    def __init__(self, noise: float = 0.004) -> None:
        self.kept, self.rng = Kept(), random.Random(new_seed())
        at = [stages[1] for stages in places(RANKS, 2)]
        self.diagnosis = LateDiagnosis(at, "ranks 1, 3, ... 7", self.kept.book())
        self._late, self._noise, self.iteration = LateRanks(RANKS), noise, 0

    def train(
        self, iterations: int, late: Mapping[int, float] | None = None,
        queued: Mapping[int, float] | None = None,
    ) -> None:  # fmt: skip
        for _ in range(iterations):
            seen = messages(RANKS, late or {}, rng=self.rng, noise=self._noise)
            self._late.update(seen, BUFFER)
            longer = max((late or {}).values(), default=0.0)
            self.diagnosis.update(self.iteration, self._late, PERIOD + longer, queued or {})
            self.iteration += 1


def test_a_late_rank_is_found_in_time_and_closed() -> None:
    group = Group()
    group.train(20)
    group.train(12, {2: LATER})
    group.train(12)
    assert group.kept.brief() == [
        ("opened", LATE, [5], 20, None), ("closed", LATE, [5], 20, 32),
    ]  # fmt: skip
    assert group.kept.events[0]["found"] <= 20 + AGREE
    assert group.kept.events[0]["takes"] == pytest.approx(1e3 * LATER, rel=0.1)
    assert group.kept.lines[0].startswith("late rank: rank 5 on host2 (2.1), since iteration 21: ")
    assert (
        "ms late to the reduction of gradients of ranks 1, 3, ... 7; an iter" in group.kept.lines[0]
    )
    assert "comes in time to the reduction of gradients of ranks 1" in group.kept.lines[1]


def test_waits_for_a_core_are_the_hosts_and_no_ranks() -> None:
    group = Group()
    group.train(20)
    group.train(20, {2: LATER}, dict.fromkeys(range(RANKS), 0.01) | {2: LATER})
    assert group.kept.lines == []


def test_one_that_is_late_from_the_start_costs_a_share_of_an_iteration() -> None:
    group = Group()
    group.train(12, {2: LATER})
    (opened,) = group.kept.lines
    assert f"; {LATER / (PERIOD + LATER):.0%} of an iteration; " in opened.replace("28%", "29%")


def test_what_is_little_of_an_iteration_and_what_moves_is_none() -> None:
    group = Group()
    group.train(20)
    group.train(20, {2: 0.1 * PERIOD})
    for iteration in range(40):
        group.train(1, {iteration % RANKS: LATER})
    assert group.kept.events == []


def test_nothing_is_found_while_ranks_come_as_chance_has_it() -> None:
    for _ in range(40):
        group = Group(noise=0.1 * PERIOD)
        group.train(60)
        assert group.kept.events == []


def test_an_error_ends_the_search_alone(capfd: pytest.CaptureFixture[str]) -> None:
    group = Group()
    group.diagnosis._places = ()
    group.train(20, {2: LATER})
    assert capfd.readouterr().err.count("is not looked for any more, training goes on") == 1
