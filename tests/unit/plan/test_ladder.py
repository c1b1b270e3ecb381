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
from megatron_adaptra.plan.remedies import plan_remedies

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
        assert 1 - ladder.predicted / ladder.full >= min_gain - 1e-6
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


def job(
    stages: int = 2,
    slow: dict[int, float] | None = None,
    paths: dict[tuple[int, int], LinkState] | None = None,
) -> ReplicaConditions:
    """4 replicas with 8 microbatches of 30 ms at each stage."""
    each = (10e-3,) * stages
    pipeline = Conditions(8, each, each, each, split=False, step_seconds=10e-3)
    return ReplicaConditions(pipeline, 4, slow=slow or {}, paths=paths or {})


def planned(c: ReplicaConditions, min_gain: float = MIN_GAIN) -> Ladder:
    return plan_remedies(c, "eager", min_gain, ops=20_000)


def whole(replica: int, times: float, stages: int = 2) -> dict[int, float]:
    return {replica * stages + stage: times for stage in range(stages)}


def test_nobody_slow_is_full() -> None:
    for c in (job(), job(1)):
        ladder = planned(c, 0.0)
        assert ladder.chosen == FULL
        assert ladder.predicted == ladder.full


def test_each_rung_where_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(job(slow={5: 2.0})).chosen == ROUTES
    assert planned(job(1, slow=whole(2, 2.0, 1))).chosen == SHARES
    monkeypatch.setattr(remedies, "MOST", 0)  # else routes leave still less
    slow_links = {(a, a ^ 1): LinkState(40e-3) for a in range(8)}
    assert planned(job(paths=slow_links)).chosen == ORDER


def test_by_hand() -> None:
    """One stage, half speed: 16 microbatches' time in full, 10 by shares; then the step."""
    ladder = planned(job(1, slow={2: 2.0}))
    assert ladder.full == pytest.approx(16 * 30e-3 + 10e-3)
    assert ladder.predicted == pytest.approx(10 * 30e-3 + 10e-3)
    leaves = {one.name: one.leaves for one in ladder.remedies}
    assert leaves[ORDER] == ladder.full
    assert leaves[COLLECTIVE] is None
    assert leaves[ROUTES] is None


def test_routes_are_not_searched_for_where_that_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = job(slow=whole(2, 2.0))
    monkeypatch.setattr(remedies, "MOST", 8 * 8 - 1)
    ladder = planned(given)
    (routes,) = (one for one in ladder.remedies if one.name == ROUTES)
    assert routes.leaves is None
    assert "adaptra compare" in routes.why
    assert ladder.chosen == SHARES
    monkeypatch.setattr(remedies, "MOST", 8 * 8)
    assert planned(given).chosen == ROUTES


def test_memory_for_no_more_microbatches_leaves_counts_as_they_are() -> None:
    tight = replace(job(1, slow={2: 2.0}), activation_budget=(1.0,) * 4)
    assert planned(tight).chosen == SHARES


def test_bad_input() -> None:
    with pytest.raises(BadInput, match=r"^failed '0\.1': "):
        planned(replace(job(), failed=frozenset({1})))
    with pytest.raises(BadInput, match=r"^min_gain"):
        planned(job(), -1.0)
