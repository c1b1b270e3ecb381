"""One rank's side of reductions that are timed while training, and changed where ranks may vote."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

from megatron_adaptra.adapt.leader import Leader
from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.reductions.decisions import ReductionDecision, ranks_in_words
from megatron_adaptra.adapt.reductions.remedy import ReductionRemedy
from megatron_adaptra.adapt.switch import Acts, always
from megatron_adaptra.agree.agreement import Ballot, DecisionStore
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.agree.channel import Channel
from megatron_adaptra.agree.controller import Controller, Member
from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.agree.reductions import ALL_REDUCE, GroupReduction
from megatron_adaptra.agree.store import KeyValueStore
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import Disagreement
from megatron_adaptra.device.base import HOST, Device, Mark
from megatron_adaptra.diagnose.late import LateDiagnosis
from megatron_adaptra.execute.planned.arrival_messages import ArrivalMessages
from megatron_adaptra.execute.planned.connected import Connected
from megatron_adaptra.execute.planned.path_probes import PathProbes
from megatron_adaptra.measure.arrivals import after_the_first
from megatron_adaptra.measure.core_wait import CoreWait
from megatron_adaptra.measure.reduction_report import ReductionReport
from megatron_adaptra.measure.statistics import middle_of
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Buffers

# Iterations after which all paths are measured, and then one of so many: all ranks measure these.
PROBED, PROBED_EVERY = range(1, 6), 32
_PROBES = 0.01  # share of the bytes of reductions, each of which crosses a port twice
FIRST = 16  # iterations at first, which are measured
EVERY = 4  # ... and afterwards one in so many
CHANCE = 3  # iterations that are measured after one that took longer, perhaps by chance, ...
LASTING = 16  # ... and after another one that did so meanwhile, or a vote
_FEWEST = 8  # reductions, of which it is known what they take, and by how much they differ
_SPREADS = 5  # standard deviations, by which one differs by more than chance
# Connections of its own: see Connected.between. Without the last one paths are not measured, as
# where a device is behind the host.
MESHES = ("control", "arrivals", "probes")


@dataclass
class _Reduction:
    """A reduction holds one iteration's marks, and what was reduced and gathered in it.

    Args:
        expected, expected_gathers: buffers, by the iterations before.
        hides: mean seconds of a gather that a forward hides, but for the first one's; likewise.
        over: it has its report, or is none that gets one.
        sent: other ranks are sent when it was `ready`; if None, its `first` buffer shows when.
        queued: seconds that the training thread waited for a core since the one before was `ready`.
        hidden: seconds of each gather that a forward hides.
    """

    iteration: int
    expected: int = 0
    expected_gathers: int = 0
    hides: float = 0.0
    over: bool = False
    sent: bool = False
    ready: Mark | None = None
    queued: float | None = None
    first: Mark | None = None
    last: Mark | None = None
    end: Mark | None = None
    nbytes: int = 0
    last_bytes: int = 0
    count: int = 0
    ends: int = 0
    gathers: int = 0
    hidden: list[float] = field(default_factory=list)

    def next(self) -> _Reduction:
        """Return that of the next iteration, in which as much is expected."""
        hides = self.hides
        if self.hidden:
            _, *others = sorted(self.hidden)
            hides = mean(others or [0.0])
        return _Reduction(self.iteration + 1, self.count or self.expected, self.gathers, hides)


class MeasuredReductions:
    """A rank's measured reductions are timed in each iteration, and run what all ranks run.

    An iteration begins with `ready`; each buffer that is reduced in it is `started` and `ended`, by
    whatever way. Those that are `gathered` afterwards are over before paths are measured. What
    fails in measuring and choosing ends that alone: what is in force stays, on all ranks.

    Moments are marks of a `device`. Where it is behind the host they are known only once it has
    passed them. Reductions then stay with torch's backend, and ranks vote on no change. What an
    iteration has shown goes to the other ranks in the next one, and to the leader in the one after
    that, when the messages of all of them have come: a step of the optimizer is between.

    `value`: the all-reduce that runs from one `ready` to the next one. `loop`: chooses it, at the
    group's first rank; None at others. `late`: by global rank, seconds by which it came to the last
    known reduction after the first ranks; as this rank sees it, so the delay of its message is
    included.

    Args:
        connected: between the group's ranks, with MESHES.
        me: this rank's number in the group.
        ranks: global ranks of the group.
        min_gain: share of an iteration that a plan has to save.
        timeout: seconds that a decision is waited for.
        log: file of decisions; None for none.
        sharded: it is a reduce-scatter into equal shards, and an all-gather afterwards.
        overlaps: buffers become ready, and are reduced, while others are computed.
        device: the one that the gradients are on.
        backend: the name of torch's, if the device is behind.
        acts: see Loop.
        diagnosis: see ReductionRemedy; used at the group's first rank.
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
        device: Device = HOST,
        backend: str = "",
        acts: Acts = always,
        diagnosis: LateDiagnosis | None = None,
    ) -> None:
        self._connected, self._me, self._ranks, self._device = connected, me, ranks, device
        what = "measuring reductions" if device.behind else "the all-reduce"
        self._guard = Guard(f"{what} of {ranks_in_words(ranks)} at rank {ranks[me]}")
        self._lock = threading.Lock()
        self._overlaps = overlaps
        self.value = GroupReduction(Choice(len(ranks), sharded=sharded))
        self._now = _Reduction(-1, over=True)
        # Of the last reduction that is over: when it was ready, and when it ended.
        self._before: tuple[float | None, float | None] = None, None
        self._held = deque[ReductionReport]()  # without what they see
        self.late: dict[int, float] = {}
        # What changes by less than half of what a plan has to save will not lead to one.
        self._measured = MeasuredIterations(min_gain / 2)
        self._core_wait = CoreWait()  # opens nothing before its first call
        self._queued: float | None = None
        probes = connected.meshes.get("probes")
        self._probes = None if probes is None else PathProbes(probes, me, len(ranks))
        self._arrivals: ArrivalMessages | None = self._guard.call(
            ArrivalMessages, connected.meshes["arrivals"], me, len(ranks)
        )
        self._in_force = Bundle({ALL_REDUCE: self.value})
        ballot = Ballot(self._in_force)
        store = DecisionStore(KeyValueStore(f"adaptra/all-reduce/{'-'.join(map(str, ranks))}/"))
        control = connected.meshes["control"]
        self.loop: Loop[ReductionRemedy] | None = None
        self._controller: Controller
        if me:
            self._controller = Member(ballot, {0: Channel(control, 0)}, store, timeout)
        else:
            stays = f"with {backend}" if device.behind else None
            decisions = DecisionLog(ReductionDecision, log)
            remedy = ReductionRemedy(ranks, min_gain, decisions, stays, diagnosis)
            self.loop = Loop(remedy, acts=acts)
            channels = {peer: Channel(control, peer) for peer in range(1, len(ranks))}
            self._controller = Leader(ballot, channels, store, self.loop)
        connected.exchange.check = self.check

    # On the training thread.

    def ready(self) -> GroupReduction:
        """Begin an iteration, whose first gradients are ready. Returns what runs in it.

        Raises:
            Disagreement: no decision came on what this rank has agreed to, or a rank was found to
                run something else.
            PeerLost: as Exchange.
        """
        done, ran = self._now, self.value
        self._guard.call(self._device.anchor)
        self._guard.call(self._ends, done)  # unless it had an end of its own
        self.check()
        self._guard.call(self._release)
        self._now = done.next()
        self._in_force = self._guard.agreed(
            self._controller.begin, self._now.iteration, self._in_force, ALL_REDUCE
        )
        self.value = self._in_force[ALL_REDUCE]
        if not self._device.behind:
            self._guard.call(self._begins, done, ran)
        return self.value

    def _begins(self, done: _Reduction, ran: GroupReduction) -> None:
        """Begin an iteration after `done`, which ran `ran`; if it is measured, send the moment."""
        assert self._arrivals is not None
        arrivals, measured, now, mark = self._arrivals, self._measured, self._now, self.value.mark
        if not done.sent:  # else `check` has looked
            arrivals.look()
        if self.value != ran or self._controller.ballot.voting or not self.value.choice.native:
            measured.wake(now.iteration)
        measured.until = max(measured.until, arrivals.until)
        now.sent, now.ready = now.iteration in measured, self._device.mark()
        before, self._queued = self._queued, self._core_wait()
        now.queued = _between(before, self._queued)
        arrivals.ready(now.iteration, mark, now.ready.at(), measured.until, now.sent)

    def started(self, nbytes: int) -> None:
        """Record that a buffer of this iteration, of `nbytes`, is being reduced."""
        self._guard.call(self._starts, nbytes)

    def _starts(self, nbytes: int) -> None:
        mark = self._device.mark()
        with self._lock:
            now = self._now
            now.first, now.last = now.first or mark, mark
            now.last_bytes = nbytes
            now.nbytes += nbytes
            now.count += 1

    def ended(self) -> None:
        """Record that a buffer that was started holds its result, or that the stream waits for it.

        On any thread.
        """
        self._guard.call(self._has_ended)

    def _has_ended(self) -> None:
        with self._lock:
            now = self._now
            now.ends += 1
            if self._device.behind:
                last = now.ends >= now.expected  # until another one ends
            else:
                last = now.ends == now.count == now.expected and not now.over
            if last:
                now.end = self._device.mark()
        if last and not self._device.behind:
            self._ends(now)

    def gathered(self) -> None:
        """Record that a buffer has been gathered, or that the end of its gather is not known.

        On any thread.
        """
        if self._device.behind:
            return  # gathers are not measured there
        with self._lock:
            self._now.gathers += 1
            over = self._now.gathers >= self._now.expected_gathers
        if over:
            self._guard.call(self._release)

    def hidden(self, seconds: float) -> None:
        """Record that a forward has computed `seconds` since an all-gather began, and now waits.

        They count as hidden seconds of the all-gather, which may have ended before.
        """
        if self._device.behind:
            return  # what passes on the host is not what a GPU waits
        with self._lock:
            self._now.hidden.append(seconds)

    def check(self) -> None:
        """Raise Disagreement if a rank was found to run something else in this iteration."""
        arrivals, iteration = self._arrivals, self._now.iteration
        if arrivals is None or self._guard.off or self._device.behind:
            return  # where a device is behind, nothing can have switched
        if self._now.sent:  # else there are no messages of it
            self._guard.call(arrivals.seen, iteration)
        if arrivals.differs is not None:
            rank, iteration = arrivals.differs
            raise Disagreement(
                f"rank {self._ranks[rank]} reduces its gradients by something else than rank "
                f"{self._ranks[self._me]} in iteration {iteration + 1}, which runs "
                f"{self.value.choice}: it has not switched with the others"
            )

    def _ends(self, done: _Reduction) -> None:
        """Make the report of a reduction; its end is known if all that was expected has ended."""
        with self._lock:
            if done.over:
                return
            done.over = True
            marks = done.ready or done.first, done.first, done.last, done.end
            ready, first, last, end = (None if mark is None else mark.at() for mark in marks)
            (before, ended), self._before = self._before, (ready, end)
            seconds, period = _between(ready, end), _between(before, ready)
            if self._device.behind:
                assert self._arrivals is not None
                self._arrivals.ready(done.iteration, self.value.mark, ready)
            elif self.value.choice.native and seconds is not None and period is not None:
                self._measured.ended(done.iteration, seconds, period)
            if not (done.sent or self._device.behind) or first is None or last is None:
                return
            overlap = last - first if self._overlaps else 0.0
            gathers = max(1, done.expected_gathers)
            report = ReductionReport(
                self._me, done.iteration, done.nbytes, seconds=seconds, period=period,
                between=_between(ended, ready), queued=done.queued,
                buffers=Buffers(done.count, overlap, done.last_bytes, gathers, done.hides),
            )  # fmt: skip
            self._held.append(report)
            idle = done.gathers >= done.expected_gathers
        if idle:
            self._release()

    def _release(self) -> None:
        """Send the reports that were held back until ports are idle, and messages have come."""
        with self._lock:
            last = self._now.iteration - self._device.behind
            while self._held and self._held[0].iteration <= last:
                self._guard.later(self._report, self._held.popleft())

    # On the guard's thread.

    def _report(self, ended: ReductionReport) -> None:
        iteration = ended.iteration
        seen = {} if self._arrivals is None else self._arrivals.seen(iteration)
        late = after_the_first({self._me: 0.0, **seen}) if seen else {}
        self.late = {self._ranks[rank]: seconds for rank, seconds in late.items()}
        rates: dict[int, float] = {}
        probed = iteration in PROBED or (iteration and not iteration % PROBED_EVERY)
        if self._probes is not None and probed:
            rates = self._probes.run(round(_PROBES * 2 * PROBED_EVERY * ended.nbytes))
        self._controller.hand_in(replace(ended, seen=seen, rates=rates))

    def close(self) -> None:
        """End measuring and voting, and the connections."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._connected.close)
            stack.callback(self._guard.close, waits.END)
            stack.callback(self._guard.attempt, waits.END, self._controller.close)
            if self._probes is not None:
                stack.callback(self._probes.close)  # first: they may wait for a rank


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


class MeasuredIterations:
    """A rank's measured iterations: in few, while nothing changes, ranks send when they were ready.

    A rank that is late makes native's reduction longer at all others, so that these notice it
    without a message. From the next iteration on they measure all of them, and their messages ask
    the other ranks for the same: the late one, too, which has not noticed, but comes after them.
    What is too small to be noticed is found more slowly, in the iterations measured in any case.

    Args:
        matters: share of an iteration that a change has to be of.

    `until`: the iteration before which all are measured. It may be set by whom messages of other
    ranks reach: it is the latest one that any rank asks for.
    """

    def __init__(self, matters: float) -> None:
        self.until = FIRST
        self._matters = matters
        self._differed = -LASTING  # the last iteration that took another time than usual
        self._took: deque[float] = deque(maxlen=LASTING)
        self._usual, self._chance = 0.0, math.inf  # seconds, and by how many one may differ

    def __contains__(self, iteration: int) -> bool:
        return iteration < self.until or iteration % EVERY == 0

    def wake(self, iteration: int, lasting: int = LASTING) -> None:
        """Something has changed in `iteration`: measure so many after it, as `lasting` says."""
        self.until = max(self.until, iteration + 1 + lasting)

    def ended(self, iteration: int, seconds: float, period: float) -> None:
        """A reduction of native's is over; both in seconds.

        Args:
            iteration: of it.
            seconds: from its first gradients, here, to its end.
            period: of the iteration.
        """
        if abs(seconds - self._usual) > max(self._matters * period, self._chance):
            again = iteration - self._differed <= CHANCE
            self.wake(iteration, LASTING if again else CHANCE)
            self._differed = iteration
        self._took.append(seconds)
        # In others as little as can be is done: it would make their iterations longer.
        if len(self._took) >= _FEWEST and iteration in self:
            self._usual, spread = middle_of(self._took)
            self._chance = _SPREADS * spread
