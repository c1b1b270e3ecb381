"""All ranks that vote swap to a bundle at the same iteration boundary, or none does.

Two-phase commit between the leader (stage 0) and the others, off the critical path:

1. the leader proposes a bundle, as text with its digest, and the iteration S of the swap;
2. a member that has read and checked it, and that can read the store (torch's key-value store),
   acknowledges with the digest of what it has read; from then on it will not start iteration S
   without the decision;
3. the leader commits when all have acknowledged its own digest, and aborts when it reaches S before
   that.

The leader's decision goes to each member over its connection, and into the store. A member that
stands at S without it takes it from wherever it comes first.

Why nobody runs another bundle than the rest, whatever is lost, late, or sent twice:

- One process decides, once: `Ballot.acknowledge` (the last yes: commit; any no: abort) and
  `Ballot.at_boundary` (abort) are the only places, under one lock, and what is decided stays.
  Connection and store only carry it, so they cannot contradict each other.
- Commit needs the yes of every member, so every member has the bundle, and each stops at S until it
  knows the decision. The leader itself knows it at S, as it decides there at the latest.
- Where a bundle needs connections that are not there (several replicas in one plan), a member opens
  its own before it says yes, and the leader has a vote of its own, which it casts when it has
  opened its: so nobody begins S without them.
- A member that has not agreed is no reason to wait: without its yes the decision is abort, and
  without the plan it goes on as it was.

Why nobody waits in vain: the leader never waits for anybody, and it reaches S with the others, as
it is a stage of their pipeline. Then its decision is under way by two ways that fail apart. A
member has used both just before it agreed: the connection brought the proposal, and the store was
read. Only who loses both in the one or two iterations until S ends with Disagreement: to guess
would run two orders inside one tensor-parallel group, which gives wrong numbers and no error. A
leader that dies ends the training in any case.

So a member waits at most once per replan, at S, and only if the decision is later than a whole
iteration.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_adaptra.agree.bundle import (
    LINKS,
    SCHEDULE,
    Bundle,
    Links,
    Value,
    ValueKind,
    digest_of,
)
from megatron_adaptra.agree.store import KeyValueStore
from megatron_adaptra.base.errors import BadBundle, Disagreement
from megatron_adaptra.ir.schedule import Schedule

TRIAL = 5  # iterations of a trial
LONGEST_SWAP_LEAD = 64  # iterations between a proposal and its swap
SLOTS = 8  # decisions that the store keeps: no member is that many proposals behind the leader


@dataclass
class Proposal:
    """A `bundle` that comes into force with iteration `swap`.

    `key`: of the decision, in the store. `acks`: the ranks that have acknowledged it. `committed`:
    None while it is open.
    """

    number: int
    swap: int
    bundle: Bundle
    key: str = ""
    acks: set[int] = field(default_factory=set)
    committed: bool | None = None


class DecisionStore:
    """A decision store holds the leader's decisions for members whose connection is lost."""

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store

    def write(self, proposal: Proposal) -> bool:
        """Write that a proposal is open, or its decision; return False if that may have failed."""
        return self._store.put(proposal.key, f"{proposal.number} {proposal.committed}")

    def reaches(self, proposal: Proposal) -> bool:
        """Return whether an open proposal is in the store: then its decision can be read there."""
        return self._store.get(proposal.key) == f"{proposal.number} None"

    def decision(self, proposal: Proposal) -> bool | None:
        """Return the decision that the leader has written; None without one that can be read."""
        words = {f"{proposal.number} {commit}": commit for commit in (True, False)}
        return words.get(self._store.get(proposal.key) or "")


def pack(proposal: Proposal) -> dict[str, Any]:
    """Return the message that makes the `proposal`."""
    bundle = proposal.bundle
    return {
        "kind": "propose", "number": proposal.number, "swap": proposal.swap, "bundle": bundle.text,
        "digest": bundle.digest, "key": proposal.key,
    }  # fmt: skip


def unpack(message: dict[str, Any], in_force: Bundle) -> Proposal:
    """Return the proposal in a `message`, which may follow the bundle `in_force`.

    Raises BadBundle, or another AdaptraError, for one that must not: damaged, of another shape, or
    unable to finish.
    """
    text, number = message["bundle"], message["number"]
    if digest_of(text) != message["digest"]:
        raise BadBundle(f"proposal {number}: its bytes do not match their digest")
    return Proposal(number, message["swap"], in_force.read(text), message["key"])


class Ballot:
    """A ballot holds one rank's side of the vote: an open proposal, and the bundle `in_force`.

    `decide` and `acknowledge` are called by control threads, `at_boundary` by the training thread.
    `first`: the bundle in force at first. `opening`: one in its place before iteration `until`,
    without a vote, as all ranks know it.
    """

    def __init__(self, first: Bundle, opening: Bundle | None = None, until: int = 0) -> None:
        self.in_force = opening or first
        self._afterwards = None if opening is None else first
        self._until = until
        self.iteration = -1  # the last one started
        self._open: Proposal | None = None
        self._changed = threading.Condition()

    @property
    def schedule(self) -> Schedule:
        """The schedule in force."""
        return self.in_force[SCHEDULE]

    @property
    def lasting(self) -> Bundle:
        """The bundle in force, or the one that follows when an opening is over."""
        return self._afterwards or self.in_force

    @property
    def opening(self) -> bool:
        """True while the opening is in force, which ends without a vote."""
        return self._afterwards is not None

    @property
    def voting(self) -> bool:
        """True while a proposal is open here."""
        return self._open is not None

    def offer(self, proposal: Proposal) -> bool:
        """Keep a proposal for its iteration; False if that is out of range, or another is open."""
        with self._changed:
            ahead = proposal.swap - self.iteration
            if self._open is not None or not 0 < ahead <= 2 * LONGEST_SWAP_LEAD:
                return False
            self._open = proposal
            return True

    def refuses(self, swap: int) -> bool:
        """Return whether the proposal for iteration `swap` is aborted, and not yet closed."""
        with self._changed:
            proposal = self._open
            return proposal is not None and proposal.swap == swap and proposal.committed is False

    def decide(self, number: int, commit: bool) -> None:
        """Commit proposal `number` if `commit`, else abort it; nothing if it is not open."""
        with self._changed:
            if self._open is not None and self._open.number == number:
                if self._open.committed is None:
                    self._open.committed = commit
                self._changed.notify_all()

    def acknowledge(self, number: int, member: int, digest: str, voters: int) -> Proposal | None:
        """Count an answer to proposal `number` at the leader; return the proposal if decided now.

        `member`: of so many `voters`. `digest`: of the bundle as this member has read it, empty
        where it refuses it. One that differs is a refusal.
        """
        with self._changed:
            proposal = self._open
            if proposal is None or proposal.number != number or proposal.committed is not None:
                return None
            proposal.acks.add(member)
            agrees = digest == proposal.bundle.digest
            if agrees and len(proposal.acks) < voters:
                return None
            proposal.committed = agrees
            return proposal

    def at_boundary(
        self,
        iteration: int,
        timeout: float,
        leads: bool,
        look_up: Callable[[Proposal], None] = lambda _: None,
    ) -> Proposal | None:
        """Start `iteration`; return the proposal that this closes, if any.

        The leader (`leads`) does not wait: reaching the swap without all acknowledgements is its
        abort. Others wait `timeout` seconds for its decision on a proposal for this iteration, and
        `look_up` is called once, to look elsewhere for it. Raises Disagreement when none comes.
        """
        with self._changed:
            self.iteration = iteration
            if self._afterwards is not None and iteration >= self._until:
                self.in_force, self._afterwards = self._afterwards, None
            proposal = self._open
            if proposal is None or proposal.swap > iteration:
                return None
            if leads and proposal.committed is None:
                proposal.committed = False
            if proposal.committed is None:
                look_up(proposal)
                self.await_decision(proposal, timeout)
            if proposal.committed is None:
                raise Disagreement(
                    f"no decision on proposal {proposal.number} at iteration {iteration}: waited "
                    f"{timeout:g} s for stage 0, whose word came neither directly nor by the store"
                )
            self._open = None
            if proposal.committed:
                self.in_force = self.lasting.replaced_by(proposal.bundle)
                self._afterwards = None
            return proposal

    def await_decision(self, proposal: Proposal, timeout: float) -> bool:
        """Wait `timeout` seconds at most until a proposal is decided; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: proposal.committed is not None, timeout)


def starting_ballot(
    schedule: Schedule,
    resumed: Schedule | None = None,
    trial: Schedule | None = None,
    first: int = 0,
    links: Links | None = None,
) -> Ballot:
    """Make the ballot for iteration `first`, with `resumed`, from a checkpoint, if there is one.

    Else with `schedule`, after TRIAL iterations of `trial`, if any, which shows its ops' costs.
    `links`: between replicas, where they have one plan.
    """
    beside: dict[ValueKind[Any], Value] = {} if links is None else {LINKS: links}

    def bundle(one: Schedule) -> Bundle:
        return Bundle({SCHEDULE: one, **beside})

    if resumed is not None or trial is None:
        return Ballot(bundle(resumed or schedule))
    return Ballot(bundle(schedule), bundle(trial), first + TRIAL)
