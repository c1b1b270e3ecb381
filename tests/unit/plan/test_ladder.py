"""The cheapest remedy that is enough, by its figures; benchmarks/ladder.py draws patterns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.plan import remedies
from megatron_adaptra.plan.ladder import (
    COLLECTIVE,
    FULL,
    NEAR,
    ORDER,
    REMEDIES,
    ROUTES,
    SHARES,
    Ladder,
    Remedy,
    climb,
    ladder_in_words,
)
from megatron_adaptra.plan.remedies import (
    Applied,
    Reduction,
    Situation,
    plan_remedies,
    seconds_of,
)
from megatron_adaptra.sim.ports import Ports

MIN_GAIN = AdaptraConfig().min_gain


def rungs(*leaves: float | None) -> list[Remedy]:
    return [Remedy(name, one, "as given") for name, one in zip(REMEDIES, leaves, strict=True)]


def climbed(*leaves: float | None, min_gain: float = 0.15) -> Ladder:
    """Of an iteration that takes 1 s."""
    return climb(1.0, rungs(*leaves), min_gain)


@pytest.mark.parametrize(
    ("leaves", "chosen"),
    [
        ((0.6, 0.6, 0.6, 0.6), ORDER),
        ((1.0, 0.6, 0.6, 0.6), COLLECTIVE),
        ((1.0, 1.0, 0.62, 0.6), ROUTES),
        ((1.0, 1.0, 0.64, 0.6), SHARES),  # routes leave too much
        ((0.9, 0.9, None, 0.6), SHARES),
        ((1.0, None, None, 0.86), FULL),  # no material gain
        ((0.86, None, None, 0.84), SHARES),  # close, but does not save enough by itself
        ((None, None, None, None), FULL),
        ((1.0, 1.0, 1.0, 1.0), FULL),
        ((1.2, None, 1.3, 1.1), FULL),
    ],
)
def test_the_cheapest_that_is_enough(leaves: tuple[float | None, ...], chosen: str) -> None:
    assert climbed(*leaves).chosen == chosen


def test_without_a_least_gain_something_has_to_be_gained() -> None:
    assert climbed(1.0, None, None, 1.0, min_gain=0.0).chosen == FULL
    assert climbed(1.0, None, None, 0.99, min_gain=0.0).chosen == SHARES


@given(
    st.lists(st.none() | st.floats(0, 2), min_size=4, max_size=4),
    st.sampled_from([0.0, 0.05, 0.15, 0.5]),
)
@examples(100)
def test_whatever_the_figures(leaves: list[float | None], min_gain: float) -> None:
    """Never above full; what is lost is little; no cheaper one would do; in words, too."""
    ladder = climbed(*leaves, min_gain=min_gain)
    assert ladder.predicted <= ladder.full
    worth = [one for one in leaves if one is not None and one < 1 and one <= 1 - min_gain]
    if ladder.chosen == FULL:
        assert all(one >= 1 - min_gain - 1e-6 for one in worth)
        assert ladder.cheaper == ladder.remedies
    else:
        assert ladder.gain >= min_gain - 1e-6
        assert ladder.predicted <= min(worth) * (1 + NEAR)
        for one in ladder.cheaper:
            enough = one.leaves is not None and one.leaves <= min(1 - min_gain, 1 - 1e-6)
            assert not enough or one.leaves > min(worth) * (1 + NEAR)
    assert ladder_in_words(ladder, min_gain)
    assert [one["remedy"] for one in ladder.to_json()["remedies"]] == list(REMEDIES)


def test_in_words() -> None:
    assert ladder_in_words(climbed(1.0, 0.97, None, 0.625), 0.15) == (
        "shares of microbatches: an iteration is expected to take 625 ms, without 1000 ms; shares "
        "of a collective would leave 970"
    )
    assert ladder_in_words(climbed(1.0, 0.9, None, 0.92), 0.15) == (
        "nothing is done: an iteration takes 1000 ms; shares of a collective would save 10% of it, "
        "less than --adaptra-min-gain 15%"
    )
    assert ladder_in_words(climbed(1.0, None, None, 0.625), 0.15).endswith(
        "without 1000 ms; nothing cheaper makes it less"
    )
    assert "no remedy makes it less" in ladder_in_words(climbed(1.0, None, None, 1.0), 0.15)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_seconds_that_nothing_takes(wrong: float) -> None:
    with pytest.raises(BadInput, match=f"^seconds of {ROUTES} "):
        climbed(1.0, 1.0, wrong, 1.0)
    with pytest.raises(BadInput, match=r"^seconds of full "):
        climb(wrong, rungs(1.0, 1.0, 1.0, 1.0), 0.15)
    if wrong != math.inf:
        with pytest.raises(BadInput, match=r"^min_gain "):
            climbed(1.0, 1.0, 1.0, 1.0, min_gain=wrong)


def full_of(situation: Situation) -> Applied:
    return plan_remedies(replace(situation, routes="off", allreduce=False), 1.0).applied[FULL]


def situation(
    stages: int = 2,
    slow: dict[int, float] | None = None,
    paths: dict[tuple[int, int], LinkState] | None = None,
    nbytes: int = 0,
    **more: object,
) -> Situation:
    """4 replicas with 8 microbatches of 30 ms at each stage, and ports of 50 MB/s."""
    each = (10e-3,) * stages
    pipeline = Conditions(8, each, each, each, split=False, step_seconds=10e-3)
    c = ReplicaConditions(pipeline, 4, slow=slow or {}, paths=paths or {})
    reduction = Reduction(nbytes, Ports.equal([50e6] * 4, 0.3e-3, 0.1e-3)) if nbytes else None
    return Situation(c, reduction, ops=20_000, **more)  # type: ignore[arg-type]


def whole(replica: int, times: float, stages: int = 2) -> dict[int, float]:
    return {replica * stages + stage: times for stage in range(stages)}


def test_nobody_slow_is_full_whatever_is_allowed() -> None:
    for one in (situation(), situation(1), situation(nbytes=2_000_000)):
        ladder = plan_remedies(one, 0.0)
        assert ladder.chosen == FULL
        assert ladder.predicted == ladder.full


def test_each_rung_where_it_is_enough() -> None:
    delay = LinkState(40e-3)
    slow_links = {(a, a ^ 1): delay for a in range(8)}
    assert plan_remedies(situation(paths=slow_links, routes="off"), MIN_GAIN).chosen == ORDER
    late = situation(slow=whole(2, 1.25), nbytes=4_000_000, routes="off")
    assert plan_remedies(late, 0.05).chosen == COLLECTIVE
    assert plan_remedies(situation(slow={5: 2.0}), MIN_GAIN).chosen == ROUTES
    assert plan_remedies(situation(slow=whole(2, 2.0), routes="swap"), MIN_GAIN).chosen == SHARES
    assert plan_remedies(situation(1, slow=whole(2, 2.0, 1)), MIN_GAIN).chosen == SHARES


def test_by_hand() -> None:
    """One stage, half speed: 16 microbatches' time in full, 10 by shares; then the step."""
    ladder = plan_remedies(situation(1, slow={2: 2.0}), MIN_GAIN)
    assert ladder.full == pytest.approx(16 * 30e-3 + 10e-3)
    assert ladder.predicted == pytest.approx(10 * 30e-3 + 10e-3)
    leaves = {one.name: one.leaves for one in ladder.remedies}
    assert leaves[ORDER] == ladder.full
    assert leaves[COLLECTIVE] is None
    assert leaves[ROUTES] is None


def test_a_reduction_begins_when_the_last_replica_has_come() -> None:
    """A ring of 4 sends 6 quarters of the buffer through each port: 1 MB takes 30 ms and more."""
    without, given = situation(slow=whole(2, 2.0)), situation(slow=whole(2, 2.0), nbytes=1_000_000)
    took = seconds_of(given, full_of(given)) - seconds_of(without, full_of(without))
    assert 0.030 < took < 0.045


def test_what_is_not_allowed_cannot_be_had() -> None:
    given = situation(slow=whole(2, 2.0), nbytes=1_000_000, allreduce=False, routes="off")
    ladder = plan_remedies(given, MIN_GAIN)
    missing = {one.name: one.why for one in ladder.remedies if one.leaves is None}
    assert missing.keys() == {COLLECTIVE, ROUTES}
    assert "--adaptra-allreduce" in missing[COLLECTIVE]
    assert "--adaptra-reroute" in missing[ROUTES]
    assert missing.keys().isdisjoint(ladder.applied)


def test_routes_are_not_searched_for_where_that_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = situation(slow=whole(2, 2.0))
    monkeypatch.setattr(remedies, "MOST", 8 * 8 - 1)
    ladder = plan_remedies(given, MIN_GAIN)
    (routes,) = (one for one in ladder.remedies if one.name == ROUTES)
    assert routes.leaves is None
    assert "adaptra compare" in routes.why
    assert ladder.chosen == SHARES
    monkeypatch.setattr(remedies, "MOST", 8 * 8)
    assert plan_remedies(given, MIN_GAIN).chosen == ROUTES


def test_memory_for_no_more_microbatches_leaves_counts_as_they_are() -> None:
    given = situation(1, slow={2: 2.0})
    tight = replace(given.conditions, activation_budget=(1.0,) * 4)
    assert plan_remedies(replace(given, conditions=tight), MIN_GAIN).chosen == SHARES


def test_bad_input() -> None:
    c = situation().conditions
    with pytest.raises(BadInput, match=r"^failed '0\.1': "):
        Situation(replace(c, failed=frozenset({1})))
    with pytest.raises(BadInput, match=r"^routes 'all': one of off, swap, auto"):
        Situation(c, routes="all")
    with pytest.raises(BadInput, match=r"^number of ports 3: one per replica: 4"):
        Situation(c, Reduction(1, Ports.equal([1e6] * 3)))
    with pytest.raises(BadInput, match=r"^bytes -1: "):
        Reduction(-1, Ports.equal([1e6] * 4))
    with pytest.raises(BadInput, match=r"^min_gain"):
        plan_remedies(situation(), -1.0)
