"""Chooses for a group of ranks from what they have measured, one change at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from megatron_adaptra.log import log_line
from megatron_adaptra.runtime.agreement import Proposal
from megatron_adaptra.runtime.bundle import Bundle
from megatron_adaptra.runtime.trial import Backoff, Trial
from megatron_adaptra.runtime.voted_log import D, VotedLog
from megatron_adaptra.runtime.voted_thread import Vote, VotedThread

RECENT = 64  # iterations whose reports may still come
_RETRIED = ": tried again"


R = TypeVar("R")


class VotedChoice(VotedThread[R], Generic[R, D]):
    """Chooses for a group of ranks; runs at its leader.

    Args:
        log: of decisions.
        announce: decisions go to the log of the training, too; an attribute, too.

    `seen`: the last iteration that is known of all ranks, and dealt with.
    """

    def __init__(self, log: VotedLog[D], announce: bool = True) -> None:
        super().__init__()
        self.log, self.announce = log, announce
        self.seen = -1
        self._pending: tuple[Proposal, D] | None = None
        self._backoff = Backoff()
        self._trial: Trial | None = None  # of what is in force
        # From which iteration on to choose again although nothing has changed; why, in words.
        self._again: tuple[int, str] | None = None

    def close(self) -> None:
        """As for VotedThread; log the last outcome."""
        super().close()
        self.log.close()

    # On the thread.

    @abstractmethod
    def _switched(self, decision: D) -> None:
        """A `decision` has come into force."""

    @abstractmethod
    def _sentence(self, decision: D) -> str:
        """It, for the log of the training."""

    def _begin(self, vote: Vote) -> None:
        """Nothing is recorded but decisions."""

    def _can_propose(self, iteration: int) -> bool:
        """Whether something chosen after the reports of `iteration` may come into force."""
        return self._pending is None and self._vote.can_propose(iteration)

    def _due(self, iteration: int) -> bool:
        """Whether it is time in `iteration` to choose again although nothing has changed."""
        return self._again is not None and iteration >= self._again[0]

    def _put_to_vote(self, iteration: int, bundle: Bundle, decide: Callable[[int], D]) -> None:
        """Propose a `bundle` after the reports of `iteration`, if that can be now.

        `decide`: the decision on it, by the first iteration with it.
        """
        proposal = self._vote.propose(iteration, bundle)
        if proposal is not None:
            decision = decide(proposal.swap)
            self._pending = proposal, decision
            self.log.add(decision)

    def _close(self, proposal: Proposal) -> None:
        self._vote.settle(proposal)
        closing, self._pending = self._pending, None
        if closing is None or closing[0] is not proposal:
            return
        decision, committed = closing[1], bool(proposal.committed)
        before = self.log.last
        self.log.close_vote(decision, committed)
        if committed:
            self._trial = self._again = None
            if decision.again is not None and before is not None:
                self._again = decision.again, before.why.removesuffix(_RETRIED) + _RETRIED
            self._switched(decision)
            if self.announce:
                log_line(self._sentence(decision))
