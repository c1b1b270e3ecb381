"""Readers of the log of decisions, and of the record of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_adaptra.adapt.record import VERSION
from megatron_adaptra.base.errors import AdaptraError, BadFile, BadMessage
from megatron_adaptra.measure.report import StageReport

FIRST = ("decision", "all-reduce", "sync")  # kinds of lines that begin a decision
_LATER = {"committed": False, "refreshed_ms": None, "measured_ms": None}  # until a line has them


class DecisionReader:
    """A decision reader takes one line after another. `decisions`: oldest first.

    A decision has the fields of its first line, and `committed`, `refreshed_ms` and `measured_ms`:
    False, None and None unless a later line has them.
    """

    def __init__(self) -> None:
        self.decisions: list[dict[str, Any]] = []
        self._known: dict[tuple[str, int], dict[str, Any]] = {}

    def add(self, line: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the decision that begins with `line`; None for a later line.

        Later lines of a decision whose first line is lost are left out. Raises KeyError for a line
        of no decision.
        """
        name = line["job"], line["number"]
        if line["kind"] in FIRST:
            self._known[name] = {**line, **_LATER}
            self.decisions.append(self._known[name])
            return self._known[name]
        if name in self._known:
            self._known[name].update({key: line[key] for key in _LATER.keys() & line.keys()})
        return None


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the decisions in the file at `path`, see DecisionReader.

    Raises OSError, ValueError or KeyError for a file that is no such log.
    """
    reader = DecisionReader()
    for line in path.read_text(encoding="utf-8").splitlines():
        reader.add(json.loads(line))
    return reader.decisions


@dataclass(frozen=True)
class RecordedIteration:
    """A recorded iteration holds the `reports` by stage, and the `status` that charts showed.

    `at`: seconds since 1970. `status`: see PlanRemedy. Replicas that are planned together have
    `reports` by worker. Replicas that share out microbatches have none, and `status` has what
    `RunRecord.replicas` was given.
    """

    at: float
    status: Mapping[str, Any]
    reports: tuple[StageReport, ...]


@dataclass
class Recorded:
    """A recorded run holds one start of a replan loop: `about`, `iterations` and `decisions`.

    `about`: see `RunRecord.run`. `iterations`: by number, in order. `decisions`: oldest first,
    each with all that became known.
    """

    about: Mapping[str, Any]
    iterations: dict[int, RecordedIteration] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)

    def seconds(self) -> dict[int, float]:
        """Return the seconds of each iteration, by number, as the next iteration has reported them.

        Of replicas that are planned together, the slowest one counts.
        """
        replicas, found = self.about.get("replicas", 1), {}
        for number, row in self.iterations.items():
            if not row.reports:
                found[number] = row.status["took"]
                continue
            first_stages = row.reports[:: max(1, len(row.reports) // replicas)]
            known = [one.seconds for one in first_stages if one.seconds is not None]
            if known:
                found[number - 1] = max(known)
        return found


def read_record(path: Path) -> list[Recorded]:
    """Read the runs in the file at `path`, oldest first.

    An iteration that was trained again, from a checkpoint, counts as it was the last time. A line
    that is not whole, as the disk was full or the job was killed, is left out. Raises BadFile,
    also for a record of another version.
    """
    try:
        with open(path, "rb") as file:
            return _read(file, path)
    except OSError as error:
        raise BadFile("record", path, f"it cannot be read: {error.strerror}") from None


def _read(lines: Iterable[bytes], path: Path) -> list[Recorded]:
    runs: list[Recorded] = []
    decisions = DecisionReader()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        try:
            _add(row, runs, decisions)
        except (AdaptraError, KeyError, TypeError, AttributeError) as error:
            reason = str(error) if isinstance(error, AdaptraError) else f"{error!r}"[:80]
            raise BadFile("record", path, f"line {number}: {reason}") from None
    if not runs:
        raise BadFile("record", path, "it is no record of a run; --adaptra-record writes them")
    return runs


def _add(row: dict[str, Any], runs: list[Recorded], decisions: DecisionReader) -> None:
    """Take one line; lines before the first start of a loop are skipped."""
    kind = row["kind"]
    if kind == "run":
        if row["version"] != VERSION:
            raise BadMessage(f"a record of version {row['version']!r}; this one reads {VERSION}")
        runs.append(Recorded(row))
        for run in runs[:-1]:
            run.iterations = {i: r for i, r in run.iterations.items() if i < row["iteration"]}
    elif runs and kind == "iteration":
        shares = "microbatches" in row
        each = () if shares else row.pop("reports")
        reports = tuple(StageReport.from_json(report) for report in each)
        del row["kind"]
        iteration, at = row.pop("iteration"), row.pop("at")
        runs[-1].iterations[iteration] = RecordedIteration(at, row, reports)
    elif runs and (decision := decisions.add(row)) is not None:
        runs[-1].decisions.append(decision)
