"""`adaptra compare`: each cell is what `plan` says, and the pictures hold the same figures."""

from dataclasses import replace

import pytest
from commands import SMALL, process, strict
from pages import page, titles, words

from benchmarks.common import both_ways
from megatron_adaptra.cli.tradeoff import SLOWDOWN, default_budgets, delay_tolerance, slower
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.plan import make_plan

JOB = Conditions(6, (9e-3,) * 3, (10e-3,) * 3, (6e-3,) * 3, both_ways([0.0, 0.02]))


def cells(data, policy):
    return [cell and cell["iteration_ms"] for cell in data["policies"][policy]["within_budgets"]]


@pytest.mark.long
def test_every_cell_is_a_plan_within_its_budget(here):
    data = here.json("compare", *SMALL)
    assert data["budgets"] == [3, 5, None]
    assert set(data["policies"]) > {"1f1b", "gpipe", "zb-h1", "zb-h2", "adaptive + recompute"}
    assert "exact" not in data["policies"]
    for name, row in data["policies"].items():
        policy = name.removesuffix(" + recompute")
        for budget, cell in zip(data["budgets"], row["within_budgets"], strict=True):
            limit = ["--activation-budget", budget] if budget else []
            flags = ["--policy", policy, *limit, *["--recompute"] * (policy != name)]
            if cell is None:  # planning it is refused, or its check fails
                with pytest.raises(AssertionError):
                    here("plan", *SMALL, *flags)
                here.capsys.readouterr()
                continue
            plan = here.json("plan", *SMALL, *flags)
            assert cell["iteration_ms"] == plan["predicted_ms"]
            assert cell["peak_in_flight"] == max(plan["peak_in_flight"])
            assert cell["ratio_to_unlimited_bound"] == pytest.approx(
                plan["predicted_ms"] / data["unlimited_bound_ms"]
            )
            assert cell["peak_in_flight"] <= (budget or 6)
    assert data["stock_ms"] == cells(data, "1f1b")[0]
    assert cells(data, "gpipe")[0] is None


@pytest.mark.long
def test_more_memory_is_never_slower(here):
    data = here.json("compare", *SMALL, "--budgets", "1,2,3,4,6")
    for name in ("adaptive", "adaptive + recompute"):
        times = cells(data, name)
        assert times == sorted(times, reverse=True)
        assert min(times) >= data["unlimited_bound_ms"] - 1e-6
    for less, more in zip(
        cells(data, "adaptive + recompute"), cells(data, "adaptive"), strict=True
    ):
        assert less <= more + 1e-6
    assert cells(data, "1f1b")[:2] == [None, None]


def test_the_table():
    out = process("compare", *SMALL, "--budgets", "3,inf").stdout
    assert "3 stages × 6 microbatches, link 1–2 slower by 20 ms" in out
    row = next(line for line in out.splitlines() if "gpipe" in line)
    assert "–" in row
    assert "no limit" in out
    assert "left out: interleaved; chunks 1: policy interleaved needs" in out


def test_what_runs_by_default_comes_first(here, tmp_path):
    """The headline is what --adaptra alone gains; all others name their flags."""
    data = here.json("compare", *SMALL)
    plan = here.json("plan", *SMALL)
    assert data["default_engine_ms"] == plan["default_engine_ms"] == cells(data, "warmup")[-1]
    out, _ = here("compare", *SMALL)
    _, first, *_ = out.splitlines()
    times = data["stock_ms"] / data["default_engine_ms"]
    assert first.startswith(f"With --adaptra {times:.2f}× as fast as 1F1B: ")
    rows = [line.split("│") for line in out.splitlines() if "│" in line]
    assert [row[1].strip() for row in rows[:3]] == ["warmup", "adaptive", "adaptive + recompute"]
    assert rows[0][-2].strip() == "--adaptra"
    assert all(row[-2].strip() for row in rows[:-1])


def test_budgets_are_shown_in_bytes_where_these_are_known(here):
    out, _ = here("compare", *SMALL, "--activation-bytes", "400MB", "--budgets", "3")
    assert "3 (1.2GB)" in out
    assert "3 (1.2GB)" not in here("compare", *SMALL, "--budgets", "3")[0]


@pytest.mark.long
def test_one_reason_is_printed_once(here):
    out, _ = here("compare", *SMALL, "--chunks", 2, "--budgets", "inf")
    (line,) = [line for line in out.splitlines() if line.startswith("left out")]
    assert line.startswith("left out: 1f1b, gpipe, zb-h1, zb-h2; chunks 2: it has to be 1")


def test_default_budgets():
    assert default_budgets(JOB) == (3, 5, float("inf"))
    assert default_budgets(replace(JOB, microbatches=24)) == (3, 5, 6, 9, float("inf"))
    own = replace(JOB, microbatches=24, activation_budget=(7.0,) * 3)
    assert default_budgets(own) == (3, 5, 6, 7, 9, float("inf"))
    assert default_budgets(replace(JOB, microbatches=2)) == (float("inf"),)


def test_bad_budgets(here):
    line = here.refused("compare", *SMALL, "--budgets", "8,nan")
    assert line == (
        "--budgets '8,nan': it has to be numbers of at least 1, or inf, with commas between"
    )


def warmup(job, policy):
    return make_plan(job, "warmup")


@pytest.mark.parametrize("budget", [3.0, 6.0])
def test_the_delay_tolerance_is_the_edge(budget):
    job = replace(JOB, activation_budget=(budget,) * 3)
    times = delay_tolerance(job, warmup)
    most = (1 + SLOWDOWN) * warmup(job.healthy(), "").predicted
    assert times > 0
    assert warmup(slower(job, times), "").predicted <= most + 1e-9
    assert warmup(slower(job, 1.04 * times), "").predicted > most


def test_endless_tolerance_ends_somewhere_and_none_is_zero():
    tiny = replace(JOB, links={(0, 1): LinkState(1e-9)})
    assert delay_tolerance(tiny, warmup) == 64
    huge = replace(JOB, links={(0, 1): LinkState(1e3)})
    assert delay_tolerance(huge, warmup) < 0.01


def test_slower_leaves_all_but_delay_alone():
    links = {(0, 1): LinkState(0.02, 1e9, 0.01), (1, 2): LinkState(0.0, 2e9)}
    job = replace(JOB, links=links)
    assert slower(job, 1.0) == job
    assert slower(job, 2.0).links == {(0, 1): LinkState(0.04, 1e9, 0.02), (1, 2): links[1, 2]}


@pytest.mark.long
def test_out_holds_data_and_page(here, tmp_path):
    out, _ = here("compare", *SMALL, "--budgets", "3,inf", "--out", tmp_path / "new")
    for name in ("compare.json", "compare.html"):
        assert str(tmp_path / "new" / name) in out
    data = strict((tmp_path / "new" / "compare.json").read_text())
    assert set(data["delay_tolerance"]) == {"adaptive", "adaptive + recompute"}
    assert all(times >= 0 for line in data["delay_tolerance"].values() for times in line)
    root = page(tmp_path / "new" / "compare.html")
    printed = words(root)
    for text in (
        "Memory against time",
        "How much delay a given memory hides",
        "zb-h1",
        "6 (all)",
    ):
        assert text in printed
    dots = [title.splitlines()[0] for title in titles(root) if "\n" in title]
    assert dots.count("adaptive") == 4  # two budgets in two charts
    assert dots.count("1f1b") == 1
