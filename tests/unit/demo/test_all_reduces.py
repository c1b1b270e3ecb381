"""What the demo writes of all-reduces, from decisions that were voted on, without a training."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from adapt.voted_group import BUFFER, RATE, VotedGroup
from run_records import read_log
from view.view_sample import sample_report

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.demo.all_reduces import (
    GroupReductions,
    drawn_reduction,
    entries,
    known_now,
    reduction_of,
    why_native,
)
from megatron_adaptra.demo.options import DemoOptions
from megatron_adaptra.plan.reductions.figures import Figures
from megatron_adaptra.plan.reductions.simulated import NATIVE_CUT, natively
from megatron_adaptra.view.html.report import report_html
from megatron_adaptra.view.report import Simulated

SCHEMA = Path(__file__).parents[3] / "docs" / "decision-log.schema.json"
PAGE = Path(__file__).parents[3] / "docs" / "files.md"
LATE = {2: BUFFER}
FOUND = range(10, 30)  # iterations in which the rank is late
OPTIONS = DemoOptions(stages=2, data_parallel=4, slow=["2:160ms"])


def voted(path: Path, min_gain: float = 0.05) -> GroupReductions:
    """A group of four, of which rank 2 was late for a while."""
    group = VotedGroup(4, path, min_gain)
    group.loop.announce = None
    group.train(FOUND.start)
    group.train(len(FOUND), LATE)
    known = known_now([group.loop])
    group.train(12)
    (made,) = GroupReductions.of([group.loop], known)
    group.close()
    return made


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
    assert into["measured_ms"] == pytest.approx(entries([made])[0]["measured_ms"])
    figures = Figures.from_json(json.loads(json.dumps(into["figures"])))
    assert figures.to_json() == into["figures"]
    assert [1e3 * late for late in figures.lateness] == into["late_ms"]
    assert figures.ports.out == pytest.approx((RATE,) * 4)


@pytest.mark.long
@pytest.mark.parametrize("damage", [{"paths": {"0>x": {}}}, {"out": 3}, {"late": None}, {}])
def test_damaged_figures_are_refused(damage: dict[str, object], tmp_path: Path) -> None:
    data = voted(tmp_path / "log").decisions[0].figures
    assert data is not None
    with pytest.raises(BadInput):
        Figures.from_json({**data, **damage} if damage else None)


def test_the_summary_has_each_decision_and_its_keys_are_described(tmp_path: Path) -> None:
    made = voted(tmp_path / "log")
    into, back = entries([made])
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


def titled(drawn: Simulated) -> list[list[float]]:
    """By picture, the milliseconds in its title."""
    return [[float(ms) for ms in re.findall(r"([\d.]+) ms", title)] for title in drawn.gantts]


def test_drawn_is_what_ran_longest_in_the_slow_phase(tmp_path: Path) -> None:
    made = voted(tmp_path / "log")
    first, back = made.decisions
    drawn = drawn_reduction([made], (FOUND.start, FOUND.stop))
    assert drawn is not None
    assert f"iteration {first.iteration}," in drawn.note
    assert "ranks 8 to 11" in drawn.note
    (native_ms, measured_native_ms), (ours_ms, _) = titled(drawn)
    assert list(drawn.gantts)[1].startswith(f"{first.after}: ")
    assert ours_ms == pytest.approx(first.predicted_ms, rel=0.005)
    assert native_ms > 1.2 * ours_ms
    assert measured_native_ms == pytest.approx(first.native_ms, rel=0.1)
    # Of another group, whose plan was in force for an iteration alone: the longer one is drawn.
    short = replace(first, iteration=FOUND.stop - 1, ranks=[0, 1, 2, 3])
    both = [GroupReductions((0, 1, 2, 3), [short], None), made]
    assert drawn_reduction(both, (FOUND.start, FOUND.stop)) == drawn
    assert drawn_reduction([replace(made, decisions=[back])], (0, 99)) is None
    assert drawn_reduction([replace(made, decisions=[])], (0, 99)) is None


def test_native_is_drawn_as_gloo_crosses_delays(tmp_path: Path) -> None:
    """Two in each step, as gains are predicted."""
    first, _ = voted(tmp_path / "log").decisions
    assert first.figures is not None
    far = {**first.figures, "delay": 0.02}
    predicted = natively(Figures.from_json(far), NATIVE_CUT)
    drawn = reduction_of(replace(first, figures=far))
    assert titled(drawn)[0][0] == pytest.approx(1e3 * predicted, rel=0.005)


@pytest.mark.long
def test_page_and_picture_show_one_reduction_native_and_ours(tmp_path: Path) -> None:
    made = voted(tmp_path / "log")
    reduction = drawn_reduction([made], (FOUND.start, FOUND.stop))
    assert reduction is not None
    sample = sample_report()
    config = {**sample.summary["config"], "slow_links": [], "data_parallel": 4}
    config |= {"late_ranks": ["2:160ms"], "hosts": ["all:20MB/s"]}
    report = replace(
        sample_report(config=config, all_reduces=entries([made]), replans=[]), simulated=[reduction]
    )
    page = report_html(report)
    for words in (
        "as fast while rank 2 is late", "data-parallel rank 2 comes 160ms late",
        "ports of hosts: all:20MB/s", "until a plan for the late rank ran",
        "One reduction of gradients, native and ours", "ranks 8 to 11", "Reductions of gradients",
        "rank 10 comes 160 ms late", "native → direct, nothing owned by 2", "rank 10 comes in time",
        "not there yet", list(reduction.gantts)[1].partition(": ")[2],
    ):  # fmt: skip
        assert words in page, words
    native, ours = reduction.gantts
    assert native.startswith("native: ")
    assert ours.startswith("direct, nothing owned by 2: ")
    assert [gantt.rows for gantt in reduction.gantts.values()] == [8, 8]
    assert "One reduction" not in report_html(replace(report, simulated=[]))


def test_a_group_that_stays_with_native_has_a_sentence(tmp_path: Path) -> None:
    made = voted(tmp_path / "log", min_gain=0.9)
    assert made.decisions == []
    first, second = why_native([made], OPTIONS)
    assert first.startswith(
        "Gradients of ranks 8 to 11 stayed with native: rank 10 comes 160 ms late, after which "
        "native takes "
    )
    assert "of an iteration of 1201 ms" in first
    assert "with --netlab" in second
    netlab = replace(OPTIONS, netlab=True)
    assert why_native([made], netlab) == [first]
    assert why_native([replace(made, known=None)], OPTIONS) == []
    assert why_native([voted(tmp_path / "found")], OPTIONS) == []
