"""The same stages of all replicas, compared where each replica is planned by itself.

A leader compares its workers with their own past, and cannot see one that is slow from the start,
nor a replica that gets slow as a whole. So leaders show rank 0 what their stages have measured. In
one iteration some of them do, ROWS at most, by turns: each replica always with the same others.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_adaptra.base.errors import BadMessage
from megatron_adaptra.diagnose.beside import BesideOthers, Search
from megatron_adaptra.diagnose.book import FindingBook
from megatron_adaptra.diagnose.finding import WORKER, Finding
from megatron_adaptra.diagnose.replicas import Places, slow_replica
from megatron_adaptra.diagnose.watch import Sight
from megatron_adaptra.measure.report import read_report

VERSION = 1
ROWS = 64  # replicas that rank 0 compares in one iteration: some milliseconds of a thread
KEPT = 8  # iterations that a leader shows at once: rank 0 looks a few times a second
LAG = 6  # iterations for which rank 0 waits for a replica's row: one may be lost, or dead
_SKIPS = 256  # iterations, at most, in which nothing is shown after the store has not answered

Show = Callable[[str, str], bool]
_Subject = tuple[int, int | None]  # a replica, and its stage; None for all of them


@dataclass(frozen=True)
class StageTimes:
    """A StageTimes holds an `iteration` of one pipeline, by stage.

    `seconds`: of the iteration before; None if not known. `walls`: seconds by kind of op, as in a
    StageReport. `waits`: what ops of a stage wait for cores beyond what is normal, see Queue.more.
    """

    iteration: int
    seconds: float | None
    walls: Mapping[int, Mapping[str, float]]
    waits: Mapping[int, float]

    @classmethod
    def read(cls, text: str, since: int = 0) -> list[StageTimes]:
        """Return the rows that `text` holds, without those of iterations before `since`.

        Raises BadMessage, as StageReport.from_json.
        """
        rows = [row for row in json.loads(text) if not _older(row, since)]
        return [read_report(cls, row, VERSION) for row in rows]

    def to_json(self) -> dict[str, Any]:
        """Return an object for json.dump, which `read` reads in a list."""
        return {"version": VERSION, **vars(self)}


def _older(row: Any, since: int) -> bool:
    return isinstance(row, dict) and isinstance(n := row.get("iteration"), int) and n < since


def turns_of(replicas: int) -> int:
    """Return in how many turns so many `replicas` show what they have measured."""
    return -(-replicas // ROWS)


class Shown:
    """A Shown shows rank 0, in its turn, what the stages of one `replica` have measured.

    Args:
        replica: of so many `replicas`.
        show: puts a text where rank 0 finds it by a key; False where that has failed.
    """

    def __init__(self, replica: int, replicas: int, show: Show) -> None:
        self._replica, self._turns, self._show = replica, turns_of(replicas), show
        self._rows: deque[StageTimes] = deque(maxlen=KEPT)
        self._skips = self._skip = 0  # iterations: after the next failure, and still to come

    def add(self, row: StageTimes) -> None:
        """Take the `row` of an iteration; may wait for the store, which then has a pause."""
        if self._replica and (row.iteration - self._replica) % self._turns:
            return  # but rank 0's own replica shows how far the training is
        self._rows.append(row)
        if self._skip:
            self._skip -= 1
        elif self._show(key_of(self._replica), json.dumps([one.to_json() for one in self._rows])):
            self._skips = 0
        else:
            self._skip = self._skips = min(_SKIPS, 2 * self._skips + 1)


def key_of(replica: int) -> str:
    """Return the key under which a `replica` shows what its stages have measured."""
    return f"stages/{replica}"


class Across:
    """An Across finds, on rank 0, workers slower than the same stage of other replicas.

    A replica all of whose stages are slow is one finding.

    Args:
        places: by replica, those of its workers, by stage.
        book: gets what is found.
        shown: returns the texts of those keys that have one; None without an answer.
    """

    def __init__(
        self, places: Places, book: FindingBook,
        shown: Callable[[Iterable[str]], Mapping[str, str] | None],
    ) -> None:  # fmt: skip
        self._places, self._book, self._shown = places, book, shown
        self._stages, turns = len(places[0]), turns_of(len(places))
        replicas = range(len(places))
        self._groups = [replicas[turn::turns] for turn in range(turns)]
        self._beside = [BesideOthers(self._stages, len(g)) for g in self._groups]
        self._texts: dict[int, str] = {}  # by replica, as read last
        self._rows: dict[int, dict[int, StageTimes]] = {}  # by iteration and replica
        self._silent: set[int] = set()  # replicas that rank 0 does not wait for
        self._next = -1  # the iteration to compare next; -1 before the first one
        self._known: dict[_Subject, Finding] = {}  # those that are open
        self._search = Search("who is slower than the same stage of other replicas", book)

    def look(self) -> None:
        """Compare the iterations that are there by now. On one thread, beside the training."""
        self._search.run(self._look)

    def _look(self) -> None:
        self._read(self._groups[0][:1])  # this rank's own: it shows what has been
        newest = max((i for i, row in self._rows.items() if 0 in row), default=-1)
        if newest < max(0, self._next):
            return
        if self._next < 0:
            self._next = newest
        turns = len(self._groups)
        due = range(max(self._next, newest - KEPT * turns), newest + 1)
        for turn in sorted({iteration % turns for iteration in due}):
            if not self._read(self._groups[turn]):
                break  # rows are there for some iterations yet
        else:
            self._compare_all(due, newest)
        least = max(self._next, newest - KEPT * turns)
        self._rows = {i: row for i, row in self._rows.items() if i >= least}

    def _compare_all(self, due: Iterable[int], newest: int) -> None:
        for iteration in due:
            rows = self._rows.get(iteration, {})
            missing = set(self._groups[iteration % len(self._groups)]) - rows.keys()
            if iteration > newest - LAG and missing - self._silent:
                break
            self._silent = (self._silent | missing) - rows.keys()
            self._compare(iteration, rows)
            self._next = iteration + 1

    def _read(self, replicas: Iterable[int]) -> bool:
        """Take what `replicas` show; return whether the store has answered."""
        keys = {key_of(replica): replica for replica in replicas}
        if (texts := self._shown(keys)) is None:
            return False
        for key, text in texts.items():
            replica = keys[key]
            if self._texts.get(replica) == text:
                continue
            self._texts[replica] = text
            with contextlib.suppress(BadMessage):  # of this replica alone
                for row in StageTimes.read(text, self._next):
                    self._rows.setdefault(row.iteration, {})[replica] = row
        return True

    def _compare(self, iteration: int, rows: Mapping[int, StageTimes]) -> None:
        took = [row.seconds for row in rows.values() if row.seconds is not None]
        if took:
            self._book.took(iteration - 1, max(took))
        turn, stages = iteration % len(self._groups), self._stages
        group, beside = self._groups[turn], self._beside[turn]
        walls: dict[int, Mapping[str, float]] = {}
        waits: dict[int, float] = {}
        for place, replica in enumerate(group):
            if (row := rows.get(replica)) is not None:
                walls |= {place * stages + stage: wall for stage, wall in row.walls.items()}
                waits |= {place * stages + stage: share for stage, share in row.waits.items()}
        if sum(replica in rows for replica in group) < min(2, len(group)):
            return  # there is nothing to compare with
        beside.update(iteration, walls, lambda worker: waits.get(worker, 0.0))
        now = {s: found for s, found in self._known.items() if s[0] not in group}
        for place, replica in enumerate(group):
            now |= self._of_replica(iteration, replica, place, beside)
        self._book.update(iteration, dict(now.items()))
        self._known = {s: found for s, found in now.items() if found.until is None}

    def _of_replica(
        self, iteration: int, replica: int, place: int, beside: BesideOthers
    ) -> dict[_Subject, Finding]:
        """Return what is slow in a `replica`, and what is so no more.

        `place`: its number in `beside`.
        """
        first = place * self._stages
        whole, each = (replica, None), [(replica, stage) for stage in range(self._stages)]
        open_ = self._known.keys() & {whole, *each}
        found: dict[_Subject, Finding] = {}
        if place in beside.whole:
            one = slow_replica(self._places[replica], beside.whole[place])
            found[whole] = replace(one, covers=frozenset(each))
        else:
            for stage in range(self._stages):
                if (sight := beside.slow.get(first + stage)) is not None:
                    found[replica, stage] = self._worker(replica, stage, sight)
        for subject in open_ - found.keys():
            if whole not in found:  # else it is a part of that
                own = range(self._stages) if subject[1] is None else [subject[1]]
                ends = [beside.well[first + s].since for s in own if first + s in beside.well]
                until = max(ends, default=iteration)
                found[subject] = replace(self._known[subject], takes=1.0, until=until)
        return found

    def _worker(self, replica: int, stage: int, sight: Sight) -> Finding:
        return Finding(
            WORKER, (self._places[replica][stage],), sight.since, sight.now, 1.0, sight.agree,
            sight.samples, beside="the same stage of other replicas",
        )  # fmt: skip
