"""Rank 0 logs slow links and workers by global rank and host, for every replica."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from patience import decided
from running import zygote
from trainings import SCRIPT, needs_training, words_of

SLOW_PARTS = str(SCRIPT.with_name("slow_parts_pretrain.py"))
SCHEMA = Path(__file__).parents[2] / "docs" / "finding.schema.json"
BEGIN, END = 8, 20  # iterations in which something is slow
LENGTH = 38
STEADY = f"forward:all:10ms@0..{LENGTH}"  # no stage is slow as its core's clock falls


def found(
    folder: Path, ranks: int, *flags: str, rules: str = ""
) -> tuple[list[dict[str, Any]], str]:
    """The findings of a training, and what it printed. `rules`: see slow_parts_pretrain.py."""
    log = folder / "decisions.jsonl"
    ours = ("--pipeline-model-parallel-size", "2", "--adaptra", "--adaptra-decision-log", str(log))
    words = words_of(folder, ranks, *ours, *flags, iterations=LENGTH)
    rules = ",".join(filter(None, [STEADY, rules]))
    done = zygote(True).run(folder, [SLOW_PARTS, rules, *words], ranks=ranks, ends=True)
    assert done.status == 0, done.text[-4000:]
    path = folder / "decisions.findings.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    schema = json.loads(SCHEMA.read_text())
    for event in events:
        jsonschema.validate(event, schema)
    return [event for event in events if not event["because"]], done.text  # those with a line


@needs_training
@pytest.mark.parametrize(
    ("flags", "what", "ranks"),
    [
        (("--adaptra-emulate-worker", f"1.1:4x@{BEGIN}..{END}"), "slow worker", {3}),
        (
            ("--adaptra-emulate-link", f"1.0-1.1:60ms@{BEGIN}..{END}"),
            "slow link", {1, 3},
        ),
        (
            ("--adaptra-emulate-link", f"0-1:60ms@{BEGIN}..{END}", "--adaptra-min-gain", "1"),
            "slow link", {0, 1, 2, 3},
        ),
    ],
    ids=["a worker", "a link of replica 1", "no plan is worth it"],
)  # fmt: skip
def test_who_is_slow_is_named(
    flags: tuple[str, ...], what: str, ranks: set[int], tmp_path: Path
) -> None:
    events, text = found(tmp_path, 4, *flags)
    opened = [event for event in events if event["state"] == "opened" and event["what"] == what]
    named = {place["rank"] for event in opened for place in event["where"]}
    decided(f"nothing else is found: {events}", named <= ranks)
    decided(f"all that is slow is found: {events}", named == ranks)
    assert {place["host"] for event in opened for place in event["where"]} == {socket.gethostname()}
    for event in opened:
        assert event["since"] <= event["found"], event
        decided(f"not before it is slow: {event}", event["since"] >= BEGIN - 1)
        decided(f"it is found soon: {event}", event["found"] <= BEGIN + 4)
    closed = [event for event in events if event["state"] == "closed" and event["what"] == what]
    ids = {event["id"] for event in opened}
    assert {event["id"] for event in closed} <= ids, text
    decided(f"all of it is closed: {events}", {event["id"] for event in closed} == ids)
    lines = re.findall(rf"adaptra: {what}: rank (\d)", text)
    assert len(lines) == len(opened), "one line each"
    assert len(re.findall(rf"adaptra: recovered: .*the {what} was", text)) == len(closed)


THREE = ("--num-layers", "6", "--pipeline-model-parallel-size", "3")
PERIOD = f"@{BEGIN}..{END}"


@needs_training
@pytest.mark.parametrize(
    ("rules", "ranks", "flags", "what", "named"),
    [
        (f"loader:1:40ms{PERIOD}", 2, (), "data loader", {1}),
        (f"garbage:turns:120ms{PERIOD}", 2, (), "garbage collection", {0, 1}),
        ("", 3, (*THREE, "--adaptra-emulate-worker", f"0.1:6x@0..{END}"), "slow worker", {1}),
        (f"garbage:all:120ms{PERIOD}", 2, (), "", set()),
    ],
    ids=["a loader", "garbage by turns", "a worker from the start", "garbage all at once"],
)
def test_a_slow_part_of_a_rank_is_named(
    rules: str, ranks: int, flags: tuple[str, ...], what: str, named: set[int], tmp_path: Path
) -> None:
    events, _ = found(tmp_path, ranks, *flags, rules=rules)
    events = [event for event in events if event["what"] != "busy host"]  # as others may make it
    decided(f"nothing else is found: {events}", {event["what"] for event in events} <= {what})
    states = [event["state"] for event in events if event["what"] == what]
    decided(
        f"it is opened once, and closed: {events}",
        states == ["opened", "closed"][: 2 * bool(named)],
    )
    if not states:
        return
    opened, closed = events
    decided(f"all are named: {closed}", {place["rank"] for place in closed["where"]} == named)
    begin = BEGIN if rules else 0
    decided(f"since its first iterations: {opened}", begin - 1 <= opened["since"] <= begin + 2)
    decided(f"it is found soon: {opened}", opened["found"] <= begin + 9)


LATE = f"late:3:400ms{PERIOD}"
BOTH = f"1.0:4x{PERIOD},1.1:4x{PERIOD}"


@needs_training
@pytest.mark.parametrize(
    ("what", "ranks", "first", "soon", "flags", "rules"),
    [
        ("slow worker", [3], 2, 12, ("--adaptra-emulate-worker", f"1.1:4x@0..{END}"), ""),
        ("slow replica", [1, 3], BEGIN, 6, ("--adaptra-emulate-worker", BOTH), ""),
        ("late rank", [3], BEGIN, 6, ("--adaptra-allreduce", "auto"), LATE),
        ("late rank", [3], BEGIN, 6, ("--adaptra-act", "observe"), LATE),
    ],
    ids=["a worker from the start", "a whole replica", "a late rank", "a late rank, observed"],
)
def test_who_is_slow_beside_other_replicas_is_named_once(
    what: str,
    ranks: list[int],
    first: int,
    soon: int,
    flags: tuple[str, ...],
    rules: str,
    tmp_path: Path,
) -> None:
    events, _ = found(tmp_path, 4, *flags, rules=rules)
    events = [event for event in events if event["what"] != "busy host"]  # as this one may be
    named = [(e["state"], e["what"], [p["rank"] for p in e["where"]]) for e in events]
    decided(
        f"it is found, it alone, and closed: {named}",
        named == [("opened", what, ranks), ("closed", what, ranks)],
    )
    opened, closed = events
    assert {place["worker"].partition(".")[0] for place in opened["where"]} == {"1"}
    decided(f"it is found soon: {opened}", opened["found"] <= first + soon)
    decided(f"it is closed soon: {closed}", END - 1 <= closed["until"] <= END + 6)
