"""The book of findings: each is opened once, and closed once it is over."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from megatron_adaptra.diagnose.finding import CHANGED, CLOSED, OPENED, Finding

KEPT_ITERATIONS = 256  # whose seconds are known
COMPARED_ITERATIONS = 8  # before a finding, whose median is what an iteration took

Say = Callable[[str, Mapping[str, Any]], None]


class FindingBook:
    """A book keeps the open findings of one rank, and says each change in a line and an event.

    One that has turned out to be a part of another is closed by an event alone.

    Args:
        by: the global rank that finds them.
        say: takes the line for people, "" for none, and the event for the log of decisions.
        numbers: of findings, shared by all books of this rank; None for a book alone.
        first: iteration of the job that is the first one, 0, here.
    """

    def __init__(
        self, by: int, say: Say, numbers: Iterator[int] | None = None, first: int = 0
    ) -> None:
        self._by, self._say, self._first = by, say, first
        self._open: dict[Hashable, Finding] = {}
        self._numbers = itertools.count() if numbers is None else numbers
        self._seconds: deque[tuple[int, float]] = deque(maxlen=KEPT_ITERATIONS)

    def took(self, iteration: int, seconds: float) -> None:
        """Take note that an `iteration` took so many `seconds`."""
        self._seconds.append((iteration, seconds))
        for finding in self._open.values():
            if finding.before is not None and iteration >= finding.since:
                finding.lost += max(0.0, seconds - finding.before)

    def update(self, iteration: int, now: Mapping[Hashable, Finding]) -> None:
        """Open, change and close findings after the reports of an `iteration`.

        `now`: by subject, what is slow, and what has recovered since the last call (`until`), as a
        finding that is not in the book. A subject that is left out is not watched any more.
        """
        covered = {subject: s for s, found in now.items() for subject in found.covers}
        for subject in [s for s in self._open if s not in now and s not in covered]:
            self._close(self._open.pop(subject), iteration)
        for subject, found in now.items():
            known = self._open.get(subject)
            if found.until is not None:
                if known is not None:
                    known.takes = found.takes
                    self._close(self._open.pop(subject), found.until)
            elif known is None and not (found.covers & self._open.keys()):
                self._open[subject] = self._opened(iteration, found)
            elif known is None:
                self._merge(iteration, subject, found)
            else:
                for part in found.covers & self._open.keys():
                    self._join(self._open.pop(part), known, iteration)
                other = known.kind != found.kind or (found.because and not known.because)
                known.because = known.because or found.because
                known.kind, known.places, known.normal = found.kind, found.places, found.normal
                known.takes, known.agree, known.samples = found.takes, found.agree, found.samples
                if other:
                    self._write(known, CHANGED)

    def abandon(self) -> None:
        """Close what is open by events alone: nothing is watched any more."""
        until = self._seconds[-1][0] if self._seconds else 0
        for finding in self._open.values():
            finding.until = max(until, finding.since + 1)
            self._write(finding, CLOSED, silent=True)
        self._open.clear()

    def ids(self, subjects: Iterable[Hashable]) -> list[str]:
        """Return the names of the open findings on `subjects`."""
        return [self._open[s].id for s in subjects if s in self._open]

    def _merge(self, iteration: int, subject: Hashable, found: Finding) -> None:
        """Say that open findings are one thing: the oldest goes on as the one `found`."""
        parts = [self._open.pop(s) for s in sorted(found.covers & self._open.keys(), key=str)]
        oldest = min(parts, key=lambda one: one.number)
        since = min(one.since for one in parts)
        self._open[subject] = known = replace(
            found, number=oldest.number, by=oldest.by, found=oldest.found, at=oldest.at,
            since=since, before=oldest.before, iteration=oldest.iteration, lost=oldest.lost,
        )  # fmt: skip
        self._write(known, CHANGED)
        for part in parts:
            if part is not oldest:
                self._join(part, known, iteration)

    def _join(self, part: Finding, whole: Finding, iteration: int) -> None:
        """Close a `part`, which has turned out to be of the `whole`: an event without a line."""
        part.until, part.because = max(iteration, part.since + 1), (whole.id,)
        self._write(part, CLOSED, silent=True)

    def _opened(self, iteration: int, found: Finding) -> Finding:
        number = next(self._numbers)
        finding = replace(found, number=number, by=self._by, found=iteration, at=time.time())
        earlier = [s for i, s in self._seconds if i < finding.since][-COMPARED_ITERATIONS:]
        since = [s for i, s in self._seconds if i >= finding.since]
        if earlier:
            finding.before = median(earlier)
            finding.lost = sum(max(0.0, s - finding.before) for s in since)
        finding.iteration = median(since) if since else None
        self._write(finding, OPENED)
        return finding

    def _close(self, finding: Finding, until: int) -> None:
        finding.until = until = max(until, finding.since + 1)
        # Later iterations are no fault of it.
        over = [s for i, s in self._seconds if i >= until]
        if finding.before is not None:
            later = sum(max(0.0, s - finding.before) for s in over)
            finding.lost = max(0.0, finding.lost - later)
        self._write(finding, CLOSED)

    def _write(self, finding: Finding, state: str, silent: bool = False) -> None:
        until = None if finding.until is None else finding.until + self._first
        since, found = finding.since + self._first, finding.found + self._first
        shown = replace(finding, since=since, found=found, until=until)
        self._say("" if silent else shown.sentence(state), shown.to_json(state))
