"""Charts over a quantity and dot charts: to scale, complete, escaped, and whole when empty."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megatron_adaptra.view.charts import Curve, DotChart, Dots, XYChart
from megatron_adaptra.view.html.legend import curves_legend, dots_legend
from megatron_adaptra.view.html.page import header, page, section, table, tiles
from megatron_adaptra.view.png.charts import charts_png
from megatron_adaptra.view.svg.dot_chart import dot_chart_svg
from megatron_adaptra.view.svg.xy_chart import xy_chart_svg

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert('&')</script>"
CURVES = [
    Curve("adaptive", "#111111", [(8, 100.0), (12, 60.0), (24, 50.0)]),
    Curve("1f1b", "#222222", [(8, 200.0)], joined=False),
    Curve("bound", "#333333", [(8, 40.0), (24, 40.0)], marked=False, dashed=True),
]
NAMES = {8.0: "8", 12.0: "12", 24.0: "24 (all)"}
CHART = XYChart("Trade-off", "budget", "ms", CURVES, NAMES)
DOTS = DotChart(
    "Ratios",
    "times",
    ["one", "two"],
    [Dots("a", "#111111", [1.5, None]), Dots("b", "#222222", [1.25, 2.0], bar=True)],
    start=1.0,
)


def circles(svg: str) -> dict[tuple[str, ...], tuple[float, float]]:
    """What a dot says, line by line -> where it stands."""
    out = {}
    for circle in ET.fromstring(svg).iter(f"{SVG}circle"):
        title = circle.find(f"{SVG}title")
        assert title is not None
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


def test_legends_name_every_curve() -> None:
    root = ET.fromstring(curves_legend(CURVES))
    assert [span.findtext(".") or "".join(span.itertext()) for span in root] == [
        "adaptive",
        "1f1b",
        "bound",
    ]
    assert "dashed" in ET.tostring(root, encoding="unicode")
    assert "dot" in ET.tostring(root, encoding="unicode")
    assert "".join(ET.fromstring(dots_legend(DOTS.series)).itertext()) == "ab"


def test_dots_stand_in_their_rows_and_bars_are_bars() -> None:
    svg = dot_chart_svg(DOTS)
    assert list(circles(svg)) == [("one", "a: 1.5")]
    bars = {}
    for bar in ET.fromstring(svg).iter(f"{SVG}rect"):
        middle = float(bar.get("x", "nan")) + float(bar.get("width", "nan")) / 2
        bars[bar.findtext(f"{SVG}title")] = (middle, float(bar.get("y", "nan")))
    assert set(bars) == {"one\nb: 1.25", "two\nb: 2"}
    x = {
        1.25: bars["one\nb: 1.25"][0],
        2.0: bars["two\nb: 2"][0],
        1.5: circles(svg)["one", "a: 1.5"][0],
    }
    assert (x[2.0] - x[1.25]) == pytest.approx(3 * (x[1.5] - x[1.25]), rel=1e-3)
    assert bars["two\nb: 2"][1] - bars["one\nb: 1.25"][1] == 23
    assert DOTS.marks()[0] == 1.0
    assert DOTS.marks()[-1] <= DOTS.end()


def test_nothing_to_draw_is_drawn() -> None:
    for values in ([], [(1.0, 0.0)], [(0.0, 0.0), (0.0, 0.0)]):
        svg = xy_chart_svg(XYChart("t", "x", "y", [Curve("c", "#111", values)]))
        assert "nan" not in svg
        ET.fromstring(svg)
    ET.fromstring(xy_chart_svg(XYChart("t", "x", "y", [])))
    ET.fromstring(dot_chart_svg(DotChart("t", "x", [], [])))
    ET.fromstring(dot_chart_svg(DotChart("t", "x", ["a"], [Dots("d", "#111", [None])])))


def test_what_comes_from_elsewhere_is_escaped() -> None:
    chart = XYChart(EVIL, EVIL, EVIL, [Curve(EVIL, "#111", [(1.0, 2.0)])], {1.0: EVIL}, EVIL)
    dots = DotChart(EVIL, EVIL, [EVIL], [Dots(EVIL, "#111", [1.0])])
    source = page(
        EVIL,
        header(EVIL, EVIL, [EVIL]),
        tiles([(EVIL, EVIL)]),
        section(EVIL, xy_chart_svg(chart), curves_legend(chart.curves), note=EVIL),
        section(EVIL, dot_chart_svg(dots), dots_legend(dots.series)),
        table((EVIL, EVIL), [(EVIL, EVIL)], strong=[0]),
    )
    root = ET.fromstring(source.removeprefix("<!DOCTYPE html>"))
    assert "<script" not in source.lower()
    assert "".join(root.itertext()).count(EVIL) > 15


def test_a_sheet_holds_both_kinds_of_chart(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "sheet.png"
    charts_png(path, "$x_1$", ["lead"], [CHART, DOTS])
    pixels = image.imread(path)
    assert pixels.shape[1] > 1200
    left, right = pixels[:, :845, :3], pixels[:, 845:, :3]
    assert left.std() > 0.02
    assert right.std() > 0.02
