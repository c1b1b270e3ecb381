"""One rank's side of reductions that stay with torch's backend on a GPU: measured, and no more."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.reductions.controls import controller_of, loop_of
from megatron_adaptra.adapt.reductions.decisions import ReductionDecision, ranks_in_words
from megatron_adaptra.adapt.reductions.remedy import ReductionRemedy
from megatron_adaptra.agree.agreed_value import agreed_value
from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.agree.reductions import ALL_REDUCE, GroupReduction
from megatron_adaptra.base import waits
from megatron_adaptra.device.base import Device, Mark
from megatron_adaptra.execute.planned.arrival_messages import ArrivalMessages, seen_by_rank
from megatron_adaptra.execute.planned.connected import Connected
from megatron_adaptra.measure.reduction_report import ReductionReport
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Buffers

MESHES = ("control", "arrivals")  # connections of its own: see Connected.between


@dataclass
class _Reduction:
    """A reduction holds one iteration's marks on the training's stream, and what was reduced."""

    iteration: int
    first: Mark | None = None
    last: Mark | None = None
    end: Mark | None = None
    nbytes: int = 0
    last_bytes: int = 0
    count: int = 0
    ends: int = 0


class ObservedReductions:
    """An observed all-reduce has the methods of AdaptiveReductions, but never votes on a change.

    Moments are marks on the stream, known once the GPU has passed them. What an iteration has shown
    goes to the other ranks in the next one, and to the leader in the one after that, when the
    messages of all of them have come: a step of the optimizer is between.

    `late`: as of AdaptiveReductions.

    Args:
        connected: between the group's ranks, with MESHES.
        me: this rank's number in the group.
        ranks: global ranks of the group.
        device: the one that the gradients are on.
        backend: the name of torch's.
        min_gain: share of an iteration that a plan has to save to be named.
        timeout: seconds, as of AdaptiveReductions.
        log: file of decisions, of which there are none; None for none.
        sharded, overlaps: as of AdaptiveReductions.
    """

    def __init__(
        self,
        connected: Connected,
        me: int,
        ranks: tuple[int, ...],
        device: Device,
        backend: str,
        min_gain: float,
        timeout: float,
        log: Path | None = None,
        sharded: bool = False,
        overlaps: bool = False,
    ) -> None:
        self._connected, self._me, self._ranks, self._device = connected, me, ranks, device
        self._guard = Guard(f"measuring reductions of {ranks_in_words(ranks)} at rank {ranks[me]}")
        self._overlaps = overlaps
        self._value = GroupReduction(Choice(len(ranks), sharded=sharded))
        self._iteration, self._now = -1, _Reduction(-1)
        self._expected = 0  # buffers, by the iteration before
        self._arrived: float | None = None  # the moment of the one before
        self._ended: float | None = None  # ... and of its end
        self._held: ReductionReport | None = None  # whose messages are on their way
        self.late: dict[int, float] = {}
        meshes = connected.meshes
        self._arrivals: ArrivalMessages | None = self._guard.call(
            ArrivalMessages, meshes["arrivals"], me, len(ranks)
        )
        self._controller = controller_of(
            meshes["control"], me, ranks, self._value, timeout,
            lambda: ReductionRemedy(
                ranks, min_gain, DecisionLog(ReductionDecision, log), stays=f"with {backend}"
            ),
        )  # fmt: skip

    # On the training thread.

    def ready(self) -> GroupReduction:
        """Begin an iteration, before its first reduction. Returns the backend's own all-reduce.

        Raises:
            Disagreement, PeerLost: as AdaptiveReductions; nothing is voted on, so that none comes.
        """
        self._iteration += 1
        agreed_value(self._guard, self._controller, self._iteration, ALL_REDUCE, self._value)
        self._guard.call(self._next)
        return self._value

    def _next(self) -> None:
        self._device.anchor()
        done, self._now = self._now, _Reduction(self._iteration)
        self._expected = done.count
        if done.iteration >= 0:
            self._passed(done)

    def _passed(self, done: _Reduction) -> None:
        """Send what the iteration before has shown; report the one before it."""
        assert self._arrivals is not None
        first, last, end = (_moment(mark) for mark in (done.first, done.last, done.end))
        self._arrivals.were_ready(done.iteration, self._value.mark, first)
        if self._held is not None:
            self._guard.later(self._report, self._held)
        before, self._arrived = self._arrived, first
        ended, self._ended = self._ended, end
        if first is None or last is None:
            self._held = None
            return
        overlap = last - first if self._overlaps else 0.0
        self._held = ReductionReport(
            self._me, done.iteration, done.nbytes,
            seconds=None if end is None else end - first,
            period=None if before is None else first - before,
            between=None if ended is None else first - ended,
            buffers=Buffers(max(1, done.count), overlap, done.last_bytes),
        )  # fmt: skip

    @property
    def value(self) -> GroupReduction:
        """The all-reduce that runs: always the backend's own."""
        return self._value

    def started(self, nbytes: int) -> None:
        """Record that a buffer of this iteration, of `nbytes`, is about to be reduced."""
        self._guard.call(self._starts, nbytes)

    def _starts(self, nbytes: int) -> None:
        now = self._now
        now.last, now.last_bytes = self._device.mark(), nbytes
        now.first = now.first or now.last
        now.nbytes += nbytes
        now.count += 1

    def ended(self) -> None:
        """Record that the stream waits for a buffer that was started."""
        self._guard.call(self._ends)

    def _ends(self) -> None:
        now = self._now
        now.ends += 1
        if now.ends >= self._expected:  # the last one counts
            now.end = self._device.mark()

    def gathered(self) -> None:
        """Do nothing: gathers are not measured here."""

    def hidden(self, seconds: float) -> None:
        """Do nothing: `seconds` that pass on the host are not those that a GPU waits."""

    def check(self) -> None:
        """Do nothing: all ranks run the backend's own all-reduce."""

    @property
    def loop(self) -> Loop[ReductionRemedy] | None:
        """The loop that evaluates the figures, at the group's first rank; None at others."""
        return loop_of(self._controller)

    # On the guard's thread.

    def _report(self, held: ReductionReport) -> None:
        seen = {} if self._arrivals is None else self._arrivals.seen(held.iteration)
        self.late = seen_by_rank(seen, self._me, self._ranks)
        self._controller.hand_in(replace(held, seen=seen))

    def close(self) -> None:
        """End measuring, and the connections."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._connected.close)
            stack.callback(self._guard.close, waits.END)
            stack.callback(self._guard.attempt, waits.END, self._controller.close)


def _moment(mark: Mark | None) -> float | None:
    return None if mark is None else mark.at()
