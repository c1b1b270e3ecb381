"""The two-phase commit of one stage, and what a stage refuses to run."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass

import pytest
from agree.pipeline import schedule
from patience import PATIENCE

from megatron_adaptra.agree.agreement import LONGEST_SWAP_LEAD, Ballot, Proposal, pack, unpack
from megatron_adaptra.agree.bundle import SCHEDULE, Bundle, ValueKind, scheduled
from megatron_adaptra.base.errors import BadBundle, BadInput, Disagreement, ScheduleError
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Schedule

START = schedule((3, 2, 1), 6)
OLD, NEW, OTHER = map(scheduled, (START, schedule((6, 5, 1), 6), schedule((6, 6, 6), 6)))
FOLLOWER, LEADER = False, True


def ballot(iteration: int = 0) -> Ballot:
    made = Ballot(OLD)
    assert made.at_boundary(iteration, 0.0, FOLLOWER) is None
    return made


def travelled(message):
    return json.loads(json.dumps(message))


def test_plan_travels_and_is_what_it_was():
    got = unpack(travelled(pack(Proposal(4, 17, NEW, "k"))), OLD)
    assert (got.number, got.swap, got.bundle, got.key) == (4, 17, NEW, "k")
    assert got.committed is None
    assert got.bundle.digest == NEW.digest


def deadlock() -> Schedule:
    """Stage 0 wants the gradient of a microbatch before it has sent the next one that is needed."""
    lines = [list(line) for line in START.order]
    lines[0] = [Op(Kind.F, 0), Op(Kind.B, 0)] + [op for op in lines[0] if op.microbatch]
    lines[2] = [Op(Kind.F, 0), Op(Kind.F, 1), Op(Kind.B, 0)] + [
        op for op in lines[2] if op.microbatch > 1 or op == Op(Kind.B, 1)
    ]
    return Schedule(tuple(map(tuple, lines)), 6)


def missing() -> Schedule:
    return Schedule((START.order[0][:-1], *START.order[1:]), 6)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (deadlock(), "deadlock"),
        (missing(), "stage 0 runs F of microbatch 5"),
        (
            schedule((2, 1), 6),
            "for 2 stages and 6 microbatches; here are 3 stages and 6 microbatches",
        ),
        (
            schedule((3, 2, 1), 5),
            "for 3 stages and 5 microbatches; here are 3 stages and 6 microbatches",
        ),
    ],
)
def test_plan_that_must_not_run_is_refused(bad, words):
    with pytest.raises((BadBundle, ScheduleError)) as refused:
        unpack(travelled(pack(Proposal(1, 5, scheduled(bad)))), OLD)
    assert words in str(refused.value)


def test_tampered_plan_is_refused():
    message = pack(Proposal(9, 5, NEW))
    plan = message["bundle"]
    swapped = plan.replace('"F4", "F5"', '"F5", "F4"')
    assert swapped != plan
    for altered in (swapped, plan + " ", plan[:-1], ""):
        with pytest.raises(BadBundle, match="proposal 9: its bytes do not match their digest"):
            unpack({**message, "bundle": altered}, OLD)


def test_commit_swaps_at_the_boundary_and_not_before():
    b = ballot(1)
    assert b.offer(Proposal(0, 3, NEW))
    b.decide(0, True)
    assert b.at_boundary(2, 0.0, FOLLOWER) is None
    assert b.in_force == OLD
    closed = b.at_boundary(3, 0.0, FOLLOWER)
    assert (closed.number, closed.committed) == (0, True)
    assert b.in_force == NEW
    assert b.at_boundary(4, 0.0, FOLLOWER) is None


def test_abort_keeps_the_plan():
    b = ballot(1)
    b.offer(Proposal(0, 3, NEW))
    b.decide(0, False)
    assert b.at_boundary(3, 0.0, FOLLOWER).committed is False
    assert b.in_force == OLD


def test_leader_at_the_swap_without_a_decision_aborts():
    b = ballot(1)
    b.offer(Proposal(0, 2, NEW))
    assert b.at_boundary(2, PATIENCE, LEADER).committed is False
    b.decide(0, True)  # the last acknowledgement was too late
    assert b.at_boundary(3, 0.0, LEADER) is None
    assert b.in_force == OLD


def test_first_decision_stays():
    b = ballot(1)
    b.offer(Proposal(0, 2, NEW))
    b.decide(0, False)
    b.decide(0, True)
    assert b.at_boundary(2, 0.0, LEADER).committed is False


def test_second_proposal_and_late_proposal_are_refused():
    b = ballot(5)
    assert not b.offer(Proposal(0, 5, NEW))
    assert not b.offer(Proposal(0, 4, NEW))
    assert not b.offer(Proposal(0, 6 + 2 * LONGEST_SWAP_LEAD, NEW))  # nothing else could come
    assert b.offer(Proposal(1, 7, NEW))
    assert not b.offer(Proposal(2, 8, OTHER))
    b.decide(2, True)  # not the open one
    b.decide(1, True)
    b.at_boundary(7, 0.0, FOLLOWER)
    assert b.in_force == NEW
    assert b.offer(Proposal(3, 9, OTHER))


def at_boundary_on_a_thread(b, iteration, timeout):
    out = []

    def waits():
        try:
            out.append(b.at_boundary(iteration, timeout, FOLLOWER))
        except Disagreement as error:
            out.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    return thread, out


@pytest.mark.parametrize("commit", [True, False])
def test_follower_waits_for_the_decision(commit):
    b = ballot(1)
    b.offer(Proposal(0, 2, NEW))
    thread, out = at_boundary_on_a_thread(b, 2, PATIENCE)
    b.decide(1, not commit)  # of another proposal
    b.decide(0, commit)
    thread.join(PATIENCE)
    assert out[0].committed is commit
    assert b.in_force == (NEW if commit else OLD)


def test_follower_without_a_decision_ends_in_time():
    b = ballot(1)
    b.offer(Proposal(6, 2, NEW))
    with pytest.raises(Disagreement) as error:
        b.at_boundary(2, 0.05, FOLLOWER)
    assert str(error.value) == (
        "no decision on proposal 6 at iteration 2: waited 0.05 s for stage 0, whose word came "
        "neither directly nor by the store"
    )
    assert b.in_force == OLD


def test_an_opening_ends_by_itself():
    made = Ballot(OLD, opening=OTHER, until=3)
    ran = []
    for iteration in range(5):
        assert made.at_boundary(iteration, 0.0, FOLLOWER) is None
        ran.append(made.in_force)
        assert made.opening is (iteration < 3)
        assert made.lasting == OLD
    assert ran == [OTHER, OTHER, OTHER, OLD, OLD]


def test_a_plan_takes_the_place_of_an_opening_for_good():
    made = Ballot(OLD, opening=OTHER, until=3)
    made.at_boundary(0, 0.0, FOLLOWER)
    assert made.offer(Proposal(0, 2, NEW))
    made.decide(0, True)
    ran = []
    for iteration in range(1, 5):
        made.at_boundary(iteration, 0.0, FOLLOWER)
        ran.append(made.in_force)
    assert ran == [OTHER, NEW, NEW, NEW]


@dataclass(frozen=True)
class Shares:
    """A second kind of value, as one that replicas share out may be."""

    parts: tuple[int, ...]

    def to_json(self) -> list[int]:
        return list(self.parts)

    @classmethod
    def read(cls, data: object) -> Shares:
        if not isinstance(data, list) or not all(type(part) is int for part in data):
            raise BadInput("shares", data, "a list of whole numbers")
        return cls(tuple(data))

    def follows(self, now: Shares) -> None:
        if sum(self.parts) != sum(now.parts):
            raise BadBundle(f"shares of {sum(self.parts)}, here are {sum(now.parts)}")


SHARES = ValueKind("shares", Shares.read, Shares.follows)
EVEN, UNEVEN = Shares((3, 3)), Shares((4, 2))
BOTH = Bundle({SCHEDULE: START, SHARES: EVEN})


def test_several_kinds_change_together_or_not_at_all():
    """A reader in between, on another thread, never sees one of them without the other."""
    deep, seen, over = NEW[SCHEDULE], set(), threading.Event()
    b = Ballot(BOTH)

    def looks():
        while not over.is_set():
            now = b.in_force
            seen.add((now[SCHEDULE], now[SHARES]))

    thread = threading.Thread(target=looks)
    thread.start()
    try:
        for number, (plan, shares) in enumerate([(deep, UNEVEN), (START, EVEN)] * 100):
            b.offer(Proposal(number, number + 1, Bundle({SCHEDULE: plan, SHARES: shares})))
            b.decide(number, True)
            b.at_boundary(number + 1, 0.0, FOLLOWER)
            assert (b.in_force[SCHEDULE], b.in_force[SHARES]) == (plan, shares)
    finally:
        over.set()
        thread.join(PATIENCE)
    assert seen <= {(START, EVEN), (deep, UNEVEN)}


def test_what_a_proposal_leaves_out_stays():
    b = Ballot(BOTH)
    b.offer(Proposal(0, 1, NEW))
    b.decide(0, True)
    b.at_boundary(1, 0.0, FOLLOWER)
    assert b.in_force == Bundle({SCHEDULE: NEW[SCHEDULE], SHARES: EVEN})
    assert b.in_force.names == ["schedule", "shares"]
    assert b.in_force.digest != NEW.digest


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({SCHEDULE: START, SHARES: Shares((4, 3))}, "shares of 7, here are 6"),
        ({SCHEDULE: missing(), SHARES: UNEVEN}, "stage 0 runs F of microbatch 5"),
        ({SCHEDULE: START, ValueKind("others", Shares.read, Shares.follows): EVEN}, "'others'"),
        ({SHARES: START}, "its shares is none"),
        ({}, "it has"),
    ],
)
def test_one_value_that_must_not_run_refuses_all(values, words):
    with pytest.raises((BadBundle, ScheduleError)) as refused:
        unpack(travelled(pack(Proposal(1, 5, Bundle(values)))), BOTH)
    assert words in str(refused.value)


def test_a_bundle_goes_through_json_and_keeps_its_digest():
    whole = Bundle({SHARES: UNEVEN, SCHEDULE: NEW[SCHEDULE]})
    got = unpack(travelled(pack(Proposal(2, 5, whole))), BOTH).bundle
    assert got == whole
    assert got.digest == whole.digest


@pytest.mark.parametrize("digests", [("other", "own"), ("own", "other"), ("own", "")])
def test_one_digest_that_differs_aborts(digests):
    b = ballot(1)
    b.offer(Proposal(0, 3, NEW))
    words = {"own": NEW.digest, "other": OTHER.digest, "": ""}
    decided = [b.acknowledge(0, i + 1, words[word], 2) for i, word in enumerate(digests)]
    assert [one.committed for one in decided if one is not None] == [False]
    b.at_boundary(3, 0.0, LEADER)
    assert b.in_force == OLD


def test_a_proposal_is_refused_for_its_iteration_from_its_abort_to_its_end():
    made = ballot()
    assert made.offer(Proposal(0, 5, NEW, "k"))
    assert not made.refuses(5), "it is open"
    made.decide(0, False)
    assert made.refuses(5)
    assert not made.refuses(4)
    assert made.at_boundary(5, 0.0, FOLLOWER) is not None
    assert not made.refuses(5)
    assert made.offer(Proposal(1, 8, NEW, "k"))
    made.decide(1, True)
    assert not made.refuses(8), "it is committed"
