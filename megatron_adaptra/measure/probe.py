"""The probe of a worker, which notes what the worker does in an iteration while it does it."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from megatron_adaptra.device.base import HOST, Device, Mark
from megatron_adaptra.ir.op import Op
from megatron_adaptra.measure.core_wait import CoreWait
from megatron_adaptra.measure.iteration_record import CollectiveSpan, IterationRecord, OpTime
from megatron_adaptra.measure.report import Memory
from megatron_adaptra.transport.base import Stamps

UNREAD = 32  # halves of iterations whose times may still be unknown
# An op, its start and its end, what is known of it at once, as in an OpTime from `cpu` to `waited`,
# starts and ends of waits for batches, and seconds and CPU seconds aside that have no marks.
_Marks = tuple[
    Op, Mark, Mark, float, float, float, float | None, float, list[tuple[Mark, Mark]], float, float
]


class Probe:
    """A probe collects one IterationRecord of a `worker` after another; it may be always on.

    `clock`: of the device that runs the ops. A GPU runs them later than they are launched:
    `read` fills in the times that are known by now.
    """

    def __init__(self, worker: int, clock: Device = HOST) -> None:
        self.worker, self.clock = worker, clock
        self.record = IterationRecord(worker, -1)
        self._marks: list[_Marks] = []
        self._asked = self._answered = self._woken = 0.0
        self._ask_queued: float | None = None
        self._mark = clock.marker()
        self._core_wait = CoreWait()  # opens nothing before its first call
        self._cpu: Callable[[], float] = time.thread_time
        self._queued: Callable[[], float | None] = self._core_wait
        if clock.behind:  # the host's are not the op's, and to ask takes as long as to launch one
            self._cpu, self._queued = lambda: 0.0, lambda: None
        self._start = self._begin = clock.mark()
        self._op_cpu = self._process = 0.0
        self._op_queued: float | None = None
        self._waited = 0.0  # for other replicas, in the op under way
        self._garbage = GarbageTime()
        self._collected = self._op_collected = 0.0  # before this iteration; in this thread's ops
        self._batches: list[tuple[Mark, Mark]] = []  # waits for them in the op under way, ...
        self._batch_cpu = 0.0  # ... and their CPU seconds
        self._load: tuple[Mark, float, float | None, float] = self._start, 0.0, None, 0.0
        self._over = self._begin.recorded  # when the last op was launched
        self._unread: deque[Callable[[], bool]] = deque()  # in the order of their marks

    def close(self) -> None:
        """Close what is open; to be called on the thread that has run the ops."""
        self._core_wait.close()
        self._garbage.close()

    def begin(self, iteration: int, stock: bool = False) -> None:
        """Start the record of `iteration`; `stock`: True where it uses Megatron's own messages."""
        collected = self._garbage.total
        self.record.collecting = collected - self._collected
        self._collected = collected
        self.record = IterationRecord(self.worker, iteration, stock=stock)
        self._marks = []
        self._process = time.process_time()
        self.clock.anchor()
        self._mark = self.clock.marker()
        self._begin = self._mark()

    def op_begins(self) -> None:
        """Note that an op starts."""
        self._start, self._op_cpu, self._op_queued = self._mark(), self._cpu(), self._queued()
        self._waited = 0.0
        self._batches, self._batch_cpu = [], 0.0
        self._op_collected = self._garbage.own

    def loads(self) -> None:
        """Note that a batch is asked for."""
        self._load = self._mark(), self._cpu(), self._queued(), self._garbage.own

    def loaded(self) -> None:
        """Note that the batch is there."""
        began, cpu, before, collected = self._load
        ended, queued = self._mark(), self._queued()
        collected = self._garbage.own - collected
        other = collected + (queued - before if queued is not None and before is not None else 0.0)
        seconds = max(0.0, ended.recorded - began.recorded - other)
        self.record.loading = (self.record.loading or 0.0) + seconds
        self._batches.append((began, ended))
        self._batch_cpu += self._cpu() - cpu
        self._op_collected += collected  # counts as waiting already

    def waited(self, seconds: float) -> None:
        """Note that the op under way has waited for other replicas for so many `seconds`."""
        self._waited += seconds

    def op_ends(self, op: Op) -> None:
        """Note that the op that has started is over, and was `op`."""
        cpu, queued, before = self._cpu() - self._op_cpu, self._queued(), self._op_queued
        if queued is not None:
            queued = None if before is None else queued - before
        lag = self._start.recorded - self._answered + self._woken if self._asked else 0.0
        end = self._mark()
        # A device goes on meanwhile.
        collected = 0.0 if self.clock.behind else self._garbage.own - self._op_collected
        self._marks.append(
            (op, self._start, end, cpu, self._asked, lag, queued, self._waited, self._batches,
             collected, self._batch_cpu + collected)
        )  # fmt: skip
        self._asked = 0.0

    def asks(self) -> None:
        """Note that Megatron calls for messages, and so waits for other stages.

        The last call before an op is the one that brings what the op needs; earlier ones waited
        only for sends, over another link.
        """
        self._asked, self._ask_queued = time.monotonic(), self._queued()

    def answered(self) -> None:
        """Note that Megatron has its messages, or that a device's stream waits for them.

        A wait for a core meanwhile is the host's, and no message's.
        """
        self._answered, queued, before = time.monotonic(), self._queued(), self._ask_queued
        self._woken = 0.0 if queued is None or before is None else queued - before

    def arrived(self, source: int, op: Op, stamps: Stamps) -> None:
        """Note that a message from worker `source`, made by `op` there, was taken."""
        self.record.messages.append((source, op, stamps))

    def holds(self, memory: Memory | None) -> None:
        """Note the memory that activations have taken in this iteration."""
        self.record.memory = memory

    def spoilt(self, why: str) -> None:
        """Mark the record as unusable because of `why`; the first reason stays."""
        self.record.unusable = self.record.unusable or why

    def pipeline_ends(self) -> IterationRecord:
        """Note that the last op is over; return the record, whose step is still to come."""
        self.record.cpu = time.process_time() - self._process
        self._over = self._marks[-1][2].recorded if self._marks else self._begin.recorded
        self._later(partial(_read_ops, self.record, self._begin, self._marks))
        return self.record

    def iteration_ends(self, collectives: Sequence[CollectiveSpan] = ()) -> None:
        """Note that the step is over; those of `collectives` after the last op belong to it."""
        self.record.collectives = [c for c in collectives if c.start >= self._over]
        self._later(partial(_read_end, self.record, self.clock.mark()))

    def read(self) -> None:
        """Fill in the times that are known by now, without waiting; on any one thread.

        A record has its ops when it has a `begin`, and its step when it has an `end`.
        """
        while self._unread and self._unread[0]():
            self._unread.popleft()

    def _later(self, fill: Callable[[], bool]) -> None:
        if not self.clock.behind:  # now, and not by `read`, which another thread may be calling
            fill()
            return
        if len(self._unread) >= UNREAD:
            raise RuntimeError(f"no times of ops are known for {UNREAD // 2} iterations")
        self._unread.append(fill)


def _read_ops(
    record: IterationRecord,
    begin: Mark,
    marks: Sequence[_Marks],
) -> bool:
    """Fill in the ops since `begin` and return True; False while their times are not known."""
    if marks and _to_come(marks[-1][2]):
        return False
    at = begin.at()
    times = [(start.at(), end.at()) for _, start, end, *_ in marks]
    known = [t for pair in ((at,), *times) for t in pair if t is not None]
    if at is None or len(known) < 1 + 2 * len(times) or known != sorted(known):
        record.unusable = record.unusable or "times of ops that are not known, or not in order"
        record.ops = []
    else:
        record.ops = [
            OpTime(mark[0], a, b, *mark[3:8], aside=_between(mark[8]) + mark[9], aside_cpu=mark[10])
            for mark, a, b in zip(marks, known[1::2], known[2::2], strict=True)
        ]
    record.begin = begin.recorded if at is None else at
    return True


def _between(pairs: Sequence[tuple[Mark, Mark]]) -> float:
    """Return the seconds from the first to the second mark of all `pairs`; 0 where not known."""
    known = [(begin.at(), end.at()) for begin, end in pairs]
    return sum(b - a for a, b in known if a is not None and b is not None)


def _read_end(record: IterationRecord, end: Mark) -> bool:
    if _to_come(end):
        return False
    at = end.at()
    if at is None:
        record.unusable = record.unusable or f"the step's end is not known: {end.fault}"
    record.end = end.recorded if at is None else at
    record.collectives = [collective.known() for collective in record.collectives]
    return True


def _to_come(mark: Mark) -> bool:
    """Return whether the moment of `mark` is still to come, which it never is after a fault."""
    return mark.at() is None and not mark.fault


class GarbageTime:
    """A garbage time counts the CPU seconds of garbage collections in this process, once made."""

    def __init__(self) -> None:
        self._seconds = seconds = [0.0, 0.0]  # of all threads; of the one that makes this
        thread, begun = threading.get_ident(), [0.0]

        # A function of its own: a method in gc.callbacks would keep this object for ever.
        def seen(phase: str, _: Mapping[str, int]) -> None:
            now = time.thread_time()
            if phase == "start":
                begun[0] = now
                return
            seconds[0] += now - begun[0]
            if threading.get_ident() == thread:
                seconds[1] += now - begun[0]

        self._seen = seen
        gc.callbacks.append(seen)

    @property
    def total(self) -> float:
        """The seconds so far; any thread that collects stops all others that run Python."""
        return self._seconds[0]

    @property
    def own(self) -> float:
        """The seconds so far of the thread that has made this."""
        return self._seconds[1]

    def close(self) -> None:
        """Stop counting; may be called twice."""
        if self._seen in gc.callbacks:
            gc.callbacks.remove(self._seen)

    def __del__(self) -> None:
        self.close()
