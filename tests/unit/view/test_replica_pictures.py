"""Pictures of several replicas: whose microbatch a bar is, who is slow, who is dead."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.program import lower
from megatron_adaptra.ir.replicas import ReplicaConditions
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.sim.clock import simulate
from megatron_adaptra.view.ascii import ascii_gantt, ascii_legend
from megatron_adaptra.view.bars import Gantt
from megatron_adaptra.view.chrome import chrome_trace
from megatron_adaptra.view.drawing import Drawing, drawing_html, drawing_svg
from megatron_adaptra.view.pipeline import pipeline_gantt
from megatron_adaptra.view.theme import GROUPS, group_colour

SVG = "{http://www.w3.org/2000/svg}"
# Two microbatches each: worker 1.1 is dead, so that 0.1 and 2.1 run its microbatches.
TEXT = """schedule {"chunks": 1, "microbatches": 2, "policy": "by hand", "replicas": 3, "why": ""}
0.0: F0@0 F1@0 B0@0 B1@0
0.1: F0@0 B0@0 F0@1 B0@1 F1@0 B1@0
1.0: F0@1 F1@1 B0@1 B1@1
1.1:
2.0: F0@2 F1@2 B0@2 B1@2
2.1: F0@2 B0@2 F1@1 B1@1 F1@2 B1@2
"""
CONDITIONS = ReplicaConditions(
    Conditions(2, (0.01,) * 2, (0.01,) * 2, (0.01,) * 2, step_seconds=0.01),
    3,
    frozenset({3}),
    slow={4: 2.0},
    ports={0: 1e6},
)
DEAD = 3


def drawing() -> Drawing:
    timeline = simulate(lower(Schedule.parse(TEXT)), CONDITIONS)
    picture = pipeline_gantt(timeline, timeline.makespan, CONDITIONS)
    return Drawing("by hand", "a job", "1.1 is dead", picture)


def gantt() -> Gantt:
    return drawing().gantt


def rects(svg: str) -> dict[tuple[str, float], list[ET.Element]]:
    """The rectangles of each box, by the first word of its title and its height."""
    out: dict[tuple[str, float], list[ET.Element]] = {}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        title, found = group.findtext(f"{SVG}title") or "", group.findall(f"{SVG}rect")
        out[title.split()[0], float(found[0].get("y", "nan"))] = found
    return out


def test_work_for_another_replica_has_a_stripe_in_that_ones_colour() -> None:
    found = rects(drawing_svg(drawing()))
    striped = {name for (name, _), boxes in found.items() if len(boxes) == 2}
    assert striped == {"F0@1", "B0@1", "F1@1", "B1@1"}
    for (name, _), boxes in found.items():
        if name in striped and len(boxes) == 2:
            box, stripe = boxes
            assert stripe.get("fill") == group_colour(1)
            assert stripe.get("width") == box.get("width")
            inside = float(stripe.get("y", "nan")) + float(stripe.get("height", "nan"))
            below = float(box.get("y", "nan")) + float(box.get("height", "nan"))
            assert inside == pytest.approx(below)
    # Its own microbatches at stage 0 have none, although the names are the same.
    plain = [boxes for (name, _), boxes in found.items() if name == "F0@1" and len(boxes) == 1]
    assert len(plain) == 1


def test_rows_are_grouped_by_replica_and_name_who_is_slow_or_dead() -> None:
    root = ET.fromstring(drawing_svg(drawing()))
    words = [e.text for e in root.iter(f"{SVG}text")]
    for text in ("worker 1.1", "dead", "2x slow", "slow port", "stripe: of replica 1"):
        assert text in words
    titles = [e.text or "" for e in root.iter(f"{SVG}title")]
    assert [title for title in titles if title.startswith("replica")] == [
        "replica 0", "replica 1", "replica 2",
    ]  # fmt: skip
    assert "worker 1.1, dead" in titles
    tops = sorted({y for (_, y) in rects(drawing_svg(drawing()))})
    assert len(tops) == 5  # nothing on the row of the dead worker
    gaps = [after - before for before, after in pairwise(tops)]
    assert gaps[0] < gaps[1]  # from 0.0 to 0.1, and from there to the next replica


def test_no_dead_worker_takes_part_in_the_step() -> None:
    picture = gantt()
    assert {bar.row for bar in picture.bars if bar.category.name == "optimizer step"} == {
        0, 1, 2, 4, 5
    }  # fmt: skip
    assert picture.gone == {DEAD}
    assert dict(picture.notes) == {0: "slow port", DEAD: "dead", 4: "2x slow"}


def test_every_message_still_joins_its_two_ops() -> None:
    picture = gantt()
    assert len(picture.arrows) == 12
    for arrow in picture.arrows:
        assert arrow.joins is not None
        made, used = (picture.bars[at] for at in arrow.joins)
        assert (made.row, used.row) == (arrow.source, arrow.target)
        assert made.details["home"] == used.details["home"]
        assert made.details["microbatch"] == used.details["microbatch"]


def test_text_names_the_home_of_what_is_not_a_workers_own() -> None:
    picture = gantt()
    wide, narrow = (ascii_gantt(picture, width).splitlines() for width in (200, 60))
    lines = {line.split("|")[0].strip(): line for line in wide[1:] if "|" in line}
    assert list(lines) == [
        "worker 0.0, slow port", "worker 0.1", "worker 1.0", "worker 1.1, dead",
        "worker 2.0, 2x slow", "worker 2.1",
    ]  # fmt: skip
    assert re.search(r"F0-+B0=+F0@1-+B0@1=+\.*F1-+B1=+", lines["worker 0.1"])
    assert "@" not in lines["worker 1.0"]
    assert not lines["worker 1.1, dead"].partition("|")[2].strip("| ")
    assert wide.count("") == 2  # between three groups
    assert any(re.search("@1|f", line.partition("|")[2]) for line in narrow)
    assert "F0@1 or @1 or f of another replica" in ascii_legend(picture)


def test_a_slow_message_names_its_workers() -> None:
    slow = replace(CONDITIONS, paths={(2, 1): LinkState(0.05)})
    timeline = simulate(lower(Schedule.parse(TEXT)), slow)
    svg = drawing_svg(Drawing("by hand", "", "", pipeline_gantt(timeline, timeline.makespan, slow)))
    titles = [e.text or "" for e in ET.fromstring(svg).iter(f"{SVG}title")]
    assert any("from worker 1.0 to 0.1" in title for title in titles)


def test_page_and_trace_hold_the_same() -> None:
    page = drawing_html(drawing())
    assert "stripe: of replica 1" in page
    events = chrome_trace({"a": gantt()})["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names[DEAD] == "worker 1.1, dead"
    links = {e["name"] for e in events if e["ph"] == "b"}
    assert links == {
        f"link {one} to {other}"
        for a, b in (("0.0", "0.1"), ("1.0", "0.1"), ("1.0", "2.1"), ("2.0", "2.1"))
        for one, other in ((a, b), (b, a))
    }
    homes = [e["args"]["home"] for e in events if e["ph"] == "X" and e["name"] == "F1@1"]
    assert homes == [1, 1]


def test_one_pipeline_has_no_groups() -> None:
    schedule = Schedule.parse(TEXT.splitlines()[0].replace(', "replicas": 3', "") + "\n0: F0 B0\n")
    timeline = simulate(lower(schedule), Conditions(1, (1.0,), (1.0,), (1.0,)))
    picture = pipeline_gantt(timeline)
    assert picture.groups is None
    assert not picture.owners()
    assert "replica" not in ascii_legend(picture) + drawing_svg(Drawing("", "", "", picture))


def test_many_replicas_have_colours_of_their_own() -> None:
    colours = [group_colour(i) for i in range(40)]
    assert len(set(colours)) == 40
    assert tuple(colours[: len(GROUPS)]) == GROUPS
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)


def test_kinds_keep_their_fills_on_every_worker() -> None:
    fills = {(bar.label[0], bar.fill) for bar in gantt().bars if bar.label[0] in "FB"}
    assert len(fills) == 2
    assert {kind for kind, _ in fills} == {Kind.F.value, Kind.B.value}
