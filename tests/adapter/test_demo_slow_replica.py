"""The demo with a slow replica: slow in both arms, its microbatches shared out in ours alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from patience import in_time
from running import summary

TWO = {"stages": 2, "data_parallel": 2, "microbatches": 4}


@pytest.mark.long
def test_counts_are_in_force_in_one_arm_and_losses_are_of_the_same_samples(tmp_path: Path) -> None:
    """A sample lost or read twice, or a replica weighed wrongly, would show in the losses."""
    (tmp_path / "named.yaml").write_text("sync: share\nsync_counts: 5,3\n")
    out = tmp_path / "out"
    done = summary(
        out, **TWO, iterations=9, from_iteration=3, to_iteration=6, slow_replicas=["1:2x"],
        config=str(tmp_path / "named.yaml"),
    )  # fmt: skip
    assert done["config"]["sync"] == "share"
    assert done["config"]["slow_replicas"] == ["1:2x"]
    assert not done["parameters_identical"], "more than two are added, in another order"
    assert done["equal_to_rounding"] is True
    assert done["parameters_difference"] < 1e-4
    assert done["shares"] == [], "what is named is not decided on"
    assert done["compared"] is None
    assert "with a slow replica" in (out / "report.html").read_text()


@pytest.mark.long
@pytest.mark.timing
def test_a_slow_replica_is_found_and_relieved(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # So slow, by waiting for so long, that what a busy machine adds is short beside it: of twice as
    # slow an iteration would gain a quarter, little more than what it has to.
    done = summary(
        out, **TWO, iterations=40, from_iteration=10, to_iteration=36, slow_replicas=["1:3x"],
        op_times=6.0,
    )  # fmt: skip
    found = [one for one in done["shares"] if one["after"][1] < one["before"][1]]
    first = min((one["iteration"] for one in found), default=math.inf)
    in_time("iterations until the slow replica is relieved", first, 35)
    assert done["equal_to_rounding"] is True
    assert all(sum(one["after"]) == 8 for one in done["shares"])
    assert all(one["after"][0] > 4 for one in found)
    page = (out / "report.html").read_text()
    assert "One iteration of all replicas, before and after" in page
    assert "Shares of microbatches" in page
    assert (out / "decisions.sync.jsonl").exists()
