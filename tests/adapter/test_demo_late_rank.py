"""The demo with a late rank: late in both arms, whose gradients are reduced each its own way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from patience import in_time
from running import SMALL, demo, summary

from megatron_adaptra.runtime.decision_reader import read_log

DOCS = Path(__file__).resolve().parents[2] / "docs"
LATE = 0.2  # seconds


def slow_ms(done: dict[str, Any], arm: str) -> list[float]:
    """What the iterations took in which a rank was late."""
    span = done["config"]["from_iteration"], done["config"]["to_iteration"]
    times: list[float] = done["arms"][arm]["iteration_ms"][slice(*span)]
    return times


@pytest.mark.long
def test_a_plan_is_in_force_in_one_arm_and_the_rank_late_in_both(tmp_path: Path) -> None:
    """Were one reduction of either arm the other arm's, bits would be equal, or sums wrong."""
    (tmp_path / "direct.yaml").write_text("allreduce: direct\n")
    out = tmp_path / "out"
    done = summary(
        out, stages=2, data_parallel=3, microbatches=2, iterations=9, from_iteration=3,
        to_iteration=6, late_ranks=[f"1:{LATE}s"], config=str(tmp_path / "direct.yaml"),
    )  # fmt: skip
    for arm in ("stock", "adaptra"):
        assert min(slow_ms(done, arm)) >= 1e3 * LATE, arm
    assert done["all_reduces"] == []
    assert not done["parameters_identical"], "three are added in another order"
    assert done["equal_to_rounding"] is True
    assert done["parameters_difference"] < 1e-4
    assert "with a late rank" in (out / "report.html").read_text()


@pytest.mark.long
@pytest.mark.timing
def test_without_a_gain_all_stays_bit_for_bit(tmp_path: Path) -> None:
    """In memory there is nothing to be saved; the report names what was found."""
    (tmp_path / "most.yaml").write_text("min_gain: 0.9\n")
    out = tmp_path / "out"
    done = summary(
        out, stages=2, data_parallel=2, microbatches=2, iterations=24, from_iteration=8,
        to_iteration=20, late_ranks=[f"1:{LATE}s"], config=str(tmp_path / "most.yaml"),
    )  # fmt: skip
    assert (done["losses_identical"], done["parameters_identical"]) == (True, True)
    assert done["all_reduces"] == done["replans"] == []
    stays = [note for note in done["notes"] if "stayed with native" in note]
    # The second group's first rank, whose measuring may have ended on a busy machine.
    in_time("notes that are missing, of two", 2 - len(stays), 1)
    assert any("messages are as fast as memory" in note for note in done["notes"])
    late = sum("rank 1 comes" in note for note in stays)
    in_time("groups that have not found who is late, of two", 2 - late, 1)


@pytest.mark.root
@pytest.mark.large
@pytest.mark.quiet
@pytest.mark.timing
def test_over_ports_of_hosts_another_all_reduce_is_found(tmp_path: Path) -> None:
    done = demo(
        tmp_path, "--json", *SMALL, "--netlab", "--stages", "2", "--data-parallel", "4",
        "--hidden-size", "64", "--late-rank", "2:120ms", "--microbatches", "2", "--iterations",
        "60", "--from-iteration", "15", "--to-iteration", "50",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    schema = json.loads((DOCS / "decision-log.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    decisions = []
    for path in sorted(tmp_path.glob("decisions.gradients*.jsonl")):
        for line in path.read_text().splitlines():
            validator.validate(json.loads(line))
        decisions += [one for one in read_log(path) if one["committed"]]
    assert len(decisions) == len(figures["all_reduces"])
    assert figures["equal_to_rounding"] is (True if decisions else None)
    found = [one for one in figures["all_reduces"] if "rank 2 comes" in one["why"]]
    first = min((one["detected"] for one in found), default=math.inf)
    in_time("iterations until the late rank is found", first, 50)
    page = (tmp_path / "report.html").read_text()
    assert "One reduction of gradients, native and ours" in page
    stock, ours = (figures["arms"][arm]["phases"]["slow"] for arm in ("stock", "adaptra"))
    in_time("an iteration with it", ours["iteration_ms"], stock["iteration_ms"])
