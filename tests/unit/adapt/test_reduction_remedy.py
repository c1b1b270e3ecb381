"""Which all-reduce a group runs, by real votes: leader and members, over the loopback transport.

What ranks measure is simulated (voted_group.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from adapt.voted_group import BUFFER, MS, NBYTES, VotedGroup
from patience import PATIENCE

from megatron_adaptra.adapt.reductions.decisions import ranks_in_words
from megatron_adaptra.adapt.reductions.remedy import FEWEST, LOOK, WARM, ReductionRemedy
from megatron_adaptra.adapt.trial import FIRST_BLOCK
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.agree.reductions import ALL_REDUCE, GroupReduction
from megatron_adaptra.base.errors import BadBundle, BadInput
from megatron_adaptra.measure.reduction_report import ReductionReport
from megatron_adaptra.plan.reductions.choice import Choice

SOON = 10  # iterations in which a late rank is found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("first", [0, 1_000_000])
def test_ranks_that_report_before_the_leader_begins_count(tmp_path: Path, first: int) -> None:
    """Their reports of the first iteration, also where a run begins with a later one."""
    group = VotedGroup(2, tmp_path / "decisions.jsonl", first=first)
    for rank in reversed(range(2)):
        if rank == 0:
            group.leader.begin(first)
        group.loop.report(ReductionReport(rank, first, NBYTES))
        group.loop.drain(PATIENCE)
    assert group.loop.seen == first
    group.close()


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_late_rank_is_found_moves_and_comes_in_time(
    ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "decisions.jsonl"
    group = VotedGroup(ranks, log)
    assert all(one.native for one in group.train(12))
    native = group.took[-1]
    ran = group.train(SOON + 1, {2: BUFFER})
    assert not ran[-1].native
    assert not ran[-1].shares or ran[-1].shares[2] == 0
    assert group.took[-1] < 0.8 * native
    moved = group.train(SOON + 1, {1: BUFFER})
    assert not moved[-1].native
    assert not moved[-1].shares or (moved[-1].shares[1], moved[-1].shares[2] > 0) == (0, True)
    assert group.took[-1] < 0.8 * native
    healed = group.train(SOON + 3)
    assert healed[-1].native
    group.close()
    found = lines(log)
    decisions = [line for line in found if line["kind"] == "all-reduce"]
    assert [line["kind"] for line in found].count("vote") == len(decisions) == 3
    first, second, third = decisions
    assert first["why"] == f"rank 10 comes {1e3 * BUFFER:.0f} ms late"
    assert "rank 9 comes" in second["why"]
    assert "rank 10 comes in time" in second["why"]
    assert third["after"] == "native"
    outcomes = [line for line in found if line["kind"] == "outcome"]
    # As predicted, but for what differs between the clock's figures and what was measured.
    assert outcomes[0]["measured_ms"] == pytest.approx(first["predicted_ms"], rel=0.02)
    text = capfd.readouterr().err
    assert f"gradients of ranks 8 to {7 + ranks} go by direct, nothing owned by 2: rank 10" in text
    assert "go back to native: rank 9 comes in time" in text


def test_what_a_backward_hides_of_a_reduction_is_not_gained(tmp_path: Path) -> None:
    """A late rank is found all the same, and where everything is hidden nothing changes."""
    log = tmp_path / "decisions.jsonl"
    group = VotedGroup(4, log)
    group.overlap, group.last = BUFFER / 2, NBYTES // 8
    group.train(12)
    native = group.took[-1]
    assert not group.train(SOON + 1, {2: BUFFER})[-1].native
    assert group.took[-1] < 0.8 * native
    group.close()
    found = lines(log)
    (decision,) = (line for line in found if line["kind"] == "all-reduce")
    (outcome,) = (line for line in found if line["kind"] == "outcome")
    assert decision["native_ms"] == pytest.approx(1e3 * native, rel=0.02)
    assert decision["predicted_ms"] == pytest.approx(1e3 * group.took[-1], rel=0.02)
    assert outcome["measured_ms"] == pytest.approx(decision["predicted_ms"], rel=0.02)
    buffers = {"count": 1, "overlap": 0.08, "last": NBYTES // 8, "gathers": 1, "hides": 0.0}
    assert decision["figures"]["buffers"] == buffers
    hidden = VotedGroup(4, log)
    hidden.overlap, hidden.last = 4 * BUFFER, NBYTES // 50
    assert all(one.native for one in hidden.train(12) + hidden.train(2 * SOON, {2: BUFFER}))
    hidden.close()


def test_shards_far_from_each_other_go_straight_while_ranks_are_late_or_not(tmp_path: Path) -> None:
    """Nobody has to be late: it is chosen as soon as native is known."""
    log, known = tmp_path / "decisions.jsonl", WARM + FEWEST - 1
    group = VotedGroup(8, log, sharded=True, delay=50 * MS)
    ran = group.train(known + 4)
    for late in ({2: BUFFER}, {1: BUFFER}, {}):
        ran += group.train(SOON, late)
    group.close()
    assert {str(one) for one in ran} == {"native", "direct"}
    (decision,) = (line for line in lines(log) if line["kind"] == "all-reduce")
    assert (decision["detected"], decision["why"]) == (known, "a message takes 50 ms")
    assert [one.native for one in ran] == [i < decision["iteration"] for i in range(len(ran))]
    assert decision["native_ms"] == pytest.approx(1e3 * group.took[known], rel=0.02)
    # Of an iteration: in the reduce-scatter, and in the all-gather after it.
    saved = 1e-3 * (decision["native_ms"] - decision["predicted_ms"])
    assert decision["gain"] * decision["figures"]["iteration"] > 1.2 * saved


def test_delays_of_shards_that_grow_are_seen_at_the_next_look(tmp_path: Path) -> None:
    group = VotedGroup(8, tmp_path / "decisions.jsonl", sharded=True)
    assert all(one.native for one in group.train(2 * LOOK))
    group.delay = 50 * MS
    assert not group.train(2 * LOOK)[-1].native
    group.close()
    (decision,) = lines(tmp_path / "decisions.jsonl")[:1]
    assert (decision["detected"] % LOOK, decision["why"]) == (0, "a message takes 50 ms")


def test_a_plan_that_is_slower_than_native_goes_back_and_waits(tmp_path: Path) -> None:
    group = VotedGroup(4, tmp_path / "decisions.jsonl", min_gain=0.03)
    group.train(12)
    ran = group.train(2 * SOON, {2: BUFFER}, factor=2.0)
    assert not all(one.native for one in ran)
    assert ran[-1].native
    # Its lateness changes: nothing is tried for a while.
    assert all(one.native for one in group.train(FIRST_BLOCK - SOON, {2: 2 * BUFFER}, factor=2.0))
    tried = group.train(3 * SOON, {2: 3 * BUFFER}, factor=1.0)
    assert not tried[-1].native
    group.close()
    reasons = [line["why"] for line in lines(tmp_path / "decisions.jsonl") if "why" in line]
    assert [("after the last arrival, native" in why) for why in reasons] == [False, True, False]


def test_a_plan_is_not_judged_by_what_it_takes_while_another_rank_is_late(tmp_path: Path) -> None:
    group = VotedGroup(4, tmp_path / "decisions.jsonl", min_gain=0.03)
    group.train(12)
    while group.train(1, {2: BUFFER})[-1].native:
        assert len(group.ran) < 12 + SOON
    group.train(2 * SOON, {1: 2 * BUFFER})
    group.close()
    found = [one for one in lines(tmp_path / "decisions.jsonl") if one["kind"] == "all-reduce"]
    assert [one["again"] for one in found] == [None, None]


@pytest.mark.parametrize(("computes", "iterations"), [(1.0, 20), (1.35, 60)])
def test_reductions_that_all_take_longer_for_a_while_do_not_undo_a_plan_for_good(
    iterations: int, computes: float, tmp_path: Path
) -> None:
    """It is kept, where all that ranks do takes longer, and else tried again."""
    group, late = VotedGroup(4, tmp_path / "decisions.jsonl"), {2: BUFFER}
    group.train(12)
    while group.train(1, late)[-1].native:
        assert len(group.ran) < 12 + SOON
    ran = group.train(iterations, late, longer=2.0, computes=computes)
    ran += group.train(2 * FIRST_BLOCK, late)
    group.close()
    assert not any(one.native for one in ran[-FIRST_BLOCK // 2 :])
    found = [one for one in lines(tmp_path / "decisions.jsonl") if one["kind"] == "all-reduce"]
    assert len(found) == (3 if computes == 1 else 1)
    if computes == 1:
        there, back, again = found
        assert again["detected"] in (back["again"], back["again"] + FIRST_BLOCK)
        assert again["why"] == f"{there['why']}: tried again"


def owning(late: tuple[int, ...], **changed: Any) -> GroupReduction:
    given = {"ranks": 4, "algorithm": "direct", "pieces": 2, "shares": (1, 1, 0, 1), **changed}
    return GroupReduction(Choice(**given), late)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (owning((1,)), "rank 1 comes late, and would own 33% of the gradients"),
        (owning((4,)), "rank 4 is late in it; ranks are 0 to 3"),
        (owning((), ranks=3, shares=(1, 1, 1)), "it is for 3 ranks; here are 4"),
    ],
)
def test_what_must_not_run_is_refused_in_words(value: GroupReduction, message: str) -> None:
    now = Bundle({ALL_REDUCE: GroupReduction(Choice(4))})
    with pytest.raises(BadBundle, match=message):
        now.read(Bundle({ALL_REDUCE: value}).text)


@pytest.mark.parametrize(
    "data", [None, {}, {"choice": {}}, {"choice": {}, "late": [True]}, {"choice": 1, "late": []}]
)
def test_what_is_no_value_is_refused(data: object) -> None:
    with pytest.raises(BadInput):
        GroupReduction.from_json(data)


def test_a_value_travels_whole() -> None:
    value = owning((2,))
    now = Bundle({ALL_REDUCE: GroupReduction(Choice(4))})
    read = now.read(Bundle({ALL_REDUCE: value}).text)[ALL_REDUCE]
    assert read == value
    assert read.mark == value.mark != owning(()).mark
    assert read.plan is not None
    assert read.plan.digest() == value.choice.plan().digest()


def test_ranks_in_words() -> None:
    assert ranks_in_words([0, 1, 2, 3]) == "ranks 0 to 3"
    assert ranks_in_words([1, 3, 5, 7]) == "ranks 1, 3, ... 7"
    assert ranks_in_words([0, 4]) == "ranks 0, 4"
    assert ranks_in_words([0, 1, 5]) == "ranks 0, 1, 5"


def test_what_is_chosen_is_offered_to_who_decides_on_dearer_remedies(tmp_path: Path) -> None:
    """As a share of an iteration as it is: 1 where nothing is to come."""
    group = VotedGroup(8, tmp_path / "decisions.jsonl")
    remedy = group.loop.remedy
    assert isinstance(remedy, ReductionRemedy)
    group.train(12)
    before, offers = remedy.offer, set()
    assert before is None or before.leaves == 1
    for _ in range(SOON + 1):
        group.train(1, {2: BUFFER})
        if remedy.offer is not None and remedy.offer != before:
            offers.add(remedy.offer)
    first, *later = sorted(offers)
    assert 0.5 < first.leaves < 0.95
    assert all(one.leaves == 1 for one in later)
    group.train(SOON + 3)
    assert remedy.offer is not None
    assert remedy.offer.number > first.number
    assert remedy.offer.leaves == 1
    group.close()
