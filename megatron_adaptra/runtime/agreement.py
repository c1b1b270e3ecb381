"""All stages of a pipeline swap to a plan at the same iteration boundary, or none does.

Two-phase commit between the leader (stage 0) and the others, off the critical path:

1. the leader proposes a plan, as bytes with their digest, and the iteration S of the swap;
2. a stage that has read and checked it acknowledges; from then on it will not start iteration S
   without the decision;
3. the leader commits when all have acknowledged, and aborts when it reaches S before that.

So a stage waits at most once per replan, at S, and only if the decision is later than a whole
iteration. A stage that never got the proposal never acknowledged it, so nobody swaps.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from typing import Any

from megatron_adaptra.errors import Disagreement, ScheduleError
from megatron_adaptra.ir.check import check
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.schedule import Schedule

TRIAL = 5  # iterations of a trial


@dataclass
class Proposal:
    """A `schedule` to run from iteration `swap` on.

    `acks`: the ranks that have acknowledged it. `committed`: None while it is open.
    """

    number: int
    swap: int
    schedule: Schedule
    acks: set[int] = field(default_factory=set)
    committed: bool | None = None


def pack(number: int, swap: int, schedule: Schedule) -> dict[str, Any]:
    """The message that proposes `schedule` as proposal `number`, from iteration `swap` on."""
    plan = json.dumps(schedule.to_json(), sort_keys=True)
    digest = hashlib.sha256(plan.encode()).hexdigest()
    return {"kind": "propose", "number": number, "swap": swap, "plan": plan, "digest": digest}


def unpack(message: dict[str, Any], stages: int, microbatches: int) -> Proposal:
    """The proposal in a `message` for a pipeline of `stages` and so many `microbatches`.

    Raises ScheduleError for one that must not run: damaged, of another shape, or unable to finish.
    """
    plan = message["plan"]
    if hashlib.sha256(plan.encode()).hexdigest() != message["digest"]:
        raise ScheduleError(f"plan {message['number']}: its bytes do not match their digest")
    schedule = Schedule.from_json(json.loads(plan))
    if (schedule.stages, schedule.microbatches) != (stages, microbatches):
        raise ScheduleError(
            f"plan {message['number']} is for {schedule.stages} stages and "
            f"{schedule.microbatches} microbatches; here are {stages} and {microbatches}"
        )
    check(lower(schedule))
    return Proposal(message["number"], message["swap"], schedule)


class Ballot:
    """One stage's side: at most one open proposal, and the `schedule` in force.

    `decide` is called by the control thread, `at_boundary` by the training thread. `opening`: runs
    instead before iteration `until`, which everybody knows, so that it takes no vote.
    """

    def __init__(self, schedule: Schedule, opening: Schedule | None = None, until: int = 0) -> None:
        self.schedule = opening or schedule  # in force
        self._afterwards = None if opening is None else schedule
        self._until = until
        self.iteration = -1  # the last one started
        self._open: Proposal | None = None
        self._leaderless = False
        self._changed = threading.Condition()

    @property
    def lasting(self) -> Schedule:
        """What is in force, or will be when an opening is over."""
        return self._afterwards or self.schedule

    @property
    def opening(self) -> bool:
        """Whether what is in force goes without a vote."""
        return self._afterwards is not None

    def offer(self, proposal: Proposal) -> bool:
        """Keep a proposal for its iteration; False when that has begun, or another is open."""
        with self._changed:
            if self._open is not None or proposal.swap <= self.iteration:
                return False
            self._open = proposal
            return True

    def decide(self, number: int, commit: bool) -> None:
        """Commit proposal `number` if `commit`, else abort it; nothing if it is not open."""
        with self._changed:
            if self._open is not None and self._open.number == number:
                if self._open.committed is None:
                    self._open.committed = commit
                self._changed.notify_all()

    def lose_leader(self) -> None:
        """No decision will come any more."""
        with self._changed:
            self._leaderless = True
            self._changed.notify_all()

    def at_boundary(self, iteration: int, timeout: float, leads: bool) -> Proposal | None:
        """Start `iteration`; the proposal that is closed by that, if any.

        The leader (`leads`) does not wait: reaching the swap without all acknowledgements is its
        abort. Others wait `timeout` seconds for its decision on a proposal for this iteration.
        Raises Disagreement when none comes, or can come no more.
        """
        with self._changed:
            self.iteration = iteration
            if self._afterwards is not None and iteration >= self._until:
                self.schedule, self._afterwards = self._afterwards, None
            proposal = self._open
            if proposal is None or proposal.swap > iteration:
                return None
            if leads and proposal.committed is None:
                proposal.committed = False
            self._changed.wait_for(
                lambda: proposal.committed is not None or self._leaderless, timeout
            )
            if proposal.committed is None:
                why = "it is gone" if self._leaderless else f"waited {timeout:g} s"
                raise Disagreement(
                    f"no decision on plan {proposal.number} from stage 0 "
                    f"at iteration {iteration}: {why}"
                )
            self._open = None
            if proposal.committed:
                self.schedule, self._afterwards = proposal.schedule, None
            return proposal


def starting_ballot(
    schedule: Schedule, resumed: Schedule | None, trial: Schedule | None, first: int
) -> Ballot:
    """What to begin iteration `first` with: `resumed`, from a checkpoint, if there is one.

    Else `schedule`, but a few iterations of `trial`, if any, which tells its ops' costs.
    """
    return Ballot(resumed) if resumed else Ballot(schedule, trial, first + TRIAL)
