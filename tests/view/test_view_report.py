"""The page and the PNG: complete, self-contained, escaped, and whole when pieces are missing."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from view_sample import sample_report

from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.view.html.report import report_html
from megatron_adaptra.view.png.report import report_png
from megatron_adaptra.view.report import ArmReport, Report

EVIL = '<script>alert(1)</script> & "quotes"'


class Page(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words += data + " "


def well_formed(page: str) -> ET.Element:
    """The page is HTML that an XML parser takes too, so nothing in it is left open."""
    return ET.fromstring(page.removeprefix("<!DOCTYPE html>"))


def incomplete() -> Iterator[tuple[str, Report]]:
    full = sample_report()
    stock, adaptra = full.arms
    yield "nothing", Report("empty", {}, [], {})
    yield "nulls", sample_report(**dict.fromkeys(full.summary))
    yield "no timelines", replace(full, arms=[ArmReport(a.name, a.iteration_ms) for a in full.arms])
    yield "no prediction", replace(full, arms=[replace(stock, predicted=None), adaptra])
    yield "not measured", replace(full, arms=[stock, replace(adaptra, measured=None)])
    yield "empty timeline", replace(full, arms=[replace(stock, measured=Timeline(())), adaptra])
    yield "one arm", replace(full, arms=[adaptra])
    yield "another arm", replace(full, arms=[stock, replace(adaptra, name="zb")])
    yield "no iterations", replace(full, arms=[replace(a, iteration_ms=[]) for a in full.arms])
    yield "one phase", replace(full, phases={"measured": (0, 54)})
    yield "no delays", replace(full, link_delay_ms={})
    yield "no replans", sample_report(replans=[])
    yield "broken memory", sample_report(memory={"budget": [None, "x"], "measured_peak": 3})
    yield "bare replan", sample_report(replans=[{"iteration": 3}, {}, None])


INCOMPLETE = dict(incomplete())


def test_page_tells_the_result() -> None:
    page = Page(report_html(sample_report()))
    for words in (
        "2.47× as fast while link 2–3 is slow",
        "Losses identical, bit for bit",
        "Parameters identical, bit for bit",
        "40 ms longer",
        "confirmed 2 of 3 times",
        "warmup 4, 3, 2, 1 → 11, 10, 9, 1",
        "healthy",
        "recovered",
        "Under the plan drawn above, iterations 18 to 39",
        "other processes used 47 % (slow)",
        "11, 10, 9, 1",
        "0.16.0",
        "no limit",
        "predicted peak, bytes",
        "10.05",
        "1.95 MiB",
    ):
        assert words in page.words


def test_every_op_of_every_timeline_is_on_the_page() -> None:
    report = sample_report()
    root = well_formed(report_html(report))
    titles = [e.text or "" for e in root.iter() if e.tag.endswith("title")]
    for word in ("F0", "F11", "B0", "B11"):
        assert sum(title.startswith(word + " ") and "start" in title for title in titles) >= 16
    spans = sum(len(t.spans) for a in report.arms for t in (a.measured, a.predicted) if t)
    assert sum("\nduration" in title for title in titles) == spans


def test_all_timelines_share_one_scale() -> None:
    root = well_formed(report_html(sample_report()))
    gantts = [e for e in root.iter() if (e.get("class") or "").startswith("gantt")]
    ticks = [
        [e.get("x1") for e in gantt.iter() if e.get("stroke-opacity") == "0.12"] for gantt in gantts
    ]
    assert len(ticks) == 4
    assert len(ticks[0]) > 4
    assert all(row == ticks[0] for row in ticks)


def test_nothing_is_loaded_from_elsewhere() -> None:
    source = report_html(sample_report())
    page = Page(source)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert not [a for a in page.attributes if a[0] in ("src", "href", "xlink:href", "data")]
    assert not re.search(r"@import|url\(", source)
    assert set(re.findall(r"https?://[^\s\"<]+", source)) <= {"http://www.w3.org/2000/svg"}


def test_what_the_report_brings_is_escaped() -> None:
    replan = {"iteration": 17, "why": EVIL, "warmup_before": [EVIL], "warmup_after": [EVIL]}
    report = sample_report(
        replans=[replan], versions={EVIL: EVIL}, config={"slow_links": [EVIL], "stages": EVIL}
    )
    evil_arm = replace(report.arms[1], name=EVIL)
    source = report_html(
        replace(
            report,
            title=EVIL,
            arms=[*report.arms, evil_arm],
            phases={**report.phases, EVIL: (0, 3)},
            link_delay_ms={EVIL: [1.0, 2.0]},
        )
    )
    well_formed(source)
    assert "<script" not in source.lower()
    assert EVIL in Page(source).words


def test_differing_losses_are_not_hidden() -> None:
    page = Page(report_html(sample_report(losses_identical=False)))
    assert "✗ Losses differ" in page.words
    assert "Losses identical" not in page.words


def test_unknown_equality_is_not_claimed() -> None:
    assert (
        "identical"
        not in Page(
            report_html(sample_report(losses_identical=None, parameters_identical=None))
        ).words
    )


def test_medians_stand_in_for_a_missing_summary() -> None:
    report = sample_report()
    page = Page(report_html(replace(report, summary={})))
    assert re.search(r"2\.\d\d× as fast as stock Megatron", page.words)


@pytest.mark.parametrize("name", INCOMPLETE)
def test_page_without_a_piece(name: str) -> None:
    source = report_html(INCOMPLETE[name])
    well_formed(source)
    words = Page(source).words
    assert not re.search(r"\bNone\b|\bnan\b", words)


@pytest.mark.parametrize(
    "name", ["nothing", "nulls", "empty timeline", "no iterations", "no replans"]
)
def test_png_without_a_piece(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report_png(INCOMPLETE[name], tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_png_has_a_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "report.png"
    report_png(sample_report(title="$x_1$"), path)
    pixels = image.imread(path)
    assert pixels.shape[1] > 1200
    assert pixels[..., :3].std() > 0.05


def test_a_page_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, megatron_adaptra.view.html.report, megatron_adaptra.view.png.report, "
        "megatron_adaptra.view.chrome, megatron_adaptra.view.ascii; "
        "sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
