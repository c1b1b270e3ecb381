"""`benchmarks/reproduce.py`: the published figures as published, beside what `plan` says."""

import csv
import json
import sys
from pathlib import Path

import pytest
from commands import strict
from pages import page, png_size, words

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import reproduce  # noqa: E402
from reference import METHODS, experiments, predict  # noqa: E402

FOLDER = BENCHMARKS / "published"
ONE = "single-7B-2_3-30ms"


made = {}


def once(conditions):
    """The prediction for them, which takes a second and is the same each time."""
    key = json.dumps(conditions.to_json())
    if key not in made:
        made[key] = predict(conditions)
    return made[key]


@pytest.fixture
def run(capsys, monkeypatch):
    """The benchmark in this process: what it prints."""
    monkeypatch.setattr(reproduce, "predict", once)

    def run(*arguments):
        assert reproduce.main(list(map(str, arguments))) == 0
        return capsys.readouterr().out

    return run


def test_all_that_is_published_is_there():
    profiles = {p["name"]: p for p in json.loads((FOLDER / "pipemorph_profiles.json").read_text())}
    known = experiments()
    assert [e.name for e in known] == list(profiles)
    assert len(known) == 14
    for e in known:
        assert e.conditions.stages == profiles[e.name]["stages"]
        assert e.plan_ms == profiles[e.name]["published_plan_ms"]
        assert set(e.measured) == set(METHODS)
        assert e.measured["ZB-CPU-ReSchedule"] == profiles[e.name]["published_measured_ms"]
    rows = list(csv.DictReader((FOLDER / "pipemorph_measured.csv").read_text().splitlines()))
    assert sum(len(e.measured) for e in known) == len(rows)


@pytest.mark.long
def test_a_row_is_what_plan_says(here, run):
    data = strict(run("--json", "--name", ONE))
    (row,) = data["profiles"]
    plan = here.json("plan", "--profile", FOLDER / "pipemorph_profiles.json", "--name", ONE)
    assert row["adaptive_ms"] == plan["predicted_ms"]
    assert row["stock_ms"] == plan["stock_ms"]
    assert row["lower_bound_ms"] == plan["lower_bound_ms"]
    assert row["adaptive_peak_in_flight"] == max(plan["peak_in_flight"])
    assert row["measured_ms"]["1F1B"] == 1102.4
    assert row["published_plan_ms"] == 345
    within = row["adaptive_within_budget_ms"]
    assert within["p"] >= within["2p"] >= row["adaptive_ms"] >= row["lower_bound_ms"] - 1e-6
    for name, more in (("p", [4]), ("p + recompute", [4, "--recompute"]), ("2p", [8])):
        flags = ["--profile", FOLDER / "pipemorph_profiles.json", "--name", ONE]
        limited = here.json("plan", *flags, "--activation-budget", *more)
        assert within[name] == limited["predicted_ms"]
    assert within["p"] > row["adaptive_ms"]
    assert within["p + recompute"] <= within["p"] + 1e-6
    total = data["summary"]["predicted / measured 1F1B"]
    assert total["mean"] == total["lowest"] == total["highest"] == row["stock_ms"] / 1102.4


def test_files(run, tmp_path):
    pytest.importorskip("matplotlib")
    run("--name", ONE, "--out", tmp_path)
    assert strict((tmp_path / "reproduce.json").read_text())["profiles"][0]["name"] == ONE
    root = page(tmp_path / "reproduce.html")
    assert "1102" in words(root)
    assert "ReSchedule measured" in words(root)
    assert png_size(tmp_path / "reproduce.png")[0] > 1000
