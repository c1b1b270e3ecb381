"""The demo of replicas that have one plan: found, moved, healed, and shown worker by worker."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from patience import decided, in_time
from run_records import read_log, read_record
from running import summary
from timelines import drawn

from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule

DOCS = Path(__file__).resolve().parents[2] / "docs"
SHAPE: dict[str, Any] = {"stages": 2, "data_parallel": 2}
WORKERS = ["0.0", "0.1", "1.0", "1.1"]


def lines(out: Path, process: str) -> dict[str, list[str]]:
    """The ops of the iteration that is drawn, by the name of the row, in order."""
    return {
        row: [bar["name"] for bar in bars if re.fullmatch(r"[FBIW]\d+@\d", bar["name"])]
        for row, bars in drawn(out, process).items()
    }


def check(done: dict[str, Any], out: Path) -> list[Schedule]:
    """All files are of all workers; returns the plans that came into force."""
    since = done["compared"]["since_iteration"]
    in_time("iterations until a plan is in force", 0 if since else math.inf, 1)
    assert done["workers"] == WORKERS
    schema = json.loads((DOCS / "decision-log.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    for line in (out / "decisions.jsonl").read_text().splitlines():
        validator.validate(json.loads(line))
    decisions = [d for d in read_log(out / "decisions.jsonl") if d["committed"]]
    plans = [Schedule.parse(d["plan"]) for d in decisions]
    assert [len(r["warmup_after"]) for r in done["replans"]] == [4] * len(done["replans"])
    conditions = ReplicaConditions.from_json(decisions[0]["conditions"])
    assert (conditions.replicas, conditions.stages) == (2, 2)
    (run,) = read_record(out / "replica-0.jsonl")
    assert run.about["replicas"] == len(run.about["estimators"]) == 2
    rows = {tuple(report.worker for report in row.reports) for row in run.iterations.values()}
    assert rows == {(0, 1, 2, 3)}
    # Drawn are all workers of both arms; ours ran what was planned.
    names = [f"worker {name}" for name in WORKERS]
    for process in ("stock measured", "stock predicted", "adaptra measured", "adaptra predicted"):
        ops = lines(out, process)
        assert list(ops)[:1] == ["worker 0.0"]
        assert [row.partition(",")[0] for row in ops] == names
        assert any(ops.values())
        if process == "adaptra measured":
            at = [d["iteration"] for d in decisions].index(since)
            assert list(ops.values()) == [[str(op) for op in line] for line in plans[at].order]
    page = (out / "report.html").read_text()
    for words in ("worker 1.1", "2 replicas", "stripe: of replica"):
        assert words in page
    text = (DOCS / "files.md").read_text().partition("## The figures of a demo")[2]
    named = set(re.findall("`([^`]+)`", text.partition("\n## ")[0]))
    assert {*done, *done["config"], *done["compared"]} <= named
    return plans


def trained(out: Path, chosen: tuple[str, str, float], **options: Any) -> dict[str, Any]:
    """The demo's summary. `chosen`: engine, reroute and dropout, which nobody has asked for."""
    done = summary(out, **SHAPE, **options)
    config = done["config"]
    assert (config["engine"], config["reroute"], config["dropout"]) == chosen
    return done


@pytest.mark.timing
def test_partners_swap_round_a_slow_path_bit_for_bit(tmp_path: Path) -> None:
    """Over engine native; Megatron's own dropout stays."""
    done = trained(
        tmp_path, ("native", "swap", 0.1), microbatches=4, iterations=44,
        slow=["0.0-0.1:250ms@8..24"],
    )  # fmt: skip
    assert done["losses_identical"]
    assert done["parameters_identical"]
    assert done["losses_difference"] == done["parameters_difference"] == 0.0
    assert done["equal_to_rounding"] is None
    decided("a change round the path, and one back", len(done["replans"]) >= 2)
    into, *_, back = done["replans"]
    decided("no change before the path is slow", into["iteration"] > 8)
    # On a busy machine a worker may look slow at the same moment.
    decided("a change for the path", "path 0.0>0.1 takes" in into["why"])
    first, *_, last = check(done, tmp_path)
    moved = {(stage, home, new) for (stage, home, _), new in first.routes.moved.items()}
    decided("partners exchanged", moved == {(1, 0, 1), (1, 1, 0)})
    in_time("microbatches that are still away", len(last.routes.moved), 1)
    assert "back to 1F1B" in back["why"]
    slow = done["arms"]["stock"]["measured_slow_ms"]
    in_time("an adapted iteration", 1.5 * done["arms"]["adaptra"]["measured_slow_ms"], slow)


@pytest.mark.large  # a busy machine makes other workers slow, too
@pytest.mark.quiet
@pytest.mark.timing
def test_a_slow_worker_gives_microbatches_away_and_gets_them_back(tmp_path: Path) -> None:
    done = trained(
        tmp_path, ("executor", "auto", 0.0), microbatches=8, iterations=90,
        slow=["1.1:6x@10..34"],
    )  # fmt: skip
    found = [r["iteration"] for r in done["replans"] if "worker 1.1 takes" in r["why"]]
    assert done["equal_to_rounding"] is True
    assert done["losses_difference"] < 1e-6
    assert done["parameters_difference"] < 1e-4
    in_time("iterations until it is found", min(found, default=math.inf), 34)
    assert [len(done["memory"][key]) for key in ("budget", "predicted_peak")] == [4, 4]
    plans = check(done, tmp_path)
    away = {place: new for plan in plans for place, new in plan.routes.moved.items()}
    decided("its work given away", any(h == 1 and new == 0 for (_, h, _), new in away.items()))
    pairs = zip(done["replans"], plans, strict=True)
    home = [replan["iteration"] for replan, plan in pairs if not plan.routes.moved]
    in_time("iterations until all is at home again", max(home, default=math.inf), 90)
    slow = done["arms"]["stock"]["measured_slow_ms"]
    in_time("an adapted iteration", 1.2 * done["arms"]["adaptra"]["measured_slow_ms"], slow)
