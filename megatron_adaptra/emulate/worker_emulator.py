"""Slow workers for machines whose workers are equally fast: ops wait after they have computed.

The wait is no work: it takes no core from other ranks. It lies inside what is measured of an op, so
that a worker looks slow to all that plans, as a really slow one does. What is computed is the same.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

from megatron_adaptra.emulate.worker_rules import WorkerRule
from megatron_adaptra.ir.op import Kind

_LATE = 1e-3  # seconds by which a timer wakes a thread late; more is a suspended process
SAMPLES = 32  # ops of a kind whose median is its length where that is to be steady


class WorkerEmulator:
    """A worker emulator makes ops of `worker` take as many times as long as `rules` ask for.

    An op is as long as it computes, in CPU seconds of its thread: other processes on the same cores
    do not make a slow worker slower still. `rules` may be those of all workers; of two in force the
    first one counts. `steady`: ops of one kind are as long as the first ones were, as an
    accelerator's are: a core's clock rises and falls by a third within seconds. It is for jobs all
    of whose workers wait; a worker beside others that do not follows their clock, as they do.
    `iteration`: the one that runs. `work` (CPU seconds), `clock` (seconds) and `sleep`: of tests.
    """

    def __init__(
        self,
        worker: int,
        rules: Sequence[WorkerRule],
        steady: bool = False,
        *,
        work: Callable[[], float] = time.thread_time,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rules = [rule for rule in rules if rule.worker == worker]
        self.iteration = 0
        self.work = work
        self._clock, self._sleep = clock, sleep
        self._samples = SAMPLES if steady else 0
        self._first: dict[Kind, list[float]] = defaultdict(list)  # CPU seconds of the first ops
        self._late = 0.0  # seconds that the last wait was too long

    def like(self, other: WorkerEmulator) -> None:
        """Make steady ops as long as those of `other`, of a training before this one."""
        self._first = other._first

    def seconds(self, op_seconds: float, kind: Kind) -> float:
        """Return the seconds that an op of this `kind` has to wait once it computed `op_seconds`.

        0 while its worker is healthy.
        """
        first = self._first[kind]
        if len(first) < self._samples:
            first.append(op_seconds)
        times = next((rule.times for rule in self.rules if rule.active(self.iteration)), 1.0)
        length = median(first) if first else op_seconds
        return max(0.0, times * length - op_seconds) if times > 1 else 0.0

    def wait(self, since: float, kind: Kind) -> None:
        """End an op of this `kind` that has begun at `since`, of `work`, when a slow worker would.

        A timer wakes a thread a little late: the next op's wait is shorter by that.
        """
        begun, wanted = self._clock(), self.seconds(self.work() - since, kind)
        if wanted <= 0:
            return
        if wanted > self._late:
            self._sleep(wanted - self._late)
        self._late = min(_LATE, max(0.0, self._late + self._clock() - begun - wanted))
