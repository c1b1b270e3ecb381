"""Hangs: when an iteration does not move, each rank names what it waits for, and who is missing.

A thread of each rank looks, once a second, whether anything has moved. Nothing is added to the
training itself. After half the time-out without progress the rank writes into torch's store what
it does; when the time-out is over one rank reads these notes, follows who waits for whom to the
end, and writes that down for all. Lines are logged; nothing is ended or changed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from megatron_adaptra.agree.store import KeyValueStore
from megatron_adaptra.base import waits
from megatron_adaptra.base.log import GOES_ON, log_line
from megatron_adaptra.execute.blocked import blocked
from megatron_adaptra.execute.failure_log import state_of
from megatron_adaptra.execute.process_location import ProcessLocation, visible_pids
from megatron_adaptra.execute.waiting import Waiting, describe_ends, needed
from megatron_adaptra.execute.watchdog import Watchdog

_LOOKS = 32  # in a time-out, so that little is added to a short one
_COLLECT = 2.0  # seconds for other ranks' notes
_AT_ONCE = 200  # keys: fewer than the store takes a second for
_ALL_LOOK = 64  # ranks of a job in which each may read the notes of all
_LISTED = 8  # ranks without a note that are looked at: whether their process is stopped
_serials = count()  # activations of this process, the same on all ranks
T = TypeVar("T")


class HangWatch:
    """A hang watch logs what this rank waits for when it has not moved for so many `seconds`.

    Args:
        watchdog: knows what the main thread waits for, and whether it moves.
        rank, world: this global rank, and how many there are.
        seconds: without progress until the first line; the next ones when as much again has passed
            as before.
        on_gpu: ops run on a GPU: the host's code is what is known.

    Make it on the thread that trains.
    """

    def __init__(
        self, watchdog: Watchdog, rank: int, world: int, seconds: float, on_gpu: bool = False
    ) -> None:
        self._watchdog, self._rank, self._world = watchdog, rank, range(world)
        self._seconds, self._on_gpu = seconds, on_gpu
        self._main, self._closing = threading.get_ident(), threading.Event()
        self._here = ProcessLocation.here()
        self._who = f"{watchdog.name(watchdog.worker)} on {self._here.host}"
        self._prefix = f"hang/{next(_serials)}"
        self._answers = True  # the store, in this look
        self._written = False  # a note of this rank is there
        self._found: list[str] = []  # keys of what this rank has found out
        self._thread = threading.Thread(target=self._run, name="adaptra-hangs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; what it waits for is not waited for longer than some seconds."""
        self._closing.set()
        self._thread.join(waits.CLOSE)

    # On the thread of the watch.

    def _run(self) -> None:
        try:
            self._put(f"at/{self._rank}", json.dumps([self._who, *self._here]))
            self._watch()
        except Exception as error:
            log_line(f"{self._who} names no hangs any more, {GOES_ON}: {error!r}")

    def _watch(self) -> None:
        before, since, lines = self._moves(), time.monotonic(), 0
        pause, asleep = min(waits.POLL, self._seconds / _LOOKS), time.monotonic()
        while not self._closing.wait(pause):
            if (over := time.monotonic() - asleep - pause) > self._seconds / 4:
                since += over  # this process itself was stopped
            self._answers = True
            if (now := self._moves()) != before:
                self._go_on(since if lines else None)
                before, since, lines = now, time.monotonic(), 0
                asleep = time.monotonic()
                continue
            still = time.monotonic() - since
            if still >= self._seconds / 2 and not self._written:
                self._note()
            if still >= self._seconds * 2**lines:
                self._report(still, lines)
                lines += 1
            asleep = time.monotonic()
        if lines and self._moves() != before:  # it has moved, and ended, since the last look
            self._go_on(since)

    def _moves(self) -> tuple[Any, ...]:
        """Return what is another value after anything has moved."""
        one = self._watchdog
        return one.iteration, one.phase, one.calls, len(one.done), one.waits_for

    def _go_on(self, since: float | None) -> None:
        """Take back what this rank has written. `since`: without progress, if that was logged."""
        if since is not None:
            seconds = time.monotonic() - since
            log_line(f"{self._who} goes on in {self._phase} after {seconds:.0f} s")
        for key in self._found:
            self._put(key, "")
        if self._written:
            self._put(f"at/{self._rank}/note", "")
        self._written, self._found = False, []

    @property
    def _phase(self) -> str:
        return self._watchdog.phase.partition(",")[0]

    def _note(self) -> Waiting:
        """Write down what this rank does."""
        note = self._waiting()
        self._written = True
        self._put(f"at/{self._rank}/note", note.dump())
        return note

    def _waiting(self) -> Waiting:
        one = self._watchdog
        done = tuple(map(str, one.done))
        if (waits_for := one.waits_for) is not None:
            op, peer, _ = waits_for
            does = f"waits for {one.message(op, peer)}"
            return Waiting(
                self._who, one.iteration, does, (one.ranks[peer],), op=str(op), done=done
            )
        frame, frames = sys._current_frames().get(self._main), list[FrameType]()
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        found = blocked(frames, self._rank, self._on_gpu)
        text = found.text
        if found.waits == () and (full := _full_disks()):
            text += f" (no space is left on {', '.join(full)})"
        return Waiting(
            self._who, one.iteration, text, found.waits, found.together, "", done, one.under_way
        )

    def _report(self, still: float, lines: int) -> None:
        mine = self._note()
        began = time.strftime("%H:%M:%S", time.localtime(time.time() - still))
        text = f"{self._who}: no progress in {self._phase} since {began} ({still:.0f} s)"
        after = f" after {mine.done[-1]}" if mine.done else ""
        result = self._result(mine, lines).replace(f"{self._who}, which {mine.does}", "this rank")
        log_line(f"{text}: it {mine.does}{after}; {result}; {GOES_ON} once that moves")

    def _result(self, mine: Waiting, lines: int) -> str:
        """Return what one rank has found out for all; find it out where this is that rank."""
        key = f"{mine.iteration}/{lines}"
        finder = self._first(f"{key}/by", str(self._rank))
        if finder is None:
            return self._alone()
        if finder != str(self._rank):
            end = time.monotonic() + 2 * _COLLECT
            while self._answers and time.monotonic() < end:
                if found := self._get([key]).get(key):
                    text, silent = json.loads(found)
                    return f"{text}{self._seen(silent)}"
                self._closing.wait(waits.POLL / 2)
            if len(self._world) > _ALL_LOOK:  # each of them would read the notes of all
                return f"rank {finder} finds out who keeps the job waiting"
        notes = self._collect(mine)
        silent = needed(self._rank, notes, self._world)[:_LISTED]
        names = self._get([f"at/{rank}" for rank in silent])
        if not self._answers:  # ranks may have notes that were not read
            return self._alone()
        text = describe_ends(self._rank, notes, self._world, lambda rank: _name(rank, names))
        self._put(key, json.dumps([text, silent]))
        self._found += [key, f"{key}/by"]
        return text + self._seen(silent)

    def _alone(self) -> str:
        """Return what is known here without the store."""
        gone = self._watchdog.failure_log.missing()
        seen = "".join(f"; {state}: rank {rank}" for state in gone for rank in gone[state])
        return f"the job's store does not answer{seen}"

    def _collect(self, mine: Waiting) -> dict[int, Waiting]:
        """Read the notes of the ranks that keep this one waiting."""
        notes, end = {self._rank: mine}, time.monotonic() + _COLLECT
        while ranks := needed(self._rank, notes, self._world):
            found = self._get([f"at/{rank}/note" for rank in ranks])
            for rank in ranks:
                if text := found.get(f"at/{rank}/note"):
                    note = Waiting.load(text)
                    if abs(note.iteration - mine.iteration) <= 1:
                        notes[rank] = note
            if time.monotonic() >= end or not self._answers:
                break
            if len(needed(self._rank, notes, self._world)) == len(ranks):
                self._closing.wait(waits.LOOK_UP)
        return notes

    def _seen(self, ranks: Sequence[int]) -> str:
        """Describe those of `ranks` whose process on this host is stopped or has died."""
        found = self._get([f"at/{rank}" for rank in ranks])
        words = ""
        for rank in ranks:
            if text := found.get(f"at/{rank}"):
                there = ProcessLocation(*json.loads(text)[1:])
                pids = visible_pids([self._here, there], 0)
                if 1 in pids and (state := state_of(pids[1])):
                    words += f"; {state}: rank {rank}"
        return words

    # The store. On a busy host a request may take longer than its limit, and so is made twice. Once
    # the store has not answered both in a look, it is not asked again in that.

    def _ask(self, request: Callable[[KeyValueStore], T | None]) -> T | None:
        store = self._watchdog.failure_log.store
        if not self._answers or store is None:
            return None
        found = request(store)
        if found is None:
            found = request(store)
        self._answers = found is not None
        return found

    def _put(self, key: str, text: str) -> None:
        self._ask(lambda store: store.put(f"{self._prefix}/{key}", text) or None)

    def _first(self, key: str, text: str) -> str | None:
        return self._ask(lambda store: store.put_first(f"{self._prefix}/{key}", text))

    def _get(self, keys: Sequence[str]) -> Mapping[str, str]:
        got: dict[str, str] = {}
        for first in range(0, len(keys), _AT_ONCE):
            got |= self._get_some(keys[first : first + _AT_ONCE])
        return got

    def _get_some(self, keys: Sequence[str]) -> Mapping[str, str]:
        names = {f"{self._prefix}/{key}": key for key in keys}
        found = self._ask(lambda store: store.get_all(names)) or {}
        return {names[name]: value for name, value in found.items()}


def _name(rank: int, places: Mapping[str, str]) -> str:
    text = places.get(f"at/{rank}")
    return str(json.loads(text)[0]) if text else f"rank {rank}"


def in_front(asked: float, limits: Mapping[str, float]) -> tuple[float, str]:
    """Return the seconds until a hang is named, before any of the `limits`, and a line on these.

    `asked`: by the user, 0 for never. `limits`: seconds, by name; 0 for one that does not exist.
    """
    if not asked:
        return 0.0, "hangs are not named: --adaptra-hang-timeout is 0"
    known = {name: limit for name, limit in limits.items() if limit}
    seconds, earlier = asked, ""
    for name, limit in known.items():
        if (most := max(limit - 2 * waits.CHAIN, limit / 2)) < seconds:
            seconds, earlier = most, f", and not {asked:g} s: {name} would come first"
    ordered = sorted(known.items(), key=lambda item: item[1])
    after = "".join(f", {name} {limit:g} s" for name, limit in ordered)
    return seconds, f"a hang is named after {seconds:g} s{earlier}; after it{after}"


def _full_disks(mounts: Path = Path("/proc/self/mounts")) -> list[str]:
    """Return where file systems are mounted that have no space left for this process.

    A file system that does not answer is left out.
    """
    found: list[str] = []

    def look() -> None:
        for line in mounts.read_text().splitlines():
            _, at, _, options, *_ = line.split()
            if "rw" in options.split(","):
                try:
                    total, _, free = shutil.disk_usage(at)
                except OSError:
                    continue
                if total and not free and os.access(at, os.W_OK):
                    found.append(at)

    thread = threading.Thread(target=look, name="adaptra-disks", daemon=True)
    thread.start()
    thread.join(waits.POLL)
    return list(dict.fromkeys(found))
