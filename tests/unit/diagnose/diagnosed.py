"""A training without threads, diagnosed: what is found in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from adapt.fed_job import FedJob

from megatron_adaptra.diagnose.book import FindingBook
from megatron_adaptra.diagnose.finding import Worker
from megatron_adaptra.diagnose.pipeline import PipelineDiagnosis
from megatron_adaptra.measure.report import StageReport


class Diagnosed:
    """A diagnosed training keeps the `lines` and `events` of the `job` that it watches.

    `each`: workers of a host. `change`: makes of an iteration's number and a report the one that
    the diagnosis gets.
    """

    def __init__(
        self, job: FedJob[Any, Any], workers: int, replicas: int = 1, each: int = 1
    ) -> None:
        self.lines: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.change: Callable[[int, StageReport], StageReport] = lambda _, report: report
        places = [Worker(10 + worker, f"host{worker // each}") for worker in range(workers)]
        book = FindingBook(10, self._say)
        replica = 0 if replicas > 1 else None
        self.diagnosis = PipelineDiagnosis(places, replicas, replica, book)
        self._feed, self._known = job.feed, job.remedy.estimator
        job.feed = self.feed  # type: ignore[method-assign]

    def feed(self, iteration: int, reports: Any) -> None:
        self._feed(iteration, reports)
        rows = reports if isinstance(reports, Mapping) else dict(enumerate(reports))
        if self._known.known:
            changed = {w: self.change(iteration, report) for w, report in rows.items()}
            self.diagnosis.update(iteration, changed, self._known)

    @property
    def brief(self) -> list[tuple[str, str, list[int], int, int | None]]:
        """By event: state, kind, ranks, since, until."""
        return [
            (e["state"], e["what"], [place["rank"] for place in e["where"]], e["since"], e["until"])
            for e in self.events
        ]

    def _say(self, line: str, event: Mapping[str, Any]) -> None:
        self.lines.append(line)
        self.events.append(dict(event))
