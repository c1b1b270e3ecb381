"""StragglAR's plans: how many rounds, what the late rank does, and the plan for 8 ranks."""

from pathlib import Path

import pytest

from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.model.all_reduce_forms import least_rounds
from megatron_adaptra.plan.reductions import stragglar_rounds
from megatron_adaptra.plan.reductions.stragglar import stragglar
from megatron_adaptra.plan.reductions.stragglar_rounds import power_of_two_rounds, searched_rounds

GOLDEN = Path(__file__).parent / "stragglar_8.txt"


def checked(rounds, ranks, k):
    """How many `rounds`; no rank sends or receives more than one piece in any of them."""
    pieces, owners = k * (ranks - 1), ranks - 1
    for now, copies in enumerate(rounds):
        swap = [now % owners, owners] if now < pieces else []
        for side in (0, 1):
            ports = swap + [copy[side] for copy in copies]
            assert len(set(ports)) == len(ports), (ranks, k, now)
    return len(rounds)


@pytest.mark.parametrize("depth", range(2, 8))
def test_rounds_of_powers_of_two(depth):
    ranks = 1 << depth
    assert checked(power_of_two_rounds(ranks), ranks, 1) == ranks - 2 + depth
    assert least_rounds(ranks, 1) == ranks - 2 + depth


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(n, marks=[pytest.mark.long] * (n in (10, 11, 13, 14, 15))) for n in range(4, 17)],
)
def test_rounds_of_other_numbers(ranks):
    for k in range(1, 5):
        rounds = checked(searched_rounds(ranks, k), ranks, k)
        allowed = 0 if k == 1 and ranks <= 12 else 2
        assert 0 <= rounds - least_rounds(ranks, k) <= allowed, k


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "k"), [(33, 3), (64, 2), (100, 1)])
def test_rounds_of_large_groups_are_nearly_the_fewest(ranks, k):
    """Kuhn's matching and tries of many orders find them within one in ten."""
    rounds = checked(searched_rounds(ranks, k), ranks, k)
    assert least_rounds(ranks, k) <= rounds <= 1.1 * least_rounds(ranks, k)


def test_the_search_finds_the_same_again(monkeypatch):
    assert searched_rounds(13, 2) == searched_rounds(13, 2)
    monkeypatch.setattr(stragglar_rounds, "_WORK", 1)  # the fewest tries
    assert checked(searched_rounds(37, 1), 37, 1) >= least_rounds(37, 1)


@pytest.mark.parametrize("ranks", [4, 7, 8, 64])
def test_one_plan_serves_any_late_rank(ranks):
    last = stragglar(ranks, ranks - 1)
    for late in {0, 1, ranks // 2, ranks - 1}:
        plan = stragglar(ranks, late)
        assert plan is stragglar(ranks, late)  # it is made once
        assert f"rank {late} is late" in plan.why
        assert plan.order[late][0].ranks == ((0,) if late else (1,))
        pieces = [op.piece for op in plan.order[late] if op.action.value == "P"]
        assert pieces == list(range(ranks - 1))  # it sends its buffer once
        assert sorted(map(len, plan.order)) == sorted(map(len, last.order))


def test_the_others_need_nothing_of_the_late_rank_for_their_sums():
    plan = stragglar(6, 2, 3)
    for rank, line in enumerate(plan.order):
        if rank != 2:
            first = next(i for i, op in enumerate(line) if 2 in op.ranks)
            assert len([op for op in line[:first] if op.action.value == "A"]) == 3


def test_the_plan_for_8_ranks_is_the_golden_one():
    plan = stragglar(8, 7)
    assert plan.text() == GOLDEN.read_text()
    assert CollectivePlan.parse(GOLDEN.read_text(), 8) == plan
