"""What the demo writes of all-reduces, from decisions that were voted on, without a training."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from adapt.voted_group import BUFFER, RATE, VotedGroup
from run_records import read_log
from view.view_sample import sample_report

from megatron_adaptra.adapt.reductions.decisions import ReductionDecision
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.demo.decided import reduction_entries
from megatron_adaptra.plan.reductions.figures import Figures
from megatron_adaptra.view.html.report import report_html

SCHEMA = Path(__file__).parents[3] / "docs" / "decision-log.schema.json"
PAGE = Path(__file__).parents[3] / "docs" / "files.md"
LATE = {2: BUFFER}
FOUND = range(10, 30)  # iterations in which the rank is late


def voted(path: Path) -> list[ReductionDecision]:
    """Decisions in a group of four, of which rank 2 was late for a while."""
    group = VotedGroup(4, path, 0.05)
    group.loop.announce = None
    group.train(FOUND.start)
    group.train(len(FOUND), LATE)
    group.train(12)
    group.loop.drain()
    group.close()
    return list(group.loop.log.in_force)


def test_all_lines_of_the_log_are_as_their_schema_has_them(tmp_path: Path) -> None:
    path = tmp_path / "decisions.gradients8.jsonl"
    made = voted(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"all-reduce", "vote", "outcome"}
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    for line in lines:
        validator.validate(line)
        for key in line:
            with pytest.raises(jsonschema.ValidationError):
                validator.validate({k: v for k, v in line.items() if k != key})
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({**line, "more": 1})
    into, back = read_log(path)
    assert (into["committed"], back["committed"]) == (True, True)
    assert into["measured_ms"] == pytest.approx(reduction_entries(made)[0]["measured_ms"])
    figures = Figures.from_json(json.loads(json.dumps(into["figures"])))
    assert figures.to_json() == into["figures"]
    assert [1e3 * late for late in figures.lateness] == into["late_ms"]
    assert figures.ports.out == pytest.approx((RATE,) * 4)


@pytest.mark.long
@pytest.mark.parametrize("damage", [{"paths": {"0>x": {}}}, {"out": 3}, {"late": None}, {}])
def test_damaged_figures_are_refused(damage: dict[str, object], tmp_path: Path) -> None:
    data = voted(tmp_path / "log")[0].figures
    assert data is not None
    with pytest.raises(BadInput):
        Figures.from_json({**data, **damage} if damage else None)


def test_the_summary_has_each_decision_and_its_keys_are_described(tmp_path: Path) -> None:
    made = voted(tmp_path / "log")
    into, back = reduction_entries(made)
    assert FOUND.start <= into["detected"] < into["iteration"] < FOUND.stop
    assert into["ranks"] == [8, 9, 10, 11]
    assert "rank 10 comes 160 ms late" in into["why"]
    assert (into["before"], back["after"]) == ("native", "native")
    assert "owned by 2" in into["after"]
    assert into["late_ms"] == pytest.approx([0, 0, 160, 0], abs=1)
    assert into["predicted_ms"] < 0.8 * into["native_ms"]
    assert into["measured_ms"] == pytest.approx(into["predicted_ms"], rel=0.02)
    text = PAGE.read_text().partition("## The figures of a demo")[2].partition("\n## ")[0]
    for key in into:
        assert f"`{key}`" in text


@pytest.mark.long
def test_the_page_shows_what_was_decided(tmp_path: Path) -> None:
    made = voted(tmp_path / "log")
    sample = sample_report()
    config = {**sample.summary["config"], "slow_links": [], "data_parallel": 4}
    config |= {"late_ranks": ["2:160ms"], "hosts": ["all:20MB/s"]}
    page = report_html(
        sample_report(config=config, all_reduces=reduction_entries(made), replans=[])
    )
    for words in (
        "as fast while rank 2 is late", "data-parallel rank 2 comes 160ms late",
        "ports of hosts: all:20MB/s", "until a plan for the late rank ran",
        "Reductions of gradients", "rank 10 comes 160 ms late",
        "native → direct, nothing owned by 2", "rank 10 comes in time",
    ):  # fmt: skip
        assert words in page, words
