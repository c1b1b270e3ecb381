"""What a worker's ops take on a core of its own, where workers share the cores of one machine.

A thread that runs an op computes, queues for a core, or does neither: it is suspended, or an
emulation lets it wait. Only what is computed takes a core from others, and only the queue is
shorter where others compute less.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

from megatron_adaptra.measure.op_seconds import WINDOW, OpSeconds, StageOps
from megatron_adaptra.measure.report import StageReport


def queue_share(report: StageReport) -> float | None:
    """Seconds that ops of a `report` have queued for a core, per second that they have computed.

    None where that is not known, or nothing was computed.
    """
    cpu, queued, idle = report.cpu, report.queued, report.idle
    computed = sum(cpu.values())
    if not computed > 0 or not cpu.keys() == queued.keys() == idle.keys() == report.wall.keys():
        return None
    return sum(queued.values()) / computed


class CoreUse:
    """Of one worker, by medians of the last iterations."""

    def __init__(self) -> None:
        self._ops = StageOps(None, 1)
        self._shares: deque[float] = deque(maxlen=WINDOW)
        self._longer: deque[float] = deque(maxlen=WINDOW)

    def update(self, report: StageReport, normally: float) -> StageReport:
        """Take the worker's `report` of an iteration, of which the `queue_share` is known.

        What else the process computes runs beside an op that waits, else it makes the op longer.
        What an op queues for longer than others do is no sharing but a quota, or other programs.

        Args:
            report: of the worker.
            normally: the share that workers queue for in this iteration.

        Returns:
            The report that would come from a core of its own, with what keeps only this worker.
        """
        cpu, idle = report.cpu, report.idle
        computed = {kind: max(1.0, report.overhead) * seconds for kind, seconds in cpu.items()}
        alone = {kind: max(computed[kind], cpu[kind] + idle[kind]) for kind in cpu}
        # By the median: one op that waits for long is no quota.
        queued = {
            kind: min(report.queued[kind], report.wall[kind] - cpu[kind] - idle[kind])
            for kind in cpu
        }
        longer = {kind: max(0.0, queued[kind] - normally * cpu[kind]) for kind in cpu}
        total = sum(alone.values())
        self._ops.update(replace(report, wall=alone))
        self._shares.append(sum(computed.values()) / total)
        self._longer.append(sum(longer.values()) / total)
        return replace(report, wall={kind: alone[kind] + longer[kind] for kind in cpu})

    @property
    def known(self) -> bool:
        """Whether a report has shown it."""
        return self._ops.known

    def seconds(self) -> OpSeconds:
        """Of its ops, on a core of its own that nothing else keeps it from."""
        return self._ops.seconds()

    @property
    def share(self) -> float:
        """Of these seconds, the share in which it computes."""
        return median(self._shares)

    @property
    def longer(self) -> float:
        """As a share of these seconds, what only this worker queues for."""
        return median(self._longer)
