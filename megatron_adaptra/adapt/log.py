"""The log of decisions: JSON lines with what was predicted and what came of it.

Each line has its `kind`, the `job` and `number` of its decision, and `at`, seconds since 1970:

- `decision`, `all-reduce`, `sync`: all that is known when it is proposed, see each remedy's own;
  with `acting`, which is false, where that is all that happens;
- `vote`: whether all ranks have `committed` it;
- `prediction`: what an iteration is expected to take as the model knows it later, `refreshed_ms`;
- `outcome`: what iterations have taken, `measured_ms`.

docs/decision-log.schema.json describes them.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Generic, TypeVar

from megatron_adaptra.adapt.record import RunRecord
from megatron_adaptra.base.log import LogFile

VERSION = 1
KEPT_DECISIONS = 1000  # of those in force, to be shown
NEAR = 0.05  # share by which an outcome may differ from its prediction, and still be as predicted


@dataclass(kw_only=True)
class Decision(ABC):
    """A decision changes, by a vote, what ranks run. Times are milliseconds, as in every report.

    Args:
        number, iteration, detected: how many decisions were made before it in this log, the first
            iteration with it, and the one whose reports have led to it; set once it is proposed.
        why: the reason, in one sentence.
        planning_ms: what planning took.
        again: where it takes back what was slower, the iteration from which on that is tried again;
            else None.
        predicted_ms: what it was expected to take; 0 where nothing was expected.
        committed: all ranks run it.
        measured_ms: the median of `samples`; None while it is not known.
        samples: what iterations have taken with it, but the first one.
    """

    KIND: ClassVar[str]  # of the line that begins a decision
    ABOUT: ClassVar[str]  # the lines' subject, where they cannot be written
    OUTCOME_ITERATIONS: ClassVar[int] = 5  # whose median is the outcome

    number: int = -1
    iteration: int = -1
    detected: int = -1
    why: str
    planning_ms: float = 0.0
    again: int | None = None
    predicted_ms: float
    committed: bool = False
    measured_ms: float | None = None
    samples: list[float] = field(default_factory=list, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the line of the log for a decision that is proposed."""
        later = ("stock", "committed", "refreshed_ms", "measured_ms", "samples", "recovered")
        return {key: value for key, value in vars(self).items() if key not in later}

    @abstractmethod
    def sentence(self) -> str:
        """Describe a decision in force for the log of the training, which counts from one."""

    @abstractmethod
    def subject(self) -> str:
        """Describe what is measured of a decision, up to its time, to begin a sentence."""

    def outcome(self, measured_ms: float) -> str:
        """Describe what came of a decision, for the log of the training."""
        takes, predicted = f"{self.subject()} {measured_ms:.4g} ms", self.predicted_ms
        if not predicted:
            return takes
        if abs(measured_ms - predicted) <= NEAR * predicted:
            return f"{takes}, as predicted ({predicted:.4g})"
        return f"{takes}, predicted were {predicted:.4g}"


D = TypeVar("D", bound=Decision)


class DecisionLog(Generic[D]):
    """A decision log appends decisions, votes on them and their outcomes to a file.

    Args:
        decisions: the class of its decisions.
        path: the file; nothing is written if None.
        record: of the run, which gets the same lines.

    `last`: the decision that has come into force last. `made`, `committed`: how many were proposed,
    and came into force. `in_force`: the last KEPT_DECISIONS of these.
    """

    def __init__(
        self, decisions: type[D], path: Path | None, record: RunRecord | None = None
    ) -> None:
        self.record = record or RunRecord(None)
        self.last: D | None = None
        self.made = self.committed = 0
        self.in_force: deque[D] = deque(maxlen=KEPT_DECISIONS)
        self._kind, self._outcome = decisions.KIND, decisions.OUTCOME_ITERATIONS
        # Committed, the outcome not known; where it is announced.
        self._awaited: list[tuple[D, Callable[[str], None] | None]] = []
        self._job = secrets.token_hex(4)  # jobs, and starts of a job, may share a file
        self._file = None if path is None else LogFile(path, decisions.ABOUT)

    def add(self, decision: D, **more: Any) -> None:
        """Log a decision that is proposed; `more`: of its line."""
        self.made += 1
        self._write(self._kind, decision, version=VERSION, **decision.to_json(), **more)

    def close_vote(
        self, decision: D, committed: bool, say: Callable[[str], None] | None = None
    ) -> None:
        """Log that a `decision` of the log is `committed`, and in force, or never will be.

        `say` takes a sentence on what came of it, once that is known; None for no sentence.
        """
        if committed:
            decision.committed, self.last = True, decision
            self.committed += 1
            self.in_force.append(decision)
            self._awaited.append((decision, say))
        self._write("vote", decision, committed=committed)

    def outcome(self, iteration: int, seconds: float) -> None:
        """Count the `seconds` of an `iteration`, unless it is the first one with a decision."""
        running = [one for one in self._awaited if one[0].iteration <= iteration]
        if not running:
            return
        for over in running[:-1]:
            self._end(*over)
        decision, say = running[-1]
        if decision.iteration == iteration:
            return
        decision.samples.append(1e3 * seconds)
        if len(decision.samples) == self._outcome:
            self._end(decision, say)

    def refresh(self, decision: D, predicted_ms: float) -> None:
        """Log that an iteration with a `decision` is expected to take `predicted_ms` now."""
        self._write("prediction", decision, refreshed_ms=predicted_ms)

    def measure(self, decision: D, measured_ms: float | None) -> None:
        """Log that an iteration with a decision has taken `measured_ms`; None: none has run."""
        decision.measured_ms = measured_ms
        self._awaited = [one for one in self._awaited if one[0] is not decision]
        self._write("outcome", decision, measured_ms=measured_ms)

    def settle(self) -> None:
        """Log what is known of the last outcome: a run is over."""
        for one in list(self._awaited):
            self._end(*one)

    def close(self) -> None:
        """Settle, and wait for the files, ten seconds at most for each."""
        self.settle()
        if self._file is not None:
            self._file.close()
        self.record.close()

    def _end(self, decision: D, say: Callable[[str], None] | None) -> None:
        found = median(decision.samples) if decision.samples else None
        self.measure(decision, found)
        if say is not None and found is not None:
            say(decision.outcome(found))

    def _write(self, kind: str, decision: D, **known: Any) -> None:
        at = round(time.time(), 3)
        line = {"kind": kind, "job": self._job, "number": decision.number, "at": at, **known}
        if self._file is not None:
            self._file.write(json.dumps(line))
        self.record.decision(line)
