"""One rank's side of an all-reduce that is found and chosen while training."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.reductions.controls import controller_of, loop_of
from megatron_adaptra.adapt.reductions.decisions import ReductionDecision, ranks_in_words
from megatron_adaptra.adapt.reductions.remedy import ReductionRemedy
from megatron_adaptra.agree.agreed_value import agreed_value
from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.agree.reductions import ALL_REDUCE, GroupReduction
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import Disagreement
from megatron_adaptra.execute.planned.arrival_messages import ArrivalMessages, seen_by_rank
from megatron_adaptra.execute.planned.connected import Connected
from megatron_adaptra.execute.planned.measured_iterations import MeasuredIterations
from megatron_adaptra.execute.planned.path_probes import PathProbes
from megatron_adaptra.measure.reduction_report import ReductionReport
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Buffers

# Iterations after which all paths are measured, and then one of so many: all ranks measure these.
PROBED, PROBED_EVERY = range(1, 6), 32
_PROBES = 0.01  # share of the bytes of reductions, each of which crosses a port twice
MESHES = ("control", "arrivals", "probes")  # connections of its own: see Connected.between


class AdaptiveReductions:
    """An adaptive all-reduce measures each iteration's reduction, and keeps what all ranks run.

    An iteration begins with `ready`; each buffer that is reduced in it is `started` and `ended`, by
    whatever way. Those that are `gathered` afterwards are over before paths are measured. What
    fails in measuring and choosing ends that alone: what is in force stays, on all ranks.

    `late`: by global rank, seconds by which it came to the last known reduction after the first
    ranks; as this rank sees it, so the delay of its message is included.

    Args:
        connected: between the group's ranks, with MESHES.
        me: this rank's number in the group.
        ranks: global ranks of the group.
        min_gain: share of an iteration that a plan has to save.
        timeout: seconds that a decision is waited for.
        log: file of decisions; None for none.
        sharded: it is a reduce-scatter into equal shards, and an all-gather afterwards.
        overlaps: buffers become ready, and are reduced, while others are computed.
    """

    def __init__(
        self,
        connected: Connected,
        me: int,
        ranks: tuple[int, ...],
        min_gain: float,
        timeout: float,
        log: Path | None = None,
        sharded: bool = False,
        overlaps: bool = False,
    ) -> None:
        self._connected, self._me, self._ranks = connected, me, ranks
        self._guard = Guard(f"the all-reduce of {ranks_in_words(ranks)} at rank {ranks[me]}")
        self._lock = threading.Lock()
        self._iteration = -1
        self._value = GroupReduction(Choice(len(ranks), sharded=sharded))
        self._arrived = 0.0
        self._ended: float | None = None  # the moment, if it is known
        self._period: float | None = None
        self._between: float | None = None  # seconds from the last end to this arrival
        self._sent = False  # this iteration is measured
        self._calls = self._expected = self._open = self._nbytes = 0
        self._overlaps = overlaps
        self._started = 0.0, 0.0  # when the first buffer and the last one were
        self._last = 0  # bytes of the last one
        self._gathers = self._expected_gathers = 0
        self._hidden = list[float]()  # seconds of each gather that a forward hides, ...
        self._hides = 0.0  # ... and the mean of those before, but for the first one's
        self._reported = True
        self._held: ReductionReport | None = None  # without what it sees
        self.late: dict[int, float] = {}
        # What changes by less than half of what a plan has to save will not lead to one.
        self._measured = MeasuredIterations(min_gain / 2)
        meshes = connected.meshes
        self._probes = PathProbes(meshes["probes"], me, len(ranks))
        self._arrivals: ArrivalMessages | None = self._guard.call(
            ArrivalMessages, meshes["arrivals"], me, len(ranks)
        )
        self._controller = controller_of(
            meshes["control"], me, ranks, self._value, timeout,
            lambda: ReductionRemedy(ranks, min_gain, DecisionLog(ReductionDecision, log)),
        )  # fmt: skip
        connected.exchange.check = self.check

    # On the training thread.

    def ready(self) -> GroupReduction:
        """Begin an iteration, whose first gradients are ready. Returns what runs in it.

        Raises:
            Disagreement: no decision came on what this rank has agreed to, or a rank was found to
                run something else.
            PeerLost: as Exchange.
        """
        if not self._reported:  # it has no end of its own
            self._guard.call(self._ends, None)
        self.check()
        self._guard.call(self._release)
        with self._lock:
            self._iteration += 1
            if self._calls:
                self._expected = self._calls
            self._expected_gathers, self._gathers = self._gathers, 0
            if self._hidden:
                _, *others = sorted(self._hidden)
                self._hides, self._hidden = mean(others or [0.0]), []
            self._calls = self._open = self._nbytes = 0
            self._reported = False
        before, self._value = self._value, self._agreed()
        self._guard.call(self._begins, before)
        return self._value

    def _agreed(self) -> GroupReduction:
        guard, controller = self._guard, self._controller
        return agreed_value(guard, controller, self._iteration, ALL_REDUCE, self._value)

    def _begins(self, ran: GroupReduction) -> None:
        """Begin an iteration after one that ran `ran`; if it is measured, send the moment."""
        assert self._arrivals is not None
        measured, iteration, mark = self._measured, self._iteration, self._value.mark
        if not self._sent:  # else `check` has looked
            self._arrivals.look()
        if self._value != ran or self._controller.ballot.voting or not self._native:
            measured.wake(iteration)
        measured.until = max(measured.until, self._arrivals.until)
        before, ended = self._arrived, self._ended
        self._sent = iteration in measured
        if self._sent:
            self._arrived = self._arrivals.ready(iteration, mark, measured.until)
        else:
            self._arrived = self._arrivals.left_out(iteration, mark)
        self._period = self._arrived - before if before else None
        self._between = None if ended is None else self._arrived - ended

    @property
    def _native(self) -> bool:
        return self._value.choice.native

    @property
    def value(self) -> GroupReduction:
        """The all-reduce that runs from one `ready` to the next one."""
        return self._value

    def started(self, nbytes: int) -> None:
        """Record that a buffer of this iteration, of `nbytes`, is being reduced."""
        now = time.monotonic()
        with self._lock:
            self._started = self._started[0] if self._calls else now, now
            self._last = nbytes
            self._calls += 1
            self._open += 1
            self._nbytes += nbytes

    def ended(self) -> None:
        """Record that a buffer that was started holds its result. On any thread."""
        now = time.monotonic()
        with self._lock:
            self._open -= 1
            over = not self._open and self._calls == self._expected and not self._reported
        if over:
            self._guard.call(self._ends, now)

    def gathered(self) -> None:
        """Record that a buffer has been gathered, or that the end of its gather is not known.

        On any thread.
        """
        with self._lock:
            self._gathers += 1
            over = self._gathers >= self._expected_gathers and self._held is not None
        if over:
            self._guard.call(self._release)

    def hidden(self, seconds: float) -> None:
        """Record that a forward has computed `seconds` since an all-gather began, and now waits.

        They count as hidden seconds of the all-gather, which may have ended before.
        """
        with self._lock:
            self._hidden.append(seconds)

    def check(self) -> None:
        """Raise Disagreement if a rank was found to run something else in this iteration."""
        arrivals = self._arrivals
        if arrivals is None or self._guard.off:
            return
        if self._sent:  # else there are no messages of it
            self._guard.call(arrivals.seen, self._iteration)
        if arrivals.differs is not None:
            rank, iteration = arrivals.differs
            raise Disagreement(
                f"rank {self._ranks[rank]} reduces its gradients by something else than rank "
                f"{self._ranks[self._me]} in iteration {iteration}, which runs "
                f"{self._value.choice}: it has not switched with the others"
            )

    def _ends(self, now: float | None) -> None:
        """Report this iteration's reduction, which has ended at `now` if that is known."""
        with self._lock:
            if self._reported:
                return
            self._reported = True
            self._ended = now
            seconds = None if now is None or not self._arrived else now - self._arrived
            if self._native and seconds is not None and self._period is not None:
                self._measured.ended(self._iteration, seconds, self._period)
            if not self._sent:
                return
            first, last = self._started
            overlap = last - first if self._overlaps else 0.0
            gathered = max(1, self._expected_gathers)
            self._held = ReductionReport(
                self._me, self._iteration, self._nbytes, seconds=seconds, period=self._period,
                between=self._between,
                buffers=Buffers(max(1, self._calls), overlap, self._last, gathered, self._hides),
            )  # fmt: skip
            gathers = self._gathers < self._expected_gathers
        if not gathers:  # else ports are not idle yet
            self._release()

    def _release(self) -> None:
        """Send the report that was held back until ports are idle."""
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            self._guard.later(self._report, held)

    @property
    def loop(self) -> Loop[ReductionRemedy] | None:
        """The loop that chooses the all-reduce, at the group's first rank; None at others."""
        return loop_of(self._controller)

    # On the guard's thread.

    def _report(self, ended: ReductionReport) -> None:
        iteration = ended.iteration
        seen = {} if self._arrivals is None else self._arrivals.seen(iteration)
        self.late = seen_by_rank(seen, self._me, self._ranks)
        rates: dict[int, float] = {}
        if iteration in PROBED or (iteration and not iteration % PROBED_EVERY):
            rates = self._probes.run(round(_PROBES * 2 * PROBED_EVERY * ended.nbytes))
        self._controller.hand_in(replace(ended, seen=seen, rates=rates))

    def close(self) -> None:
        """End measuring and voting, and the connections."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._connected.close)
            stack.callback(self._guard.close, waits.END)
            stack.callback(self._guard.attempt, waits.END, self._controller.close)
            stack.callback(self._probes.close)  # first: they may wait for a rank
