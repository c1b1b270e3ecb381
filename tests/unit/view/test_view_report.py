"""The page: complete, self-contained, escaped, and whole when pieces are missing."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from view_sample import sample_report

from benchmarks.common import both_ways
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.plan import make_plan
from megatron_adaptra.view.findings import delay_curves
from megatron_adaptra.view.html.report import report_html
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
    unknown = dict.fromkeys(("predicted_slow_ms", "measured_slow_ms", "peak_in_flight"))
    arms = {name: {**arm, **unknown} for name, arm in full.summary["arms"].items()}
    nothing = ("compared", "memory", "detected_after_iterations", "losses_difference")
    yield "nothing compared", sample_report(**dict.fromkeys(nothing), arms=arms)
    yield "no timelines", replace(full, arms=[ArmReport(a.name) for a in full.arms])
    yield "no prediction", replace(full, arms=[replace(stock, predicted=None), adaptra])
    yield "not measured", replace(full, arms=[stock, replace(adaptra, measured=None)])
    yield "empty timeline", replace(full, arms=[replace(stock, measured=Timeline(())), adaptra])
    one = {**full.summary["times"][0], "phase": "measured"}
    yield "one phase", replace(sample_report(times=[one]), phases={"measured": (0, 54)})
    yield "no delays", replace(full, link_delay_ms={})
    yield "no replans", sample_report(replans=[])
    unlimited = {"budget": [None] * 4, "predicted_peak": [1.0] * 4, "measured_peak": [1.0] * 4}
    in_bytes = ("bytes_per_microbatch", "predicted_peak_bytes", "measured_peak_bytes")
    yield "no bytes", sample_report(memory={**unlimited, **dict.fromkeys(in_bytes)})


INCOMPLETE = dict(incomplete())


def test_page_shows_the_result() -> None:
    page = Page(report_html(sample_report()))
    for words in (
        "2.47× as fast while link 2–3 is slow",
        "Losses identical, bit for bit",
        "Parameters identical, bit for bit",
        "slow link 2-3:40ms",
        "confirmed 2 of 3 times",
        "warmup 4,3,2,1 → 11,10,9,1",
        "healthy",
        "recovered",
        "Under the plan drawn above, iterations 18 to 39",
        "other processes used 47 % (slow)",
        "slow, not adapted yet (3)",
        "slow, adapted (22)",
        "an iteration in the slow phase, adapted, stock → adaptra",
        "of 695 ms until a plan for the slow link ran",
        "11,10,9,1",
        "0.16.0",
    ):
        assert words in page.words


def test_lists_of_replicas_are_of_workers() -> None:
    """And what differs by rounding alone is no fault."""
    peaks = [2.0, 1.0, 2.0, 1.0]
    memory = {"budget": [4.0] * 4, "predicted_peak": peaks, "measured_peak": peaks}
    memory |= dict.fromkeys(("bytes_per_microbatch", "predicted_peak_bytes", "measured_peak_bytes"))
    config = {**sample_report().summary["config"], "data_parallel": 2, "slow_links": []}
    of = {
        "workers": ["0.0", "0.1", "1.0", "1.1"], "memory": memory, "equal_to_rounding": True,
        "losses_identical": False, "losses_difference": 3.2e-8, "parameters_identical": False,
        "parameters_difference": 2e-7, "config": {**config, "slow_workers": ["1.1:2x"]},
    }  # fmt: skip
    page = Page(report_html(sample_report(**of)))
    for words in ("2 replicas × 4 stages", "per worker",
                  "Losses equal to rounding, they differ by 3e-08 of their size",
                  "until a plan for the slow worker ran"):  # fmt: skip
        assert words in page.words
    assert ("class", "result bad") not in page.attributes
    wrong = Page(report_html(sample_report(**{**of, "equal_to_rounding": False})))
    assert "Losses differ by 3e-08 of their size" in wrong.words
    assert ("class", "result bad") in wrong.attributes
    masked = Page(report_html(sample_report(**{**of, "equal_to_rounding": None})))
    assert "as dropout falls on other values where microbatches move" in masked.words
    assert ("class", "result bad") not in masked.attributes


def test_a_path_that_is_measured_later_has_a_gap_and_the_way_back_is_dashed() -> None:
    delays = {"0.9>1.10": [math.nan, 4.0], "1.10>0.9": [math.nan, 4.0], "0.1>0.2": [0.1, 0.1]}
    quiet, there, back = delay_curves(replace(sample_report(), link_delay_ms=delays))
    assert (quiet.name, there.name, back.name) == ("other links", "0.9 → 1.10", "1.10 → 0.9")
    assert (there.dashed, back.dashed) == (False, True)


def test_of_many_links_the_legend_has_those_with_the_highest_peaks() -> None:
    delays = {f"{a}>{a + 1}": [0.1, 1.0 + a / 100] for a in range(20)}
    found = delay_curves(replace(sample_report(), link_delay_ms=delays))
    assert [one.name for one in found if one.name != "other links"] == [
        f"{a} → {a + 1}" for a in range(16, 20)
    ]
    assert len(found) == 20


def test_what_got_slow_is_named() -> None:
    full = sample_report()
    slow = {"slow_paths": ["0.1-0.2:40ms"], "slow_workers": ["1.1:2x", "0.0:3x"]}

    def page(**config: object) -> str:
        settings = {**full.summary["config"], **config}
        return Page(report_html(replace(full, summary={**full.summary, "config": settings}))).words

    words = page(**slow)
    names = "link 2–3 and path 0.1–0.2 and workers 1.1 and 0.0"
    assert f"2.47× as fast while {names} are slow" in words
    assert "slow link 2-3:40ms, slow path 0.1-0.2:40ms, slow workers 1.1:2x, 0.0:3x" in words
    words = page(slow_links=[], slow_workers=["1.1:2x"])
    assert "2.47× as fast while worker 1.1 is slow" in words
    assert "in iterations 14 to 39 slow worker 1.1:2x" in words


def crowd(stages: int) -> Report:
    """A report of so many stages, whose figures repeat."""
    full = sample_report()
    peaks = [26.0] * (stages - 3) + [56.0, 45.0, 1.0]
    bytes_ = [1 << 20] * stages
    memory = {
        "budget": [None] * stages,
        "predicted_peak": peaks,
        "measured_peak": peaks,
        "bytes_per_microbatch": bytes_,
        "predicted_peak_bytes": None,
        "measured_peak_bytes": [round(p * b) for p, b in zip(peaks, bytes_, strict=True)],
    }
    one_ahead = list(range(stages, 0, -1))
    replan = {"iteration": 17, "why": "a link", "warmup_before": one_ahead, "warmup_after": peaks}
    replan |= {"predicted_ms": 272.0, "measured_ms": None}
    arms = {name: {**arm, "peak_in_flight": peaks} for name, arm in full.summary["arms"].items()}
    slow = Conditions(4, *[(0.004,) * stages] * 3, both_ways({2: 0.04}))
    drawn = make_plan(slow, "1f1b").timeline
    return replace(
        full,
        summary={**full.summary, "memory": memory, "replans": [replan], "arms": arms},
        arms=[replace(arm, measured=drawn, predicted=drawn) for arm in full.arms],
    )


def test_many_stages_are_brief() -> None:
    page = report_html(crowd(67))
    columns = [len(row.findall("th") + row.findall("td")) for row in well_formed(page).iter("tr")]
    assert max(columns) <= 4
    words = Page(page).words
    assert "26 x 64, 56, 45, 1" in words
    assert "26 MiB x 64, 56 MiB, 45 MiB, 1 MiB" in words
    assert " → 26 x 64, 56, 45, 1" in words


def test_two_figures_of_a_healthy_pipeline_are_impossible() -> None:
    """Tile and table have the same one, whatever the summary has beside its medians."""
    for slowdown in (0.5, 1.04, None):
        page = Page(report_html(sample_report(slowdown_healthy=slowdown)))
        healthy = re.findall(r"([\d.]+×)\s+stock / adaptra in the healthy phase", page.words)
        row = re.findall(r"healthy\s+[\d.]+ ms\s+[\d.]+ ms\s+([\d.]+×)", page.words)
        assert healthy == row != []


@pytest.mark.parametrize(
    ("ours", "words", "tile"),
    [
        (400.0, "2.50× as fast while", "tile main"),
        (1060.0, "6 % slower while", "tile bad"),
        (990.0, "No difference beyond noise while", "tile"),
    ],
)
def test_colour_and_words_follow_what_was_gained(ours: float, words: str, tile: str) -> None:
    healthy, wait, adapted, recovered = sample_report().summary["times"]
    adapted = {**adapted, "stock_ms": 1000.0, "adaptra_ms": ours}
    page = Page(report_html(sample_report(times=[healthy, wait, adapted, recovered])))
    assert f"{words} link 2–3 is slow" in page.words
    kinds = [value for name, value in page.attributes if name == "class"]
    strong = {"tile main": "strong", "tile bad": "strong bad", "tile": "strong plain"}
    assert next(kind for kind in kinds if kind in strong) == tile
    assert [kind for kind in kinds if kind and "strong" in kind] == [strong[tile]]


def test_an_interrupted_run_before_the_slow_phase_claims_nothing_of_it() -> None:
    full = sample_report()
    summary = {**full.summary, "speedup_slow": None, "notes": ["Interrupted by SIGINT after 9."]}
    summary["times"] = full.summary["times"][:1]
    page = Page(report_html(replace(full, summary=summary, phases={"healthy": (0, 9)})))
    assert "stock Megatron, links healthy" in page.words
    assert "is slow" not in page.words
    assert "ms longer" not in page.words
    assert "Interrupted by SIGINT after 9." in page.words


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
    evil = {"why": EVIL, "warmup_before": [EVIL], "warmup_after": [EVIL]}
    replan = {**sample_report().summary["replans"][0], **evil}
    config = {**sample_report().summary["config"], "slow_links": [EVIL], "stages": EVIL}
    report = sample_report(replans=[replan], versions={EVIL: EVIL}, config=config, notes=[EVIL])
    source = report_html(
        replace(
            report,
            title=EVIL,
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


@pytest.mark.parametrize("name", INCOMPLETE)
def test_page_without_a_piece(name: str) -> None:
    source = report_html(INCOMPLETE[name])
    well_formed(source)
    words = Page(source).words
    assert not re.search(r"\bNone\b|\bnan\b", words)


def test_a_page_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys, megatron_adaptra.view.html.report, "
        "megatron_adaptra.view.chrome, megatron_adaptra.view.ascii; "
        "sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
