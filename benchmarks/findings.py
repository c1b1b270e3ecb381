"""How often is it named rightly who is slow? Recorded runs, with something slow put into them.

`python benchmarks/findings.py RECORD...`, of healthy runs with `--adaptra-record`. Of each kind
`--cases` are drawn: a record, a moment in it, which link or worker, and by how much. Their reports
are changed accordingly, and given to the estimator and the diagnosis of a training. A case is
right if what is slow is opened once, closed once, and nothing else is.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from common import markdown

from megatron_adaptra.cli.output import Table
from megatron_adaptra.diagnose.book import FindingBook
from megatron_adaptra.diagnose.finding import CLOSED, LINK, OPENED, WORKER, Worker
from megatron_adaptra.diagnose.pipeline import PipelineDiagnosis
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.replica_estimate import ReplicaEstimator
from megatron_adaptra.measure.report import LinkSample, StageReport

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from run_records import Recorded, read_record

HEALTHY, BEFORE, SLOW, AFTER = "nothing", 24, 16, 16  # iterations
LEAST, MOST = 0.5, 8.0  # of a microbatch's seconds: what a slow link takes longer
FACTORS = 1.6, 6.0  # times as long as normally a slow worker takes
IN_TIME = 4  # iterations

Rows = Mapping[int, StageReport]


class Case:
    """A case is one stretch of a record in which something is slow, or nothing."""

    def __init__(self, kind: str, runs: Sequence[Recorded], rng: random.Random) -> None:
        self.kind, self.run = kind, rng.choice(runs)
        numbers = list(self.run.iterations)
        length = BEFORE + SLOW + AFTER
        first = rng.randrange(1, len(numbers) - length)  # the very first iteration shows nothing
        self.numbers = numbers[first : first + length]
        self.begin, self.end = self.numbers[BEFORE], self.numbers[BEFORE + SLOW]
        reports = self.run.iterations[self.numbers[0]].reports
        self.workers = len(reports)
        seconds = median(sum(report.wall.values()) for report in reports)
        self.worker = rng.randrange(self.workers)
        self.factor = rng.uniform(*FACTORS)
        self.link = rng.choice([(s, r.worker) for r in reports for s in r.links])
        self.ways = rng.choice([{self.link}, {self.link, self.link[::-1]}])
        self.late = seconds * rng.uniform(LEAST, MOST)

    def rows(self) -> Iterator[tuple[int, Rows]]:
        """Give the reports of each iteration, by worker, as they would have been."""
        for number in self.numbers:
            reports = {report.worker: report for report in self.run.iterations[number].reports}
            if self.begin <= number < self.end:
                reports = {worker: self._changed(report) for worker, report in reports.items()}
            yield number, reports

    def _changed(self, report: StageReport) -> StageReport:
        if self.kind == WORKER and report.worker == self.worker:
            more = {kind: (self.factor - 1) * wall for kind, wall in report.wall.items()}
            wall = {kind: seconds + more[kind] for kind, seconds in report.wall.items()}
            idle = {kind: seconds + more[kind] for kind, seconds in report.idle.items()}
            return replace(report, wall=wall, idle=idle)
        if self.kind == LINK:
            ways = {a for a, b in self.ways if b == report.worker}
            links = {s: _later(x, self.late if s in ways else 0) for s, x in report.links.items()}
            return replace(report, links=links)
        return report

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the diagnosis."""
        events: list[dict[str, Any]] = []
        estimator = _estimator(self.run.about)
        places = [Worker(worker, "host") for worker in range(self.workers)]
        book = FindingBook(0, lambda line, event: events.append(dict(event)))
        replicas = estimator.replicas if isinstance(estimator, ReplicaEstimator) else 1
        diagnosis = PipelineDiagnosis(places, replicas, None, book)
        for number, rows in self.rows():
            if isinstance(estimator, ReplicaEstimator):
                estimator.update(rows)
            else:
                estimator.update(list(rows.values()))
            if estimator.known:
                diagnosis.update(number, rows, estimator)
        return events

    def wrong(self, events: Sequence[Mapping[str, Any]]) -> str:
        """Return what is wrong with the `events`; "" where all is right."""
        wanted = {HEALTHY: set(), WORKER: {self.worker}, LINK: set(self.link)}[self.kind]
        opened = [e for e in events if e["state"] == OPENED]
        if not wanted:
            return f"a {opened[0]['what']} is found" if opened else ""
        right = [
            e for e in opened
            if e["what"] == self.kind and {place["rank"] for place in e["where"]} == wanted
        ]  # fmt: skip
        if not right:
            return f"a {opened[0]['what']} is found" if opened else "nothing is found"
        if len(opened) > 1:
            return "found twice" if len(right) > 1 else "something else is found, too"
        if right[0]["found"] - self.begin >= IN_TIME:
            return "found late"
        closed = [e for e in events if e["state"] == CLOSED]
        return "" if closed else "never closed"


def _later(sample: LinkSample, seconds: float) -> LinkSample:
    names = ("delay", "delay_p25", "transit", "probed")
    known = {name: getattr(sample, name) for name in names}
    return replace(sample, **{n: x + seconds for n, x in known.items() if x is not None})


def _estimator(about: Mapping[str, Any]) -> Estimator | ReplicaEstimator:
    if "estimators" not in about:
        return Estimator.from_settings(about["estimator"])
    firsts, each = 0, []
    for settings in about["estimators"]:
        each.append(Estimator.from_settings(settings, firsts))
        firsts += len(settings["hosts"])
    return ReplicaEstimator(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--cases", type=int, default=1000, help="of each kind")
    options = parser.parse_args()
    runs = [run for path in options.records for run in read_record(path)]
    runs = [run for run in runs if len(run.iterations) > BEFORE + SLOW + AFTER + 2]
    iterations = sum(len(run.iterations) for run in runs)
    print(f"seed {options.seed}; {len(runs)} runs, {iterations} iterations\n")
    table = Table("Named rightly", ("slow", "cases", "right", "after iterations", "wrong"))
    for kind in (LINK, WORKER, HEALTHY):
        rng = random.Random(f"{options.seed} {kind}")
        faults: Counter[str] = Counter()
        after: list[int] = []
        for _ in range(options.cases):
            case = Case(kind, runs, rng)
            events = case.events()
            fault = case.wrong(events)
            faults[fault] += 1
            after += [e["found"] - case.begin for e in events if e["state"] == OPENED and not fault]
        right = faults.pop("", 0)
        wrong = ", ".join(f"{count} {what}" for what, count in faults.most_common()) or "none"
        soon = f"{median(after):g} (at most {max(after)})" if after else ""
        share = f"{right} ({right / options.cases:.1%})"
        table.add(kind, str(options.cases), share, soon, wrong)
    print(markdown(table))


if __name__ == "__main__":
    main()
