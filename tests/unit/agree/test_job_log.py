"""Lines of all ranks reach rank 0, in order, and are never lost where they were made."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from patience import PATIENCE

from megatron_adaptra.agree import job_log
from megatron_adaptra.agree.job_log import JobLog
from megatron_adaptra.agree.store import KeyValueStore


class Written:
    """A list of lines knows when so many are there."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._more = threading.Condition()

    def add(self, line: str) -> None:
        with self._more:
            self.lines.append(line)
            self._more.notify_all()

    def wait(self, count: int) -> list[str]:
        with self._more:
            assert self._more.wait_for(lambda: len(self.lines) >= count, PATIENCE), self.lines
        return self.lines


def logs_of(store: Any, ranks: int, path: Path | None = None) -> tuple[list[JobLog], list[Written]]:
    written = [Written() for _ in range(ranks)]
    logs = [
        JobLog(rank, lambda: KeyValueStore("lines/", lambda: store), path, lines.add)
        for rank, lines in enumerate(written)
    ]
    logs[0].start()
    return logs, written


def test_rank_0_writes_the_lines_and_events_of_all(tmp_path: Path) -> None:
    path = tmp_path / "findings.jsonl"
    logs, written = logs_of(dist.HashStore(), 3, path)
    logs[0].say("first", {"n": 0})
    for n in range(1, 151):  # more than come in one look
        logs[1 + n % 2].say(f"line {n}", {"n": n})
    assert written[0].wait(151) == ["first", *(f"line {n}" for n in range(1, 151))]
    for log in logs:
        log.say("what a word means", once=True)
    logs[2].say("at the end", {"n": 151})
    logs[1].end_here()
    logs[1].say("too late for others", {"n": 152})
    for log in (*logs[1:], logs[0]):
        log.close()
    assert written[0].lines[151:] == ["what a word means", "at the end"]
    assert (written[1].lines, written[2].lines) == (["too late for others"], [])
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == list(range(152))


def test_without_a_store_a_line_is_written_where_it_was_made(tmp_path: Path) -> None:
    class Dead:
        def add(self, key: str, count: int) -> int:
            raise RuntimeError("connection reset")

    def refused() -> KeyValueStore:
        raise RuntimeError("connection refused")

    written: list[str] = []
    for connect in (refused, lambda: KeyValueStore("lines/", Dead)):
        JobLog(3, connect, tmp_path / "none.jsonl", written.append).say("a line", {"n": 1})
    assert written == ["a line", "a line"]
    assert not (tmp_path / "none.jsonl").exists()


def test_a_line_that_never_comes_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_log, "PATIENCE", 0.5)
    store = dist.HashStore()
    store.add("lines/count", 3)  # of ranks that died before their lines
    logs, written = logs_of(store, 2)
    logs[1].say("a line")
    assert written[0].wait(1) == ["a line"]
    for log in logs:
        log.close()


def test_the_last_look_waits_for_no_missing_line() -> None:
    store = dist.HashStore()
    store.add("lines/count", 2)
    logs, written = logs_of(store, 2)
    logs[0].end_here()
    logs[1].say("at the end")
    for log in reversed(logs):
        log.close()
    assert written[0].lines == ["at the end"]
