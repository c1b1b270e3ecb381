"""Slow links for machines whose network is fast: messages are held in flight, senders are not.

The same delay line serves stock Megatron's sends and ours, so the two can be compared. A message
waits at its sender, leaves for the real transport when its time has come, and arrives whenever
that transport delivers it. Messages of one directed link keep their order.

This is the best case of a slow link: a real one also delays the transport's own handshakes.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence

from megatron_adaptra.emulate.rules import LinkRule


class LinkEmulator:
    """A link emulator holds messages that `worker` sends over a slow link.

    `rules` may name every link of the job; a worker is a stage where each replica is by itself.
    `seed`: of the jitter. Any thread may send: probes of a link share it with the messages of the
    pipeline.
    """

    def __init__(self, worker: int, rules: Sequence[LinkRule], seed: int = 0) -> None:
        self.rules = [rule for rule in rules if rule.source == worker]
        self.iteration = 0
        self._random = random.Random(seed * 1009 + worker)
        self._free: dict[int, float] = {}  # target -> when its link has put out the last message
        self._due: dict[int, float] = {}  # target -> when the last message is due
        self._in_flight: dict[int, int] = {}  # target -> messages that have not been delivered
        self._lock = threading.Lock()
        self._line = DelayLine()

    def holds(self, target: int) -> bool:
        """Return whether a message sent now to `target` would be held."""
        return self._rule(target) is not None or self._in_flight.get(target, 0) > 0

    def hold(self, target: int, nbytes: int, deliver: Callable[[], None]) -> None:
        """Call `deliver` when `nbytes`, sent now, have crossed the emulated link to `target`."""
        with self._lock:
            if held := self.holds(target):
                self._put(target, nbytes, deliver)
        if not held:
            deliver()

    def _put(self, target: int, nbytes: int, deliver: Callable[[], None]) -> None:
        rule = self._rule(target)
        due = now = time.monotonic()
        if rule is not None:
            due = max(now, self._free.get(target, 0.0)) + nbytes / rule.bandwidth
            self._free[target] = due
            due += max(0.0, rule.delay + rule.jitter * self._random.gauss(0.0, 1.0))
        due = self._due[target] = max(due, self._due.get(target, 0.0))
        self._in_flight[target] = self._in_flight.get(target, 0) + 1

        def arrive() -> None:
            deliver()
            with self._lock:  # only now may the next message go its own way
                self._in_flight[target] -= 1

        self._line.put(due, arrive)

    def close(self) -> None:
        """Drop what is held, and end the thread."""
        self._line.close()

    def _rule(self, target: int) -> LinkRule | None:
        active = (r for r in self.rules if r.target == target and r.active(self.iteration))
        return next(active, None)


class DelayLine:
    """A delay line calls functions at their time, in order of time, on a thread of its own."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, due: float, call: Callable[[], None]) -> None:
        """Call `call` at `due`, in seconds of the monotonic clock; not at all once closed."""
        with self._wake:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="adaptra-delay-line", daemon=True
                )
                self._thread.start()
            heapq.heappush(self._heap, (due, next(self._count), call))
            self._wake.notify()

    def close(self) -> None:
        """Drop what is held. Waits five seconds at most for a call in progress."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._closed and not (
                    self._heap and self._heap[0][0] <= time.monotonic()
                ):
                    due = self._heap[0][0] - time.monotonic() if self._heap else None
                    self._wake.wait(due)
                if self._closed:
                    return
                call = heapq.heappop(self._heap)[2]
            call()
