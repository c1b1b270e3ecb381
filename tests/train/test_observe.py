"""Trainings that only observe, and one in which acting is turned off and on again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from patience import decided
from run_records import read_log
from running import zygote
from trainings import HALF, SCRIPT, SLOW, Done, needs_training, stock, words_of

pytestmark = [needs_training, pytest.mark.timeout(1200)]

CALLS = SCRIPT.with_name("calls_pretrain.py")
OBSERVE = ("--adaptra", "--adaptra-act", "observe")
FIRST_SLOW = 6


def run(
    folder: Path, *flags: str, iterations: int, switch: dict[int, str] | None = None
) -> tuple[Done, list[Any]]:
    """A training that has to succeed, and its calls, by rank and iteration.

    `switch`: what the file FOLDER/act holds from an iteration on.
    """
    folder.mkdir()
    (folder / "switch.json").write_text(json.dumps(switch or {}))
    words = [str(CALLS), str(folder), *words_of(folder, 4, *flags, iterations=iterations)]
    ended = zygote("--adaptra" in flags).run(folder, words, ranks=4)
    assert ended.status == 0, ended.text[-4000:]
    calls = [json.loads((folder / f"calls-{rank}.json").read_text()) for rank in range(4)]
    return Done(0, ended.text), calls


def test_calls_and_bits_are_those_of_stock_and_what_would_be_done_is_logged(
    tmp_path: Path,
) -> None:
    log = tmp_path / "decisions.jsonl"
    link = ("--adaptra-emulate-link", f"2-3:120ms@{FIRST_SLOW}..")
    theirs, calls = run(tmp_path / "stock", iterations=18)
    ours, observed = run(
        tmp_path / "observed", *OBSERVE, *link, "--adaptra-decision-log", str(log), iterations=18
    )
    assert ours.printed == theirs.printed
    assert len(ours.printed) == 18
    for mine, other in zip(observed, calls, strict=True):
        assert all(other)
        assert mine[1:FIRST_SLOW] == other[1:FIRST_SLOW]  # in the first one ranks connect
        for a, b in zip(mine[FIRST_SLOW:], other[FIRST_SLOW:], strict=True):
            assert sorted(a, key=str) == sorted(b, key=str)  # a thread sends what is delayed
    assert len({tuple(plan) for plan in ours.plans}) == 1
    held = read_log(log)
    assert not any(one["committed"] or one["acting"] for one in held)
    would = re.findall(r"^adaptra: would be done, but acting is off: (.*)", ours.text, re.MULTILINE)
    assert len(would) == len(held)
    decided("what would be done about the slow link", any("2->3 takes" in one for one in would))
    assert "adaptra: from iteration" not in ours.text


def test_replicas_make_the_calls_of_stock(tmp_path: Path) -> None:
    """Their reductions and shares are measured, too, and routes planned round a slow worker."""
    slow = ("--adaptra-emulate-worker", f"1.1:8x@{FIRST_SLOW}..")
    theirs, calls = run(tmp_path / "stock", *HALF, iterations=30)
    ours, observed = run(tmp_path / "observed", *HALF, *OBSERVE, *slow, iterations=30)
    assert ours.printed == theirs.printed
    assert "no order of ops" not in ours.text  # because of a vote of our own
    routes = re.search(r"would be done, but acting is off: .*worker 1.1", ours.text)
    decided("routes round the slow worker", routes is not None)
    for mine, other in zip(observed, calls, strict=True):
        assert all(other)
        assert mine[2:] == other[2:]  # in the second one pipelines connect


def test_acting_is_turned_off_and_on_in_a_running_job(tmp_path: Path) -> None:
    file = str(tmp_path / "job" / "act")
    off, on, end = 12, 20, 32
    ours, _ = run(
        tmp_path / "job", *SLOW, "--adaptra-act-file", file, iterations=end,
        switch={off: "off", on: "on"},
    )  # fmt: skip
    assert ours.printed == stock(4, iterations=end).done.printed
    for word in ("off", "on"):
        assert len(re.findall(f"^adaptra: rank .*acting is {word}:", ours.text, re.MULTILINE)) == 1
    start, *_ = ours.plans
    decided("a deeper plan before acting is off", ours.plans[off - 1] != start)
    decided("back at the start while it is off", ours.plans[on - 1] == start)
    decided("a deeper plan when it is on again", ours.plans[-1] != start)
