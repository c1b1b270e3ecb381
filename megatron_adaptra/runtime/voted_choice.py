"""Chooses for a group of ranks when all have reported an iteration, one change at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from megatron_adaptra.log import log_line
from megatron_adaptra.runtime.agreement import Proposal
from megatron_adaptra.runtime.bundle import Bundle
from megatron_adaptra.runtime.voted_log import D, VotedLog
from megatron_adaptra.runtime.voted_thread import Vote, VotedThread

RECENT = 64  # iterations whose reports may still come
PAUSE = 32  # iterations without a choice after one that was slower; then twice as many


class RankReport(Protocol):
    """What one rank has measured in one iteration. `rank`: its number in the group."""

    @property
    def rank(self) -> int: ...  # noqa: D102

    @property
    def iteration(self) -> int: ...  # noqa: D102


R = TypeVar("R", bound=RankReport)


class VotedChoice(VotedThread[R], Generic[R, D]):
    """Chooses for a group of so many `ranks`; runs at its leader.

    Args:
        ranks: how many report.
        log: of decisions.
        announce: decisions go to the log of the training, too; an attribute, too.

    `seen`: the last iteration that all ranks have reported.
    """

    def __init__(self, ranks: int, log: VotedLog[D], announce: bool = True) -> None:
        super().__init__()
        self.log, self.announce = log, announce
        self.seen = -1
        self._reporters = ranks
        self._rows: dict[int, dict[int, R]] = {}  # by iteration and rank
        self._pending: tuple[Proposal, D] | None = None
        self._pause, self._not_before = PAUSE, 0

    def close(self) -> None:
        """As for VotedThread; log the last outcome."""
        super().close()
        self.log.close()

    # On the thread.

    @abstractmethod
    def _on_row(self, iteration: int, row: Mapping[int, R]) -> None:
        """All ranks have reported an iteration."""

    @abstractmethod
    def _switched(self, decision: D) -> None:
        """A `decision` has come into force."""

    @abstractmethod
    def _sentence(self, decision: D) -> str:
        """It, for the log of the training."""

    def _begin(self, vote: Vote) -> None:
        """Nothing is recorded but decisions."""

    def _take(self, report: R) -> None:
        recent = range(self._vote.iteration - RECENT, self._vote.iteration + RECENT)
        if report.rank not in range(self._reporters) or report.iteration not in recent:
            return
        for old in [i for i in self._rows if i not in recent]:
            del self._rows[old]  # a rank does not report any more
        row = self._rows.setdefault(report.iteration, {})
        row[report.rank] = report
        if len(row) == self._reporters:
            del self._rows[report.iteration]
            self._on_row(report.iteration, row)
            self.seen = report.iteration

    def _can_propose(self, iteration: int) -> bool:
        """Whether something chosen after the reports of `iteration` may come into force."""
        return self._pending is None and self._vote.can_propose(iteration)

    def _wait_after(self, iteration: int) -> None:
        """What was in force was slower: choose nothing for a while, each time for twice as long."""
        self._not_before, self._pause = iteration + self._pause, 2 * self._pause

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
        self.log.close_vote(decision, committed)
        if committed:
            self._switched(decision)
            if self.announce:
                log_line(self._sentence(decision))
