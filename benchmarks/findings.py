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
from megatron_adaptra.diagnose.finding import (
    CLOSED,
    GARBAGE,
    HOST,
    LINK,
    LOADER,
    OPENED,
    STAGE,
    THIN_LINK,
    WORKER,
    Worker,
)
from megatron_adaptra.diagnose.pipeline import PipelineDiagnosis
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.replica_estimate import ReplicaEstimator
from megatron_adaptra.measure.report import LinkSample, StageReport

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from run_records import Recorded, read_record

HEALTHY, BEFORE, SLOW, AFTER = "nothing", 24, 16, 24  # iterations
FIRST = "slow worker from the start"
LEAST, MOST = 0.5, 8.0  # of a microbatch's seconds: what a slow link takes longer
FACTORS = 1.6, 6.0  # times as long as normally a slow worker takes
SHARES = 0.25, 0.8  # of an iteration that a loader, or collections of garbage, take
QUEUED = 2.5, 6.0  # times as long as they compute, that ops of a busy host wait for a core
IN_TIME = 4  # iterations; a kind that needs several iterations that agree has more
IN_TIME_OF = {LOADER: 6, GARBAGE: 8, HOST: 8, FIRST: 12}

Rows = Mapping[int, StageReport]


class Case:
    """A case is one stretch of a record in which something is slow, or nothing."""

    def __init__(self, kind: str, runs: Sequence[Recorded], rng: random.Random) -> None:
        self.kind, self.run = kind, rng.choice(fitting(kind, runs))
        self.replicas = self.run.about.get("replicas", 1)
        numbers = list(self.run.iterations)
        length = BEFORE + SLOW + AFTER
        first = rng.randrange(1, len(numbers) - length)  # the very first iteration shows nothing
        self.numbers = numbers[first : first + length]
        self.begin, self.end = self.numbers[BEFORE], self.numbers[BEFORE + SLOW]
        if kind == FIRST:
            self.begin = first
        reports = self.run.iterations[self.numbers[0]].reports
        self.workers = len(reports)
        seconds = median(sum(report.wall.values()) for report in reports)
        stages = self.workers // self.replicas
        self.worker = rng.choice({
            LOADER: [r.worker for r in reports if r.loading is not None],
            FIRST: range(1, stages - 1),
        }.get(kind, range(self.workers)))  # fmt: skip
        self.slow = {self.worker}
        if kind == STAGE:
            self.slow = set(range(self.worker % stages, self.workers, stages))
        if kind == HOST:
            self.slow = set(range(self.workers))
        self.share, self.queued = rng.uniform(*SHARES), rng.uniform(*QUEUED)
        self.factor = rng.uniform(*FACTORS)
        self.link = rng.choice([(s, r.worker) for r in reports for s in r.links])
        self.ways = rng.choice([{self.link}, {self.link, self.link[::-1]}])
        self.late = seconds * rng.uniform(LEAST, MOST)

    def rows(self) -> Iterator[tuple[int, Rows]]:
        """Give the reports of each iteration, by worker, as they would have been."""
        for number in self.numbers:
            reports = {report.worker: report for report in self.run.iterations[number].reports}
            before = self.kind in (LOADER, GARBAGE)  # what they report is of the iteration before
            if self.begin <= number - before < self.end:
                reports = {worker: self._changed(report) for worker, report in reports.items()}
            yield number, reports

    def _changed(self, report: StageReport) -> StageReport:
        if report.worker in self.slow and self.kind in (LOADER, GARBAGE):
            name, seconds = self.kind.split()[1], report.seconds or 0.0
            field = {"loader": "loading", "collection": "collecting"}[name]
            took = seconds / (1 - self.share)
            return replace(report, seconds=took, **{field: self.share * took})
        if report.worker in self.slow and self.kind == HOST:
            more = {kind: self.queued * seconds for kind, seconds in report.cpu.items()}
            queued = {kind: seconds + more[kind] for kind, seconds in report.queued.items()}
            wall = {kind: seconds + more[kind] for kind, seconds in report.wall.items()}
            return replace(report, queued=queued, wall=wall)
        if report.worker in self.slow and self.kind in (WORKER, STAGE, FIRST):
            own = {k: wall - report.queued.get(k, 0.0) for k, wall in report.wall.items()}
            more = {kind: (self.factor - 1) * seconds for kind, seconds in own.items()}
            wall = {kind: seconds + more[kind] for kind, seconds in report.wall.items()}
            idle = {kind: seconds + more[kind] for kind, seconds in report.idle.items()}
            alone = {
                kind: op._replace(wall=op.wall + more[kind], idle=op.idle + more[kind])
                for kind, op in report.alone.items()
            }
            return replace(report, wall=wall, idle=idle, alone=alone)
        if self.kind in (LINK, THIN_LINK):
            ways = {a for a, b in self.ways if b == report.worker}
            thin = self.kind == THIN_LINK
            links = {
                s: _later(x, self.late, thin) if s in ways else x for s, x in report.links.items()
            }
            return replace(report, links=links)
        return report

    def events(self) -> list[dict[str, Any]]:
        """Return the events of the diagnosis."""
        events: list[dict[str, Any]] = []
        estimator = _estimator(self.run.about)
        places = [Worker(worker, "host") for worker in range(self.workers)]
        book = FindingBook(0, lambda line, event: events.append(dict(event)))
        diagnosis = PipelineDiagnosis(places, self.replicas, None, book)
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
        wanted = set() if self.kind == HEALTHY else self.slow
        wanted = set(self.link) if self.kind in (LINK, THIN_LINK) else wanted
        opened = [e for e in events if e["state"] == OPENED]
        if not wanted:
            return f"a {opened[0]['what']} is found" if opened else ""
        right = [
            e for e in opened
            if e["what"] in ({THIN_LINK: (LINK, THIN_LINK), FIRST: (WORKER,)}.get(
                self.kind, (self.kind,))) and {place["rank"] for place in e["where"]} == wanted
        ]  # fmt: skip
        if not right:
            return f"a {opened[0]['what']} is found" if opened else "nothing is found"
        if len(opened) > 1:
            other = next((e["what"] for e in opened if e not in right), "")
            return f"a {other} is found, too" if other else "found twice"
        if right[0]["found"] - self.begin >= IN_TIME_OF.get(self.kind, IN_TIME):
            return "found late"
        if self.kind == THIN_LINK and not any(e["what"] == THIN_LINK for e in events):
            return "not known to be thin"
        closed = [e for e in events if e["state"] == CLOSED]
        return "" if closed else "never closed"


def fitting(kind: str, runs: Sequence[Recorded]) -> list[Recorded]:
    """Return the `runs` into which something of this `kind` can be put."""

    def fits(run: Recorded) -> bool:
        row, replicas = next(iter(run.iterations.values())).reports, run.about.get("replicas", 1)
        stages = len(row) // replicas
        return {
            STAGE: replicas > 1 and stages > 1,
            FIRST: replicas == 1 and stages > 2 and row[1].layers == row[0].layers != "",
            GARBAGE: len(row) > 1,
        }.get(kind, True)

    return [run for run in runs if fits(run)]


def _later(sample: LinkSample, seconds: float, thin: bool) -> LinkSample:
    """`thin`: large messages alone take longer, for their bytes."""
    names = ("delay", "delay_p25", "transit", *(() if thin else ("probed",)))
    known = {name: getattr(sample, name) for name in names}
    later = {n: x + seconds for n, x in known.items() if x is not None}
    busy = [one._replace(seconds=one.seconds + seconds * thin) for one in sample.busy]
    return replace(sample, **later, busy=tuple(busy))


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
    rows: list[tuple[str, ...]] = []
    for kind in (LINK, THIN_LINK, WORKER, FIRST, STAGE, LOADER, GARBAGE, HOST, HEALTHY):
        if not fitting(kind, runs):
            print(f"no record fits a {kind}")
            continue
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
        rows.append((kind, str(options.cases), share, soon, wrong))
    columns = ("slow", "cases", "right", "after iterations", "wrong")
    print(markdown(Table("Named rightly", columns, rows)))


if __name__ == "__main__":
    main()
