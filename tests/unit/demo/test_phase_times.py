"""The demo's table compares iterations before a plan was found with those adapted to it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from view.view_sample import sample_report

from megatron_adaptra.cli.demo_table import show
from megatron_adaptra.demo.options import DemoOptions
from megatron_adaptra.demo.phase_times import noise, phase_times
from megatron_adaptra.view import gain
from megatron_adaptra.view.summary import Times

PHASES = {"healthy": (0, 10), "slow": (10, 30), "recovered": (30, 40)}
STOCK = [100.0] * 10 + [400.0] * 20 + [100.0] * 10
OURS = [100.0] * 10 + [400.0] * 14 + [999.0] + [280.0] * 5 + [100.0] * 10


def times(changes: list[int] | None, end: int = 30) -> list[Times]:
    phases = {**PHASES, "slow": (10, end), "recovered": (end, end + 10)}
    more = [400.0] * (end - 30)
    ms = {"stock": STOCK[:30] + more + STOCK[30:], "adaptra": OURS[:30] + more + OURS[30:]}
    return phase_times(phases, ms, 10, changes)


def test_what_the_plan_has_brought_is_not_hidden_by_iterations_before_it() -> None:
    """Most of the slow phase was over by then: the median of all of it is 400 ms."""
    healthy, before, adapted, recovered = times([24, 33])
    assert (before["first_iteration"], before["last_iteration"]) == (10, 23)
    assert (before["stock_ms"], before["adaptra_ms"]) == (400, 400)
    assert (adapted["first_iteration"], adapted["last_iteration"]) == (25, 29)
    assert (adapted["stock_ms"], adapted["adaptra_ms"]) == (400, 280)
    assert (healthy["adaptra_ms"], recovered["adaptra_ms"]) == (100, 100)
    assert gain.key_times(times([24, 33]), "slow") == adapted
    assert gain.wait(times([24, 33])) == before
    assert gain.no_plan(times([24, 33])) == ""


def test_a_later_plan_takes_the_place_of_the_first_one_if_it_has_run() -> None:
    spans = [(one["first_iteration"], one["last_iteration"]) for one in times([14, 24])]
    assert spans[1:3] == [(10, 13), (25, 29)]
    assert times([24, 29])[1:3] == times([24])[1:3]


@pytest.mark.parametrize(
    ("changes", "end", "words"),
    [
        ([], 30, "No plan yet: 20 slow iterations, detection takes up to 22"),
        ([29], 30, "No plan yet: 19 slow iterations, detection takes up to 22"),
        ([], 33, "No other plan in 23 slow iterations: none was expected to save enough"),
        (None, 30, ""),
    ],
)
def test_a_run_without_a_plan_says_why(changes: list[int] | None, end: int, words: str) -> None:
    found = times(changes, end)
    assert len(found) == 3
    assert gain.no_plan(found) == words


def test_noise_is_what_single_iterations_differ_by() -> None:
    steady, wild = [100.0, 101.0] * 10, [80.0, 125.0] * 10
    assert noise(steady, steady) < noise(wild, wild[::-1])
    assert 0.01 < noise([100.0, 103.0] * 10, [101.0] * 20) < 0.03
    assert noise(wild, [100.0] * 20) > 0.1
    assert noise([100.0], [150.0]) >= 0.1, "one iteration shows little"


def test_the_closing_table_has_a_row_for_each() -> None:
    text = io.StringIO()
    summary = sample_report().summary
    show(summary, DemoOptions(), Console(file=text, width=120))
    for words in ("slow, not adapted yet (3)", "slow, adapted (22)", "2.47 x", "1.00 x (noise)"):
        assert words in text.getvalue()
    summary["times"] = times([])
    text.truncate(0)
    show(summary, DemoOptions(), Console(file=text, width=120))
    assert "No plan yet: 20 slow iterations, detection takes up to 22" in text.getvalue()
