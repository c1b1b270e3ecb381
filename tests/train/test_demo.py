"""The main job: a real GPT in two arms, equal to the last bit, while links get slow."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from patience import decided, in_time
from run_records import read_log
from running import summary
from timelines import check_report

ITERATIONS = 18


def test_a_slow_link_is_found_hidden_and_forgotten(tmp_path: Path) -> None:
    """One replan into the delay, one out of it, none while healthy, and time is won."""
    # So long that what a busy machine adds to the ops is short beside it.
    done = summary(tmp_path, iterations=36, slow=["2-3:250ms@8..17"])
    assert done["losses_identical"]
    assert done["parameters_identical"]
    decided("one replan into the delay and one out of it", len(done["replans"]) == 2)
    first, second = done["replans"]
    onset, end = done["config"]["from_iteration"], done["config"]["to_iteration"]
    decided("no replan before its reason", onset < first["iteration"] and end < second["iteration"])
    assert first["warmup_before"] == second["warmup_after"] == [4, 3, 2, 1]
    found = read_log(tmp_path / "decisions.jsonl")[0]
    for changed in found["links"]:
        stages = [changed[name]["stage"] for name in ("source", "target")]
        assert [changed[name]["rank"] for name in ("source", "target")] == stages
        assert {changed[name]["host"] for name in ("source", "target")} == {socket.gethostname()}
        assert {changed[name]["through"] for name in ("source", "target")} == {"memory"}
    pairs = [{c["source"]["stage"], c["target"]["stage"]} for c in found["links"]]
    decided("the slow link's plan", {2, 3} in pairs)
    check_report(done, tmp_path)
    assert not list(tmp_path.glob("data*")), "the text is removed"
    for name in ("report.html", "decisions.jsonl"):
        assert (tmp_path / name).stat().st_size > 0
    in_time("iterations until it is found", done["detected_after_iterations"], 4)
    in_time("iterations until the plan", first["iteration"], end)
    # Under the plan; how long planning took is another matter.
    slow = done["arms"]["stock"]["phases"]["slow"]["iteration_ms"]
    in_time("an adapted iteration", 1.5 * first["measured_ms"], slow)


@pytest.mark.long
def test_a_budget_below_1f1b_is_kept_from_the_first_iteration(tmp_path: Path) -> None:
    done = summary(
        tmp_path,
        iterations=ITERATIONS,
        stages=3,
        microbatches=6,
        activation_budget="2",
        engine="executor",
    )
    check_report(done, tmp_path)
    assert done["losses_identical"]
    assert done["parameters_identical"]
    assert max(done["arms"]["adaptra"]["peak_in_flight"]) <= 2
    assert max(done["arms"]["stock"]["peak_in_flight"]) == 3
    assert done["memory"]["bytes_per_microbatch"] is not None
    assert "KiB" in (tmp_path / "report.html").read_text()
