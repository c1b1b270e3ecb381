"""What a group of ranks has decided by vote: JSON lines (docs/decision-log.schema.json)."""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Generic, TypeVar

from megatron_adaptra.log import LogFile
from megatron_adaptra.runtime.record import RunRecord

VERSION = 1
KEPT = 1000  # decisions, to be shown


@dataclass(kw_only=True)
class VotedDecision:
    """A change that is put to the vote. Times are milliseconds.

    Args:
        number: of decisions made before it by these ranks in this job.
        iteration: the first one with it.
        detected: the one whose reports have led to it.
        why: what has changed, in words.
        planning_ms: what choosing took.
        again: where it takes back what was slower, the iteration from which on that is tried again;
            else None.
        committed: all ranks run it.
        samples: what iterations have taken with it, but the first one.
    """

    number: int
    iteration: int
    detected: int
    why: str
    planning_ms: float
    again: int | None = None
    committed: bool = False
    samples: list[float] = field(default_factory=list, repr=False)

    def to_json(self) -> dict[str, Any]:
        """What a line of the log has when the decision is proposed."""
        found = asdict(self)
        return {key: found[key] for key in found if key not in ("committed", "samples")}


D = TypeVar("D", bound=VotedDecision)


class VotedLog(Generic[D]):
    """Decisions as JSON lines, appended to the file at `path`; nothing is written if None.

    Args:
        path: the file.
        record: of the run, which gets the same lines.

    `made`: how many there are. `last`: the one that has come into force last; `in_force`: the last
    KEPT of these.
    """

    KIND: ClassVar[str]  # of the line that begins a decision
    ABOUT: ClassVar[str]  # what the file has, where it cannot be written
    OUTCOME: ClassVar[int]  # iterations whose median is the measured outcome of a decision

    def __init__(self, path: Path | None, record: RunRecord | None = None) -> None:
        self.made = 0
        self.last: D | None = None
        self.in_force: deque[D] = deque(maxlen=KEPT)
        self.record = record or RunRecord(None)
        self._job = secrets.token_hex(4)
        self._file = None if path is None else LogFile(path, self.ABOUT)

    def add(self, decision: D) -> None:
        """Log a decision that is proposed."""
        self.made += 1
        self._write(self.KIND, decision, version=VERSION, **decision.to_json())

    def close_vote(self, decision: D, committed: bool) -> None:
        """A `decision` of the log is `committed`, and in force, or never will be."""
        if committed:
            self.end()
            decision.committed, self.last = True, decision
            self.in_force.append(decision)
        self._write("vote", decision, committed=committed)

    def outcome(self, iteration: int, seconds: float) -> None:
        """What is decided on took `seconds` in `iteration`; the first one of a plan is left out."""
        last = self.last
        if last is None or iteration <= last.iteration or len(last.samples) >= self.OUTCOME:
            return
        last.samples.append(1e3 * seconds)
        if len(last.samples) == self.OUTCOME:
            self._write("outcome", last, measured_ms=median(last.samples))

    def end(self) -> None:
        """What was decided last is over: write what is known of its outcome."""
        if self.last is not None and len(self.last.samples) < self.OUTCOME:
            samples = self.last.samples
            self._write("outcome", self.last, measured_ms=median(samples) if samples else None)
        self.last = None

    def close(self) -> None:
        """Write what is known of the last outcome, and wait for the files, some seconds at most."""
        self.end()
        if self._file is not None:
            self._file.close()
        self.record.close()

    def _write(self, kind: str, decision: D, **known: Any) -> None:
        at = round(time.time(), 3)
        line = {"kind": kind, "job": self._job, "number": decision.number, "at": at, **known}
        if self._file is not None:
            self._file.write(json.dumps(line))
        self.record.decision(line)
