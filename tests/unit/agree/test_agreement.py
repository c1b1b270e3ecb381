"""The vote on a plan, in every order in which its steps can come, and with every loss.

What can happen is explored to the end: each step of the leader, of two members, of their
connections and of the store, in any order; connections cut and the store lost at any moment. No
threads: each step is one that the real ones make under one lock.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from agree.pipeline import schedule

from megatron_adaptra.agree.agreement import Ballot, Proposal
from megatron_adaptra.agree.bundle import scheduled
from megatron_adaptra.base.errors import Disagreement

OLD, NEW = scheduled(schedule((3, 2, 1), 4)), scheduled(schedule((4, 3, 1), 4))
MEMBERS = (1, 2)
SWAP, LAST = 1, 2  # iterations
NUMBER = 0


@dataclass
class Rank:
    """One rank: its ballot, and whether it stands at a boundary without a decision."""

    ballot: Ballot
    waits: bool = False

    def key(self) -> Any:
        made = self.ballot._open
        return (
            self.ballot.iteration, self.ballot.in_force == NEW, self.waits,
            None if made is None else (made.committed, len(made.acks)),
        )  # fmt: skip


@dataclass
class State:
    """All ranks, what is on its way (by member, both directions), and what is lost."""

    ranks: list[Rank]
    to_member: dict[int, tuple[Any, ...]] = field(
        default_factory=lambda: dict.fromkeys(MEMBERS, ())
    )
    to_leader: dict[int, tuple[Any, ...]] = field(
        default_factory=lambda: dict.fromkeys(MEMBERS, ())
    )
    to_store: tuple[Any, ...] = ()  # what the leader's control thread has yet to write
    store: Any = None  # "open", then the decision
    cut: frozenset[int] = frozenset()
    store_lost: bool = False
    proposed: bool = False

    def key(self) -> Any:
        members = [
            (self.ranks[m].key(), self.to_member[m], self.to_leader[m], m in self.cut)
            for m in MEMBERS
        ]  # it does not matter who is who
        return (
            self.ranks[0].key(), tuple(sorted(members, key=repr)), self.to_store, self.store,
            self.store_lost, self.proposed,
        )  # fmt: skip

    def copy(self) -> State:
        made = replace(self, to_member=dict(self.to_member), to_leader=dict(self.to_leader))
        made.ranks = []
        for rank in self.ranks:
            ballot = copy.copy(rank.ballot)
            if ballot._open is not None:
                ballot._open = replace(ballot._open, acks=set(ballot._open.acks))
            made.ranks.append(Rank(ballot, rank.waits))
        return made

    def steps(self) -> Iterator[tuple[str, Callable[[State], None]]]:
        """What can happen next, each as a change of a copy of this state."""
        if not self.proposed and not self.store_lost:  # the leader writes on the store first
            yield "propose", State.propose
        if self.to_store and not self.store_lost:
            yield "write", State.write
        for member in MEMBERS:
            if member not in self.cut:
                yield f"cut {member}", lambda s, m=member: s.lose(m)
                if self.to_member[member]:
                    yield f"member {member} receives", lambda s, m=member: s.receive(m)
                if self.to_leader[member]:
                    yield f"leader receives {member}", lambda s, m=member: s.take_ack(m)
            if self.ranks[member].waits and self.store in (True, False) and not self.store_lost:
                yield f"member {member} looks", lambda s, m=member: s.look(m)
        if not self.store_lost:
            yield "store lost", State.lose_store
        slowest = min(rank.ballot.iteration for rank in self.ranks)
        for number, rank in enumerate(self.ranks):
            # Nobody is more than one iteration ahead of the others: they are one pipeline.
            if rank.ballot.iteration < min(LAST, slowest + 1) or rank.waits:
                yield f"boundary of {number}", lambda s, n=number: s.boundary(n)

    def propose(self) -> None:
        ballot = self.ranks[0].ballot
        self.proposed, self.store = True, "open"
        if ballot.offer(Proposal(NUMBER, SWAP, NEW)):
            for member in set(MEMBERS) - self.cut:
                self.to_member[member] += ("propose",)

    def write(self) -> None:
        self.store, *rest = self.to_store
        self.to_store = tuple(rest)

    def lose(self, member: int) -> None:
        self.cut |= {member}
        self.to_member[member] = self.to_leader[member] = ()

    def lose_store(self) -> None:
        self.store_lost = True

    def receive(self, member: int) -> None:
        message, *rest = self.to_member[member]
        self.to_member[member] = tuple(rest)
        ballot = self.ranks[member].ballot
        if message != "propose":
            ballot.decide(NUMBER, message)
            return
        ok = not self.store_lost and self.store == "open"
        ok = ok and ballot.offer(Proposal(NUMBER, SWAP, NEW))
        self.to_leader[member] += (NEW.digest if ok else "",)

    def take_ack(self, member: int) -> None:
        digest, *rest = self.to_leader[member]
        self.to_leader[member] = tuple(rest)
        decided = self.ranks[0].ballot.acknowledge(NUMBER, member, digest, len(MEMBERS))
        if decided is not None:
            self.send_decision(bool(decided.committed))

    def send_decision(self, commit: bool) -> None:
        for member in set(MEMBERS) - self.cut:
            self.to_member[member] += (commit,)
        self.to_store += (commit,)

    def look(self, member: int) -> None:
        self.ranks[member].ballot.decide(NUMBER, self.store)

    def boundary(self, number: int) -> None:
        rank = self.ranks[number]
        iteration = rank.ballot.iteration + (not rank.waits)
        try:
            closed = rank.ballot.at_boundary(iteration, 0.0, leads=number == 0)
        except Disagreement:
            rank.waits = True
            return
        rank.waits = False
        if number == 0 and closed is not None and not closed.committed:
            self.send_decision(False)


def explore(start: State) -> list[State]:
    """All states that can be reached."""
    found, todo = {start.key(): start}, [start]
    while todo:
        state = todo.pop()
        for _, step in state.steps():
            after = state.copy()
            step(after)
            if (key := after.key()) not in found:
                found[key] = after
                todo.append(after)
    return list(found.values())


def started() -> State:
    ranks = []
    for number in (0, *MEMBERS):
        ranks.append(Rank(Ballot(OLD)))
        ranks[-1].ballot.at_boundary(0, 0.0, leads=number == 0)
    return State(ranks)


def test_no_order_of_events_and_no_loss_splits_the_ranks_or_holds_one_up() -> None:
    states = explore(started())
    swapped = stayed = 0
    for state in states:
        past = [rank for rank in state.ranks if rank.ballot.iteration >= SWAP and not rank.waits]
        plans = {rank.ballot.in_force.digest for rank in past}
        assert len(plans) <= 1, state
        for member in MEMBERS:
            rank, leader = state.ranks[member], state.ranks[0]
            if not rank.waits or leader.ballot.iteration < SWAP:
                continue
            # It waits, and the leader is at the swap: it will have the decision, by some way.
            opened = rank.ballot._open
            assert opened is not None
            knows = opened.committed is not None
            by_connection = member not in state.cut and not {True, False}.isdisjoint(
                state.to_member[member]
            )
            by_store = not state.store_lost and (state.to_store or state.store in (True, False))
            loses_both = member in state.cut and state.store_lost
            assert knows or by_connection or by_store or loses_both, state
        if all(rank.ballot.iteration == LAST for rank in state.ranks):
            swapped += state.ranks[0].ballot.in_force == NEW
            stayed += state.ranks[0].ballot.in_force == OLD
    assert len(states) > 1000
    assert swapped
    assert stayed
