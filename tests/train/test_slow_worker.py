"""A worker whose ops wait, and a path of one replica: slow as asked for, with the bits of stock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from patience import in_time
from running import summary
from trainings import HALF, needs_training, stock, train


@needs_training
def test_in_megatrons_own_program(tmp_path: Path) -> None:
    rules = ("--adaptra-emulate-worker", "1.1:3x@2..4,0.0:2x@4..", "--adaptra-emulate-link")
    ours = train(tmp_path, 4, *HALF, "--adaptra", *rules, "0.0>0.1:20ms@3..", iterations=6)
    assert ours.printed == stock(4, *HALF, iterations=6).done.printed


@pytest.mark.timing
def test_both_arms_of_the_demo_are_slow(tmp_path: Path) -> None:
    # So many times as slow that what others wait for a core is short beside it, and so many
    # microbatches that not all of them wait for one.
    done = summary(
        tmp_path, stages=2, data_parallel=2, microbatches=8, iterations=12,
        slow=["0.0:40x@4..9", "0.0-0.1:40ms"], reroute="off",
    )  # fmt: skip
    assert done["losses_identical"]
    assert done["parameters_identical"]
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert done["config"]["slow_links"] == []
    for arm in ("stock", "adaptra"):
        slow = done["arms"][arm]["iteration_ms"][4:9]
        assert min(slow) >= 2 * 40, "the first microbatch's way, there and back"
        stages: dict[int, list[float]] = {}
        for event in events:
            of_arm = event["ph"] == "X" and names[event["pid"]] == f"{arm} measured"
            if of_arm and event["name"][0] == "B":
                stages.setdefault(event["tid"], []).append(event["dur"])
        slowed, other = (min(stages[tid]) for tid in sorted(stages))
        in_time("backwards beside those of the last stage", 1.5 * other, slowed)
