"""Charts over a quantity: to scale, complete, escaped, and whole when empty."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from megatron_adaptra.view.charts import Curve, Mark, XYChart, xy_chart_svg
from megatron_adaptra.view.html.page import (
    charts_row,
    curves_legend,
    header,
    page,
    section,
    table,
    tiles,
)
from megatron_adaptra.view.theme import SLOW_PHASE

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert('&')</script>"
CURVES = [
    Curve("adaptive", "#111111", [(8, 100.0), (12, 60.0), (24, 50.0)]),
    Curve("1f1b", "#222222", [(8, 200.0)], joined=False),
    Curve("bound", "#333333", [(8, 40.0), (24, 40.0)], marked=False, dashed=True),
]
NAMES = {8.0: "8", 12.0: "12", 24.0: "24 (all)"}
CHART = XYChart("Trade-off", "budget", "ms", CURVES, NAMES)


def circles(svg: str) -> dict[tuple[str, ...], tuple[float, float]]:
    """What a dot says, line by line -> where it stands."""
    out = {}
    for circle in ET.fromstring(svg).iter(f"{SVG}circle"):
        title = circle.find(f"{SVG}title")
        if title is None:  # of a mark
            continue
        at = (float(circle.get("cx", "nan")), float(circle.get("cy", "nan")))
        out[tuple((title.text or "").splitlines())] = at
    return out


def test_every_point_stands_where_its_values_say() -> None:
    at = circles(xy_chart_svg(CHART))
    assert len(at) == 4
    dots = {(words[0], words[1]): place for words, place in at.items()}
    assert {words[2] for words in at} == {"ms: 100", "ms: 60", "ms: 50", "ms: 200"}
    x = {b: dots["adaptive", f"budget: {b}"][0] for b in (8, 12, 24)}
    assert (x[24] - x[8]) == pytest.approx(4 * (x[12] - x[8]), rel=1e-3)
    assert dots["1f1b", "budget: 8"][0] == x[8]
    y = {b: dots["adaptive", f"budget: {b}"][1] for b in (8, 12, 24)}
    assert (y[12] - y[8]) == pytest.approx(4 * (y[24] - y[12]), rel=1e-2)
    assert dots["1f1b", "budget: 8"][1] < y[8] < y[12]


def test_lines_only_where_points_are_joined_and_only_the_named_ticks() -> None:
    root = ET.fromstring(xy_chart_svg(CHART))
    lines = {
        line.get("stroke"): line.get("stroke-dasharray") for line in root.iter(f"{SVG}polyline")
    }
    assert lines == {"#111111": None, "#333333": "5 4"}
    words = [e.text for e in root.iter(f"{SVG}text")]
    assert {"8", "12", "24 (all)", "budget", "ms"} <= set(words)
    assert "16" not in words


def test_round_ticks_where_none_are_named() -> None:
    chart = XYChart("t", "x", "y", [Curve("c", "#111", [(0.0, 1.0), (10.0, 2.0)])])
    assert [name for _, name in chart.x_ticks()] == ["0", "2", "4", "6", "8", "10"]


def test_a_chart_over_iterations_has_phases_marks_and_a_scale_without_start_up() -> None:
    points = list(enumerate([5000.0, 11.0, 30.0, 31.0]))
    phases = {"healthy": (0, 2), "slow": (2, 4)}
    curves, marks = [Curve("stock", "#111", points)], [Mark(3, EVIL)]
    chart = XYChart("t", "iteration", "ms", curves, phases=phases, marks=marks, start_up=True)
    svg = xy_chart_svg(chart)
    root = ET.fromstring(svg)
    assert EVIL in [e.text for e in root.iter(f"{SVG}title")]  # escaped in the source
    assert "<script" not in svg
    assert {"healthy", "slow", "iteration"} <= {e.text for e in root.iter(f"{SVG}text")}
    assert sum(e.get("fill") == SLOW_PHASE for e in root.iter(f"{SVG}rect")) == 1
    at = circles(svg)
    assert len(at) == 3 < len(points), "a triangle stands for the first"
    heights = [y for _, y in at.values()]
    assert max(heights) - min(heights) > 20
    assert "5000" in svg
    assert "replan" in charts_row([chart])


def test_legends_name_every_curve() -> None:
    root = ET.fromstring(curves_legend(CURVES))
    assert [span.findtext(".") or "".join(span.itertext()) for span in root] == [
        "adaptive",
        "1f1b",
        "bound",
    ]
    assert "dashed" in ET.tostring(root, encoding="unicode")
    assert "dot" in ET.tostring(root, encoding="unicode")


def test_nothing_to_draw_is_drawn() -> None:
    for values in ([], [(1.0, 0.0)], [(0.0, 0.0), (0.0, 0.0)]):
        svg = xy_chart_svg(XYChart("t", "x", "y", [Curve("c", "#111", values)]))
        assert "nan" not in svg
        ET.fromstring(svg)
    ET.fromstring(xy_chart_svg(XYChart("t", "x", "y", [])))


def test_what_comes_from_elsewhere_is_escaped() -> None:
    chart = XYChart(EVIL, EVIL, EVIL, [Curve(EVIL, "#111", [(1.0, 2.0)])], {1.0: EVIL}, EVIL)
    source = page(
        EVIL,
        header(EVIL, EVIL, [EVIL]),
        tiles([(EVIL, EVIL)]),
        section(EVIL, xy_chart_svg(chart), curves_legend(chart.curves), note=EVIL),
        table((EVIL, EVIL), [(EVIL, EVIL)], strong=[0]),
    )
    root = ET.fromstring(source.removeprefix("<!DOCTYPE html>"))
    assert "<script" not in source.lower()
    assert "".join(root.itertext()).count(EVIL) > 15
