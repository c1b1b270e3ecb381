"""Lines of all ranks reach rank 0, in order, and are never lost where they were made."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from megatron_adaptra.agree.job_log import LOOK, JobLog
from megatron_adaptra.agree.store import KeyValueStore


def test_rank_0_writes_the_lines_and_events_of_all(tmp_path: Path) -> None:
    store, path = dist.HashStore(), tmp_path / "decisions.jsonl"
    written: dict[int, list[str]] = {rank: [] for rank in range(3)}
    logs = [
        JobLog(rank, KeyValueStore("lines/", lambda: store), path, written[rank].append)
        for rank in range(3)
    ]
    logs[0].say("first", {"n": 0})
    for n in range(1, 5):
        logs[1 + n % 2].say(f"line {n}", {"n": n})
    logs[0].read()
    logs[0].say("last")
    logs[2].say("at the end", {"n": 5})
    logs[0].read()  # too soon after the last look
    assert written[0] == ["first", *(f"line {n}" for n in range(1, 5)), "last"]
    for log in (*logs[1:], logs[0]):
        log.close()
    assert written == {0: [*written[0][:-1], "at the end"], 1: [], 2: []}
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == list(range(6))
    assert LOOK > 0


def test_without_a_store_a_line_is_written_where_it_was_made(tmp_path: Path) -> None:
    written: list[str] = []

    class Dead:
        def add(self, key: str, count: int) -> int:
            raise RuntimeError("connection reset")

    for store in (None, KeyValueStore("lines/", Dead)):
        JobLog(3, store, tmp_path / "none.jsonl", written.append).say("a line", {"n": 1})
    assert written == ["a line", "a line"]
    assert not (tmp_path / "none.jsonl").exists()


def test_a_line_that_never_comes_holds_up_no_other(monkeypatch) -> None:
    store, written = dist.HashStore(), list[str]()
    head = JobLog(0, KeyValueStore("lines/", lambda: store), None, written.append)
    other = JobLog(1, KeyValueStore("lines/", lambda: store), None)
    store.add("lines/count", 1)  # of a rank that died before its line
    other.say("a line")
    head.read(last=True)
    assert written == []
    monkeypatch.setattr("megatron_adaptra.agree.job_log.PATIENCE", 0.0)
    head.read(last=True)
    assert written == ["a line"]
