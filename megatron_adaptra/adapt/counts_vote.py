"""How counts of microbatches come into force: with the vote of all ranks at an iteration's end.

Counts that the first rank proposes go to all ranks with the vote at the end of iteration i, whose
result they know when i + 1 begins. The counts are in force in i + 2, which ranks prepare at the end
of i + 1. So ranks neither answer nor wait: all learn of the counts at once, or the training is over
for all of them.
"""

from __future__ import annotations

import threading
from typing import Any

from megatron_adaptra.adapt.loop import Vote
from megatron_adaptra.agree.agreement import Proposal
from megatron_adaptra.agree.bundle import Bundle, ValueKind
from megatron_adaptra.base.errors import BadBundle
from megatron_adaptra.base.log import GOES_ON, LogOnce
from megatron_adaptra.ir.sync import SyncPlan, parse_sync


def _check_sync(plan: SyncPlan, now: SyncPlan) -> None:
    """Raise BadBundle for another number of replicas; each sample counts once in any SyncPlan."""
    if plan.replicas != now.replicas:
        raise BadBundle(f"it is for {plan.replicas} replicas; here are {now.replicas}")


# Where iterations have another number of microbatches than the plan, all replicas run as many.
SYNC = ValueKind("sync", lambda data: parse_sync(str(data)), _check_sync)
LEAD = 2  # iterations from the one at whose end ranks vote to the one in which counts are in force


class CountsVote(Vote):
    """A vote at the first rank, of one proposal at a time. `first`: the first iteration."""

    def __init__(self, first: int, in_force: Bundle) -> None:
        self.first, self._in_force = first, in_force
        self._begun = first - 1
        self._lock = threading.Lock()
        self._next = first  # the iteration whose vote has not begun
        self._number = 0
        self._open: Proposal | None = None
        self._once = LogOnce()

    # On the training thread.

    def take(self, iteration: int) -> tuple[int, ...] | None:
        """Begin the vote at the end of `iteration`; return the counts that go with it, if any."""
        with self._lock:
            self._next = iteration + 1
            proposal = self._open
        if proposal is None or proposal.swap != iteration + LEAD:
            return None
        return tuple(proposal.bundle[SYNC].counts)

    def begin(self, iteration: int, bundle: Bundle) -> Proposal | None:
        """Take note that all run `bundle` in `iteration`; return the proposal that this closes."""
        self._begun, self._in_force, proposal = iteration, bundle, self._open
        if proposal is None or proposal.committed is not None or proposal.swap > iteration:
            return None
        proposal.committed = proposal.bundle.digest == bundle.digest
        return proposal

    # On the thread of the loop.

    @property
    def in_force(self) -> Bundle:
        return self._in_force

    @property
    def iteration(self) -> int:
        return self._begun

    def can_propose(self, iteration: int) -> bool:
        return self._open is None

    def propose(self, iteration: int, bundle: Bundle) -> Proposal | None:
        with self._lock:
            if self._open is not None:
                return None
            self._open = Proposal(self._number, self._next + LEAD, bundle, "")
            self._number += 1
            return self._open

    def settle(self, proposal: Proposal) -> None:
        self._open = None

    def publish(self, status: dict[str, Any]) -> None:
        """Show nothing: charts have no `status` of counts."""

    def failed(self, what: str, error: Exception) -> None:
        how = f"{type(error).__name__}: {str(error)[:200]}"
        self._once.line(what, f" ({how}); {GOES_ON} with the counts in force")
