"""All stages of a pipeline swap to a plan at the same iteration boundary, or none does.

Two-phase commit between the leader (stage 0) and the others, off the critical path:

1. the leader proposes a plan, as bytes with their digest, and the iteration S of the swap;
2. a stage that has read and checked it acknowledges; from then on it will not start iteration S
   without the verdict;
3. the leader commits when all have acknowledged, and aborts when it reaches S before that.

So a stage waits at most once per replan, at S, and only if the verdict is later than a whole
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


@dataclass
class Proposal:
    """`verdict`: None while open, then whether it was committed."""

    number: int
    swap: int
    schedule: Schedule
    acks: set[int] = field(default_factory=set)
    verdict: bool | None = None


def pack(number: int, swap: int, schedule: Schedule) -> dict[str, Any]:
    """The message that proposes `schedule`."""
    plan = json.dumps(schedule.to_json(), sort_keys=True)
    digest = hashlib.sha256(plan.encode()).hexdigest()
    return {"kind": "propose", "number": number, "swap": swap, "plan": plan, "digest": digest}


def unpack(message: dict[str, Any], stages: int, microbatches: int) -> Proposal:
    """The proposal in a message; raises ScheduleError for one that must not run."""
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
    """One stage's side: at most one open proposal, and the plan in force.

    `decide` is called by the control thread, `at_boundary` by the training thread. `opening`: runs
    instead until iteration `until`, which everybody knows, so that it takes no vote.
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

    def decide(self, number: int, verdict: bool) -> None:
        with self._changed:
            if self._open is not None and self._open.number == number:
                if self._open.verdict is None:
                    self._open.verdict = verdict
                self._changed.notify_all()

    def lose_leader(self) -> None:
        """The leader is gone: no verdict will come."""
        with self._changed:
            self._leaderless = True
            self._changed.notify_all()

    def at_boundary(self, iteration: int, timeout: float, leads: bool) -> Proposal | None:
        """Start `iteration`; the proposal whose fate was settled by that, if any.

        The leader does not wait: reaching the swap without all acknowledgements is its abort.
        Raises Disagreement when no verdict comes in `timeout` seconds, or can come no more.
        """
        with self._changed:
            self.iteration = iteration
            if self._afterwards is not None and iteration >= self._until:
                self.schedule, self._afterwards = self._afterwards, None
            proposal = self._open
            if proposal is None or proposal.swap > iteration:
                return None
            if leads and proposal.verdict is None:
                proposal.verdict = False
            self._changed.wait_for(
                lambda: proposal.verdict is not None or self._leaderless, timeout
            )
            if proposal.verdict is None:
                why = "it is gone" if self._leaderless else f"waited {timeout:g} s"
                raise Disagreement(
                    f"no verdict on plan {proposal.number} from stage 0 "
                    f"at iteration {iteration}: {why}"
                )
            self._open = None
            if proposal.verdict:
                self.schedule, self._afterwards = proposal.schedule, None
            return proposal
