"""Few iterations are measured while nothing changes, and all as soon as one rank notices."""

from __future__ import annotations

import random

import pytest
import torch
from execute.test_measured_reductions import open_group, reduce
from patience import PATIENCE
from transport.ranks import RankFixture, run, until

from megatron_adaptra.adapt.reductions.remedy import LOOK
from megatron_adaptra.agree.agreement import Proposal
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.agree.reductions import ALL_REDUCE, GroupReduction
from megatron_adaptra.execute.planned.measured import (
    CHANCE,
    EVERY,
    FIRST,
    LASTING,
    PROBED,
    PROBED_EVERY,
    MeasuredIterations,
    MeasuredReductions,
)
from megatron_adaptra.plan.reductions.choice import Choice

RANKS, CHANGES, ITERATIONS = 3, 25, 60
PERIOD, TAKES, MATTERS = 1.0, 0.1, 0.025


def measured(took: list[float]) -> list[int]:
    """Which of so many iterations are, as this rank alone decides."""
    iterations = MeasuredIterations(MATTERS)
    found = []
    for iteration, seconds in enumerate(took):
        if iteration in iterations:
            found.append(iteration)
        iterations.ended(iteration, seconds, PERIOD)
    return found


BY_TURNS = [*range(FIRST), *range(FIRST, ITERATIONS, EVERY)]


def test_of_a_training_in_which_nothing_changes_one_in_four_is() -> None:
    assert measured([TAKES] * ITERATIONS) == BY_TURNS
    # Less than matters, and as much as usual here.
    assert measured([TAKES + 0.02 * (i == CHANGES) for i in range(ITERATIONS)]) == BY_TURNS
    noise = [TAKES + 0.05 * (i % 3) for i in range(ITERATIONS)]
    assert measured(noise) == BY_TURNS


@pytest.mark.parametrize("more", [0.03, -0.05, 0.3])
def test_what_matters_and_lasts_is_measured_until_it_can_be_planned_for(more: float) -> None:
    found = measured([TAKES + more * (i >= CHANGES) for i in range(ITERATIONS)])
    assert set(range(CHANGES + 1, CHANGES + 1 + LASTING)) <= set(found)
    later = range(CHANGES + 2 * LASTING, ITERATIONS)
    assert [i for i in found if i in later] == [i for i in later if i % EVERY == 0]


def test_one_that_takes_longer_by_chance_costs_three() -> None:
    found = measured([TAKES + 0.3 * (i == CHANGES) for i in range(ITERATIONS)])
    assert sorted(found) == sorted({*BY_TURNS, *range(CHANGES + 1, CHANGES + 1 + CHANCE)})


def test_noise_with_heavy_tails_leaves_most_iterations_alone() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng, count = random.Random(seed), 4000
    took = [TAKES + 0.01 * rng.gauss(0, 1) / max(0.2, rng.random()) for _ in range(count)]
    assert len(measured(took)) < 0.55 * count


def test_what_all_ranks_do_together_falls_on_iterations_that_all_measure() -> None:
    """Probes wait for all ranks, and shards are chosen after the reports of all."""
    together = {*PROBED, *range(PROBED_EVERY, 1000, PROBED_EVERY), *range(LOOK, 1000, LOOK)}
    assert all(iteration in MeasuredIterations(MATTERS) for iteration in together)


def counted(adaptive: MeasuredReductions) -> list[int]:
    """The iterations that are reported, from now on."""
    reported, report = list[int](), adaptive._controller.hand_in

    def note(one: object) -> None:
        reported.append(one.iteration)  # type: ignore[attr-defined]
        report(one)  # type: ignore[arg-type]

    adaptive._controller.hand_in = note  # type: ignore[assignment,method-assign]
    return reported


def asked(adaptive: MeasuredReductions) -> bool:
    """Whether a message has come that asks for iterations after CHANGES."""
    arrivals = adaptive._arrivals
    assert arrivals is not None
    arrivals.look()
    return arrivals.until > CHANGES + 1


def train(me: RankFixture, notices: int | None) -> list[int]:
    """The iterations that this rank has reported; the leader knows the last one of all ranks.

    Rank `notices` has noticed something in the iteration CHANGES; None: nobody.
    """
    connected, adaptive = open_group("engine")
    reported = counted(adaptive)
    for iteration in range(ITERATIONS):
        if iteration == CHANGES + 2 and notices not in (None, me.rank):
            until(lambda: asked(adaptive), "the message of the rank that has noticed")
        me.meet()
        reduce(connected, adaptive, torch.ones(10))
        if iteration == CHANGES and me.rank == notices:
            adaptive._measured.wake(iteration)
    adaptive._guard.attempt(PATIENCE, lambda: None)  # what it had to do has been done
    if (loop := adaptive.loop) is not None:
        until(lambda: loop.seen == BY_TURNS[-1], "reports of all ranks")
    me.meet()
    adaptive.close()
    return reported


def test_while_nothing_changes_nobody_sends_anything_in_most_iterations() -> None:
    rows = run("gloo", train, None, ranks=RANKS)
    assert all(reported == BY_TURNS for reported in rows)


@pytest.mark.parametrize("notices", [0, 2])
def test_what_one_rank_notices_is_measured_by_all_from_the_next_iteration_on(notices: int) -> None:
    """Also by one that begins an iteration before the messages of the others come."""
    rows = run("gloo", train, notices, ranks=RANKS)
    all_of = set(range(CHANGES + 1, CHANGES + 1 + LASTING))
    for reported in rows:
        assert all_of - {CHANGES + 1} <= set(reported)
        assert set(reported) <= all_of | set(BY_TURNS)


def votes(me: RankFixture) -> list[int]:
    """The iterations that this rank has reported, where only rank 1 knows of a vote."""
    connected, adaptive = open_group("engine")
    reported = counted(adaptive)
    for iteration in range(CHANGES + 5):
        if iteration == CHANGES + 1 and me.rank != 1:
            until(lambda: asked(adaptive), "the message of the rank that votes")
        if iteration == CHANGES and me.rank == 1:
            value = Bundle({ALL_REDUCE: GroupReduction(Choice(RANKS))})
            assert adaptive._controller.ballot.offer(Proposal(0, CHANGES + 30, value, "key"))
        me.meet()
        reduce(connected, adaptive, torch.ones(10))
    adaptive._guard.attempt(PATIENCE, lambda: None)
    me.meet()
    adaptive.close()
    return reported


def test_while_a_vote_is_open_all_iterations_are_measured() -> None:
    for reported in run("gloo", votes, ranks=RANKS):
        assert set(range(CHANGES + 1, CHANGES + 5)) <= set(reported)
