"""A thread that takes reports beside a training, and puts what it concludes to the vote."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from megatron_adaptra import waits
from megatron_adaptra.runtime.agreement import Proposal
from megatron_adaptra.runtime.bundle import Bundle
from megatron_adaptra.runtime.controller import MOST_JOBS


class Vote(Protocol):
    """By which all ranks agree on what is proposed: a Leader, or a CountsVote.

    The planning thread calls it. A method waits for torch's store at most,
    twice `waits.STORE` seconds.
    """

    first: int  # the first iteration of this run

    @property
    def in_force(self) -> Bundle:
        """What all ranks run now."""
        ...

    @property
    def iteration(self) -> int:
        """The last one that has begun."""
        ...

    def can_propose(self, iteration: int) -> bool:
        """Whether a proposal made after the reports of `iteration` may come into force."""
        ...

    def propose(self, iteration: int, bundle: Bundle) -> Proposal | None:
        """Propose to all ranks a bundle to swap to, some iterations from now.

        Args:
            iteration: whose reports have led to it.
            bundle: read by each rank before it answers; it comes into force whole, or not at all.

        Returns:
            The open proposal; None if nothing can be proposed now. `ReplanLoop.closed` gets it when
            training has reached its swap, with `committed` set.
        """
        ...

    def settle(self, proposal: Proposal) -> None:
        """A proposal is over: the next one may be made."""
        ...

    def publish(self, status: dict[str, Any]) -> None:
        """Show `status` in the charts of the training from now on."""
        ...

    def failed(self, what: str, error: Exception) -> None:
        """Log, once, that `what` has failed."""
        ...

    def note(self, text: str) -> None:
        """Log `text`, once."""
        ...


R = TypeVar("R")


class VotedThread(ABC, Generic[R]):
    """Concludes from reports what all ranks shall run, while training goes on.

    No error leaves the thread: it costs a change, and is logged once.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[R | Proposal | threading.Event | None]
        self._queue = queue.SimpleQueue()
        self._vote: Vote

    # Called by any thread.

    def start(self, vote: Vote) -> None:
        """Begin to plan for a `vote` that is about to begin."""
        self._vote = vote
        self._begin(vote)
        self._thread = threading.Thread(target=self._plan, name="adaptra-planner", daemon=True)
        self._thread.start()

    def report(self, report: R) -> None:
        """Take the `report` of one rank; it is dropped where too many wait."""
        if self._queue.qsize() < MOST_JOBS:
            self._queue.put(report)

    @abstractmethod
    def begins(self, iteration: int, bundle: Bundle) -> None:
        """All ranks run `bundle` in `iteration`."""

    def closed(self, proposal: Proposal) -> None:
        """Training has reached the swap of a `proposal`: it is in force, or will never be."""
        self._queue.put(proposal)

    def drain(self, timeout: float = 30.0) -> None:
        """Wait until all reports so far are dealt with, but no longer than `timeout` seconds."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(timeout)

    def close(self) -> None:
        """End the thread, for which this waits `waits.CLOSE` at most."""
        self._queue.put(None)
        self._thread.join(waits.CLOSE)

    # On the thread.

    @abstractmethod
    def _begin(self, vote: Vote) -> None:
        """A run begins: write that into its record. Before the thread is there."""

    @abstractmethod
    def _take(self, report: R) -> None:
        """One rank has reported an iteration."""

    @abstractmethod
    def _close(self, proposal: Proposal) -> None:
        """A proposal is over."""

    def _plan(self) -> None:
        """The thread. An error in it costs a change, not the training."""
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, threading.Event):
                    item.set()
                elif isinstance(item, Proposal):
                    self._close(item)
                else:
                    self._take(item)
            except Exception as error:
                self._vote.failed("a replan has failed", error)
