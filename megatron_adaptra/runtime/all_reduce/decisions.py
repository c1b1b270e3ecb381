"""The log of decisions on a group's all-reduce: JSON lines (docs/decision-log.schema.json)."""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from megatron_adaptra.log import LogFile

VERSION = 1
KEPT = 1000  # decisions, to be shown
OUTCOME = 5  # reductions whose median is the measured outcome of a decision


@dataclass
class AllReduceDecision:
    """A change of the all-reduce that a group runs. Times are milliseconds.

    Args:
        number: of decisions made before it by this group in this job.
        iteration: the first one with it, counted in reductions of this group, from 0.
        detected: the one whose reports have led to it.
        ranks: global ranks of the group.
        why: what has changed, in words; its ranks are the group's.
        before, after: what ran and what runs now, in words.
        choice: what runs now, as Choice.to_json has it.
        late_ms: by rank, how late it comes.
        predicted_ms, native_ms: what it and native are expected to take after the last arrival.
        gain: share of an iteration that it is expected to save over what ran.
        planning_ms: what choosing took.
        figures: what it was chosen from, as Figures.to_json has it; None for one that has failed.
        committed: all ranks run it.
        samples: what reductions have taken after the last arrival, but the first one.
    """

    number: int
    iteration: int
    detected: int
    ranks: list[int]
    why: str
    before: str
    after: str
    choice: dict[str, Any]
    late_ms: list[float]
    predicted_ms: float
    native_ms: float
    gain: float
    planning_ms: float
    figures: dict[str, Any] | None = None
    committed: bool = False
    samples: list[float] = field(default_factory=list, repr=False)

    def to_json(self) -> dict[str, Any]:
        """What a line of the log has when the decision is proposed."""
        found = asdict(self)
        return {key: found[key] for key in found if key not in ("committed", "samples")}


class AllReduceLog:
    """Decisions as JSON lines, appended to the file at `path`; nothing is written if None.

    `made`: how many there are. `last`: the one that has come into force last; `in_force`: the last
    KEPT of these.
    """

    def __init__(self, path: Path | None) -> None:
        self.made = 0
        self.last: AllReduceDecision | None = None
        self.in_force: deque[AllReduceDecision] = deque(maxlen=KEPT)
        self._job = secrets.token_hex(4)
        self._file = None if path is None else LogFile(path, "decisions on all-reduces")

    def add(self, decision: AllReduceDecision) -> None:
        """Log a decision that is proposed."""
        self.made += 1
        self._write("all-reduce", decision, version=VERSION, **decision.to_json())

    def close_vote(self, decision: AllReduceDecision, committed: bool) -> None:
        """A `decision` of the log is `committed`, and in force, or never will be."""
        if committed:
            self._end()
            decision.committed, self.last = True, decision
            self.in_force.append(decision)
        self._write("vote", decision, committed=committed)

    def outcome(self, iteration: int, seconds: float) -> None:
        """That of `iteration` took `seconds` after the last arrival; a plan's first is left out."""
        last = self.last
        if last is None or iteration <= last.iteration or len(last.samples) >= OUTCOME:
            return
        last.samples.append(1e3 * seconds)
        if len(last.samples) == OUTCOME:
            self._write("outcome", last, measured_ms=median(last.samples))

    def close(self) -> None:
        """Write what is known of the last outcome, and wait for the file, some seconds at most."""
        self._end()
        if self._file is not None:
            self._file.close()

    def _end(self) -> None:
        if self.last is not None and len(self.last.samples) < OUTCOME:
            samples = self.last.samples
            self._write("outcome", self.last, measured_ms=median(samples) if samples else None)

    def _write(self, kind: str, decision: AllReduceDecision, **known: Any) -> None:
        at = round(time.time(), 3)
        line = {"kind": kind, "job": self._job, "number": decision.number, "at": at, **known}
        if self._file is not None:
            self._file.write(json.dumps(line))


def sentence(decision: AllReduceDecision) -> str:
    """A decision in force, for the log of the training."""
    back = "back to native" if decision.after == "native" else f"by {decision.after}"
    predicted = ""
    if decision.predicted_ms != decision.native_ms:
        predicted = (
            f"; expected after the last arrival: {decision.predicted_ms:.3g} ms, native "
            f"{decision.native_ms:.3g}"
        )
    whose, when = ranks_in_words(decision.ranks), decision.iteration + 1
    return f"from reduction {when} on, gradients of {whose} go {back}: {decision.why}{predicted}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`ranks 0 to 7`, where they are equally far apart, `ranks 0, 2, ... 14`."""
    first, *rest = ranks
    step = rest[0] - first if rest else 1
    if len(ranks) > 2 and list(ranks) == list(range(first, ranks[-1] + 1, step)):
        between = "to" if step == 1 else f"{rest[0]}, ..."
        return f"ranks {first}{'' if step == 1 else ','} {between} {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
