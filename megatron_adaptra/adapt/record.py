"""The record of a run: what stages reported and what was decided, for reports and replays.

One file per data-parallel replica, or for all that are planned together, written by the leader;
JSON lines, each with its `kind`:

- `run`: a controller starts, at the beginning of a job or with another number of microbatches;
- `iteration`: the reports of all stages or workers, the delays and alarms of links, predictions; or
  by replica, where these share out microbatches, how many and how long;
- `decision`, `vote`, `prediction`, `outcome`: as in the log of decisions.

Seconds everywhere but in decisions. An iteration has as many bytes as any other, and a file at most
LARGEST: beyond that half of the older iterations are left out, again and again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_adaptra.base.log import LogFile
from megatron_adaptra.measure.report import StageReport

VERSION = 2
LARGEST = 2**26  # bytes of a file
DIGITS = 7  # tenths of a microsecond
AROUND = 20  # iterations kept before and after a decision, whatever their age ...
DECISIONS = 100  # ... of the last so many decisions
_ITERATION, _DECISION = b'{"kind": "iteration", "iteration": ', b'{"kind": "decision", '


class RunRecord:
    """A run record appends lines to the file at `path`; it writes nothing where that is None."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else LogFile(path, "a record", LARGEST, shortened)

    def run(self, first: int, **about: Any) -> None:
        """Log that a run starts with iteration `first`; `about`: what a replay needs to know."""
        self._write("run", iteration=first, version=VERSION, at=_now(), **about)

    def iteration(
        self, iteration: int, reports: Sequence[StageReport], status: Mapping[str, Any]
    ) -> None:
        """Log the `reports` of an `iteration`. `status`: what charts show, see PlanRemedy."""
        if self._file is not None:
            each = [report.to_json() for report in reports]
            status = {k: v for k, v in status.items() if k != "iteration"}
            self._write("iteration", iteration=iteration, at=_now(), **status, reports=each)

    def replicas(
        self, iteration: int, microbatches: Sequence[int], seconds: Sequence[float], took: float
    ) -> None:
        """Log an `iteration`: by replica `microbatches` and their `seconds`; and what it `took`."""
        self._write(
            "iteration", iteration=iteration, at=_now(), microbatches=list(microbatches),
            seconds=list(seconds), took=took,
        )  # fmt: skip

    def decision(self, line: Mapping[str, Any]) -> None:
        """Copy a `line` of the log of decisions."""
        self._write(**line)

    def close(self) -> None:
        """Wait, ten seconds at most, until all is written."""
        if self._file is not None:
            self._file.close()

    def _write(self, kind: str, **data: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(_rounded({"kind": kind, **data})))


def _now() -> float:
    """Return the seconds since 1970, for people."""
    return round(time.time(), 3)


def _rounded(data: Any) -> Any:
    if isinstance(data, float):
        return round(data, DIGITS)
    if isinstance(data, Mapping):
        return {key: _rounded(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_rounded(value) for value in data]
    return data


def shortened(lines: Sequence[bytes]) -> list[bytes]:
    """Return the `lines` of a file without every second iteration of the older three quarters.

    Iterations around the last decisions stay, as do all other lines; where this leaves out no line,
    the older half of the iterations goes.
    """
    at = [i for i, line in enumerate(lines) if line.startswith(_ITERATION)]
    decided = [i for i, line in enumerate(lines) if line.startswith(_DECISION)][-DECISIONS:]
    near: set[int] = set()
    for i in decided:
        near.update(range(i - AROUND, i + AROUND + 1))
    left_out = set(at[1 : len(at) * 3 // 4 : 2]) - near
    if not left_out:  # decisions everywhere
        left_out = set(at[: len(at) // 2])
    return [line for i, line in enumerate(lines) if i not in left_out]
