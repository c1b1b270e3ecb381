"""Rank 0 logs who is slow beside other replicas: from the start, late, or as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from patience import decided
from running import zygote
from trainings import SCRIPT, needs_training, words_of

SCHEMA = Path(__file__).parents[2] / "docs" / "finding.schema.json"
BEGIN, END = 8, 20  # iterations in which something is slow
LENGTH = 40
LATE = (str(SCRIPT.with_name("late_gradients_pretrain.py")), "3", "0.4", f"{BEGIN}..{END}")
BOTH = f"1.0:4x@{BEGIN}..{END},1.1:4x@{BEGIN}..{END}"

pytestmark = [needs_training, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("what", "ranks", "episode", "flags", "script"),
    [
        ("slow worker", [3], (2, 12), ("--adaptra-emulate-worker", "1.1:4x@0..END"), ()),
        ("slow replica", [1, 3], (BEGIN, 6), ("--adaptra-emulate-worker", BOTH), ()),
        ("late rank", [3], (BEGIN, 6), ("--adaptra-allreduce", "auto"), LATE),
        ("late rank", [3], (BEGIN, 6), ("--adaptra-act", "observe"), LATE),
    ],
    ids=["a worker from the start", "a whole replica", "a late rank", "a late rank, observed"],
)
def test_who_is_slow_beside_other_replicas_is_named_once(
    what: str,
    ranks: list[int],
    episode: tuple[int, int],
    flags: tuple[str, ...],
    script: tuple[str, ...],
    tmp_path: Path,
) -> None:
    log = tmp_path / "decisions.jsonl"
    half = ("--pipeline-model-parallel-size", "2", "--adaptra", "--adaptra-decision-log", str(log))
    given = [flag.replace("END", str(END)) for flag in flags]
    words = words_of(tmp_path, 4, *half, *given, iterations=LENGTH)
    done = zygote(True).run(tmp_path, [*script, *words], ranks=4)
    assert done.status == 0, done.text[-4000:]
    events = events_of(tmp_path / "decisions.findings.jsonl")
    begin, soon = episode
    events = [e for e in events if e["what"] != "busy host"]  # as this one may be
    named = [(e["state"], e["what"], [p["rank"] for p in e["where"]]) for e in events]
    decided(
        f"it is found, it alone, and closed: {named}",
        named == [("opened", what, ranks), ("closed", what, ranks)],
    )
    opened, closed = events
    assert {place["worker"].partition(".")[0] for place in opened["where"]} == {"1"}
    decided(f"it is found soon: {opened}", opened["found"] <= begin + soon)
    decided(f"it is closed soon: {closed}", END - 1 <= closed["until"] <= END + 6)


def events_of(path: Path) -> list[dict[str, Any]]:
    """All findings of a training, as their schema has them."""
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    schema = json.loads(SCHEMA.read_text())
    for event in events:
        jsonschema.validate(event, schema)
    return events
