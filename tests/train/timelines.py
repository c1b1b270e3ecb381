"""What the demo writes down: timelines, as a viewer of traces gets them, and its figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from run_records import read_log

from megatron_adaptra.demo.comparison import BUSY, WARM_UP
from megatron_adaptra.ir.op import COMPUTE
from megatron_adaptra.ir.schedule import Schedule

PAGE = Path(__file__).resolve().parents[2] / "docs/files.md"


def drawn(out: Path, process: str) -> dict[str, list[dict[str, Any]]]:
    """The bars of a process in timeline.json: by the name of the row, in the order of time."""
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    pids = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    mine = [event for event in events if event["pid"] == pids[process]]
    rows = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
    bars = sorted((e for e in mine if e["ph"] == "X"), key=lambda e: (e["ts"], e["name"]))
    return {row: [bar for bar in bars if bar["tid"] == tid] for tid, row in sorted(rows.items())}


def ran(out: Path, process: str) -> list[list[str]]:
    """The ops of the iteration that is drawn, by stage, in order."""
    kinds = {kind.value for kind in COMPUTE}  # halves, too: whether they pay depends on the machine
    return [
        [bar["name"] for bar in row if bar["name"].rstrip("0123456789") in kinds]
        for row in drawn(out, process).values()
        if row
    ]


def keys(value: Any) -> set[str]:
    """Of all objects in it."""
    if isinstance(value, list):
        return set().union(*map(keys, value))
    if not isinstance(value, dict):
        return set()
    return set(value).union(*map(keys, value.values()))


def check_report(done: dict[str, Any], out: Path) -> None:
    """Everything that is compared is of one plan, and every key is described."""
    text = PAGE.read_text().partition("## The figures of a demo")[2].partition("\n## ")[0]
    assert keys(done) - set(re.findall("`([^`]+)`", text)) == set()
    compared, ours = done["compared"], done["arms"]["adaptra"]
    span = slice(compared["first_iteration"], compared["last_iteration"] + 1)
    for arm in done["arms"].values():
        assert arm["measured_slow_ms"] == median(arm["iteration_ms"][span])
    of_plan = [r for r in done["replans"] if r["iteration"] == compared["since_iteration"]]
    for replan in of_plan:
        assert compared["warmup"] == replan["warmup_after"]
        assert ours["predicted_slow_ms"] == pytest.approx(replan["predicted_ms"])
        assert ours["measured_slow_ms"] == replan["measured_ms"]
    plans = {d["iteration"]: d["plan"] for d in read_log(out / "decisions.jsonl")}
    if compared["since_iteration"] in plans:
        plan = Schedule.parse(plans[compared["since_iteration"]])
        lines = [[str(op) for op in line] for line in plan.order]
        assert ran(out, "adaptra measured") == ran(out, "adaptra predicted") == lines
        assert ours["peak_in_flight"] == list(plan.peak_in_flight())
    assert ran(out, "stock measured") == ran(out, "stock predicted") != []
    # One statistic: the factor reported of a phase is the ratio of the table's medians.
    times = [done["arms"][arm]["phases"] for arm in ("stock", "adaptra")]
    for key, phase, power in (("speedup_slow", "slow", 1), ("slowdown_healthy", "healthy", -1)):
        stock, mine = (arm[phase]["iteration_ms"] for arm in times)
        assert done[key] == pytest.approx((stock / mine) ** power)
    for row in done["times"]:
        span = slice(max(row["first_iteration"], WARM_UP), row["last_iteration"] + 1)
        for name, arm in done["arms"].items():
            assert row[f"{name}_ms"] == median(arm["iteration_ms"][span])
    for name, load in done["machine"]["cpu_share"].items():
        assert 0 < load["own"] <= 1, name
        busy = name != "compared" and load["others"] > BUSY
        noted = any("The machine was busy" in note and name in note for note in done["notes"])
        assert noted or not busy
    for replan in done["replans"]:
        if replan["measured_ms"] is not None and replan not in of_plan:
            off = replan["measured_ms"] / replan["predicted_ms"] - 1
            name = f"The plan of iteration {replan['iteration']} took "
            assert any(note.startswith(name) for note in done["notes"]) is (abs(off) > 0.15)
    for arm in ("stock", "adaptra"):
        off = done["arms"][arm]["measured_slow_ms"] / done["arms"][arm]["predicted_slow_ms"] - 1
        noted = any(note.startswith(f"{arm} took ") for note in done["notes"])
        assert noted is (abs(off) > 0.15)
