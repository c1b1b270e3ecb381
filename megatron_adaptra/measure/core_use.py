"""The seconds of a worker's ops on a core of its own, where workers share a machine's cores.

A thread that runs an op computes, queues for a core, or does neither: it is suspended, or an
emulation lets it wait. Only computing takes a core from others, and only queueing gets shorter
when others compute less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from megatron_adaptra.measure.op_seconds import WINDOW, OpSeconds, StageOps
from megatron_adaptra.measure.report import StageReport


def queue_share(report: StageReport) -> float | None:
    """Return the seconds that ops of a `report` queued for a core per second that they computed.

    None where that is not known, or nothing was computed.
    """
    cpu, queued, idle = report.cpu, report.queued, report.idle
    computed = sum(cpu.values())
    if not computed > 0 or not cpu.keys() == queued.keys() == idle.keys() == report.wall.keys():
        return None
    return sum(queued.values()) / computed


def never_queued(report: StageReport) -> StageReport:
    """Return the `report` as if its ops had not queued for a core; itself if that is not known."""
    if queue_share(report) is None:
        return report
    return replace(report, wall={kind: report.cpu[kind] + report.idle[kind] for kind in report.cpu})


class CoreUse:
    """A core use gives the costs of one worker's ops, by medians of the last iterations."""

    def __init__(self) -> None:
        self._ops = StageOps(None, 1)
        self._shares: deque[float] = deque(maxlen=WINDOW)
        self._longer: deque[float] = deque(maxlen=WINDOW)

    def update(self, report: StageReport, normally: float) -> StageReport:
        """Take the worker's `report` of an iteration, of which the `queue_share` is known.

        Other threads of the process compute while an op waits; beyond that they make it longer.
        An op that queues longer than those of other workers is held up by a quota or by other
        programs, not by workers that share cores.

        Args:
            report: of the worker.
            normally: the `queue_share` that is usual in this iteration.

        Returns:
            The report as from a core of its own, with the queueing of this worker alone left in.
        """
        cpu, idle = report.cpu, report.idle
        computed = {kind: max(1.0, report.overhead) * seconds for kind, seconds in cpu.items()}
        alone = {kind: max(computed[kind], cpu[kind] + idle[kind]) for kind in cpu}
        # At most what the median op leaves: one op that queues for long is no quota.
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
        """True once a report has been taken."""
        return self._ops.known

    def seconds(self) -> OpSeconds:
        """Return the seconds of its ops on a core that nothing else uses."""
        return self._ops.seconds()

    @property
    def share(self) -> float:
        """The share of `seconds` in which its ops compute."""
        return median(self._shares)

    @property
    def longer(self) -> float:
        """The time that only this worker queues for a core, as a share of `seconds`."""
        return median(self._longer)


class OwnCores:
    """An OwnCores takes from reports the waits for each other of workers that share cores.

    Args:
        workers: how many there are, each with a CoreUse in `uses`.
        shared: their host's cores are fewer than they are; else reports stay as they are.
    """

    def __init__(self, workers: int, shared: bool) -> None:
        self.uses = [CoreUse() for _ in range(workers)]
        self._shared = shared

    def of(self, reports: Mapping[int, StageReport], first: int = 0) -> Mapping[int, StageReport]:
        """Return `reports`, by worker from `first` on, as from cores of their own, where known."""
        ran = {worker: report for worker, report in reports.items() if "F" in report.wall}
        shares = [share for share in map(queue_share, ran.values()) if share is not None]
        if not self._shared or len(shares) < max(1, len(ran)):
            return reports
        normally = median(shares)
        alone = {w: self.uses[w - first].update(r, normally) for w, r in ran.items()}
        return {**reports, **alone}
