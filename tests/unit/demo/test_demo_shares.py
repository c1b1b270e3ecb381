"""What the demo writes of shares of microbatches, from decisions, without a training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from view.view_sample import sample_report

from megatron_adaptra.adapt.shares.remedy import ShareDecision
from megatron_adaptra.demo.decided import share_entries
from megatron_adaptra.demo.rounding import Differences
from megatron_adaptra.view.html.report import report_html

PAGE = Path(__file__).parents[3] / "docs" / "files.md"
RAN = [100.0] * 10 + [180.0] * 6 + [999.0] + [120.0] * 13 + [70.0] * 5 + [999.0] + [100.0] * 4
INTO = ShareDecision(
    number=0, iteration=16, detected=13, why="replica 2 takes 2 times as long as the others",
    planning_ms=1.0, microbatches=8, before=[8, 8, 8, 8], after=[9, 9, 5, 9], slow=[2],
    microbatch_ms=[10.0, 10.0, 20.0, 10.0], outside_ms=[10.0, 10.0, 20.0, 10.0],
    predicted_ms=130.0, full_ms=190.0, lower_bound_ms=118.0, gain=0.3,
    cheaper=[{"remedy": "shares of a collective", "leaves_ms": 185.0}],
)  # fmt: skip
BACK = replace(
    INTO, number=1, iteration=35, detected=33, why="replica 2 is as fast as the others",
    before=INTO.after, after=INTO.before, slow=[], predicted_ms=100.0, full_ms=100.0,
    microbatch_ms=[10.0] * 4, outside_ms=[10.0] * 4, cheaper=[],
)  # fmt: skip
ENDS = [10, 30, 40]


def test_the_summary_has_each_decision_and_its_keys_are_described() -> None:
    into, back = share_entries([INTO, BACK], RAN, ENDS)
    assert (into["iteration"], into["detected"], back["iteration"]) == (16, 13, 35)
    assert (into["before"], into["after"]) == ([8] * 4, [9, 9, 5, 9])
    # Its first iteration does not count, nor do those of the phase after it.
    assert (into["measured_ms"], back["measured_ms"]) == (120.0, 100.0)
    assert (into["predicted_ms"], into["full_ms"], into["lower_bound_ms"]) == (130.0, 190.0, 118.0)
    assert share_entries([INTO], RAN[:17], ENDS)[0]["measured_ms"] is None
    assert share_entries([], RAN, ENDS) == []
    text = PAGE.read_text().partition("| `shares` |")[2].partition("\n")[0]
    for key in into:
        assert f"`{key}`" in text, key


@pytest.mark.long
def test_page_and_table_show_what_was_decided() -> None:
    decided = share_entries([INTO, BACK], RAN, ENDS)
    config = {**sample_report().summary["config"], "slow_links": []}
    config |= {"data_parallel": 4, "slow_replicas": ["2:2x"]}
    page = report_html(sample_report(config=config, shares=decided, replans=[]))
    for text in (
        "as fast while replica 2 is slow", "slow replica 2:2x",
        "until a plan for the slow replica ran",
        "Shares of microbatches",
        "replica 2 takes 2 times as long", "8,8,8,8 → 9,9,5,9 microbatches", "predicted 130 ms",
        "measured 120 ms", "shares of a collective would leave 185 ms",
        "other counts of microbatches at iteration 16",
    ):  # fmt: skip
        assert text in page, text


def test_other_counts_explain_other_bits_but_not_other_losses() -> None:
    digests = [{"stock": "a", "adaptra": "b"}]

    def rounding(ours: float, shared: bool, dropout: float = 0.0) -> bool | None:
        losses = {"stock": [1.0], "adaptra": [ours]}
        return Differences.between(
            losses, digests, [0.0], [], "fp32", dropout, shared=shared
        ).equal_to_rounding

    assert rounding(1.0 + 1e-7, True) is True
    assert rounding(1.0 + 1e-3, True) is False
    assert rounding(1.0 + 1e-7, False) is False
    assert rounding(1.0 + 1e-3, True, dropout=0.1) is None
