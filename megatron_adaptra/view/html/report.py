"""The report of a demo run as one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_adaptra.ir.timeline import Timeline
from megatron_adaptra.view import findings
from megatron_adaptra.view.axis import ms, number
from megatron_adaptra.view.html.legend import gantt_legend
from megatron_adaptra.view.html.page import header, page, section, tiles
from megatron_adaptra.view.markup import element, text
from megatron_adaptra.view.report import ArmReport, Report
from megatron_adaptra.view.svg.gantt import gantt_svg
from megatron_adaptra.view.svg.line_chart import line_chart_svg
from megatron_adaptra.view.theme import arm_colour

NONE = "–"
_VERDICT = {True: "verdict", False: "verdict bad"}  # classes


def report_html(report: Report) -> str:
    """The whole page; what the report lacks is left out, and everything from it is escaped."""
    parts = [
        _header(report),
        _tiles(report),
        _timelines(report),
        _charts(report),
        _results(report),
        _memory(report),
        _replans(report),
    ]
    return page(report.title, *parts, footer=_footer(report))


def _header(report: Report) -> str:
    headline, setting = findings.headline(report), findings.setting(report)
    verdicts = [
        element("span", text(("✓ " if good else "✗ ") + words), class_=_VERDICT[good])
        for words, good in findings.verdicts(report)
    ]
    name = report.title if headline != report.title else ""
    lead = setting[:1].upper() + setting[1:] + "." if setting else ""
    return header(name, headline, [lead], *verdicts)


def _tiles(report: Report) -> str:
    """The few numbers a reader takes home."""
    items: list[tuple[str, str]] = []
    phase = findings.key_phase(report)
    if phase:
        times = [findings.phase_ms(report, arm, phase) for arm in report.arms]
        if times and all(t is not None for t in times):
            shown = " → ".join(number(t) for t in times if t is not None)
            names = " → ".join(arm.name for arm in report.arms)
            where = f" in the {phase} phase" if phase != "measured" else ""
            items.append((f"{shown} ms", f"an iteration{where}, {names}"))
    errors = [_error(arm) for arm in report.arms if arm.name == "adaptra"]
    if errors and errors[0] != NONE:
        items.append((errors[0], "measured against the plan's prediction"))
    overhead = findings.value(report.summary.get("slowdown_healthy"))
    if overhead is not None:
        items.append((f"{100 * (overhead - 1):+.1f} %", "time of a healthy iteration"))
    after = findings.value(report.summary.get("detected_after_iterations"))
    if after is not None:
        noun = "iteration" if after == 1 else "iterations"
        items.append((f"{after:g} {noun}", "until the slow link was known"))
    return tiles(items)


def _timelines(report: Report) -> str:
    pictures = findings.pictures(report)
    if not pictures:
        return ""
    seconds = findings.common_seconds(report)
    drawn = []
    for i, picture in enumerate(pictures):
        if picture.gantt is None:
            words = f"{picture.title}: no timeline was recorded"
            drawn.append(element("p", text(words), class_="note"))
            continue
        svg = gantt_svg(
            picture.gantt,
            seconds,
            row=24 if picture.measured else 13,
            title=picture.title[:1].upper() + picture.title[1:],
            axis=i == len(pictures) - 1 or picture.measured,
        )
        kind = "measured" if picture.measured else "predicted"
        drawn.append(svg.replace('class="gantt"', f'class="gantt {kind}"', 1))
    phase = findings.key_phase(report)
    which = f" of the {phase} phase" if phase and phase != "measured" else ""
    note = "All on one time scale. Hover over a box for its times."
    return section(
        f"One iteration{which}, measured and predicted",
        gantt_legend([p.gantt for p in pictures if p.gantt is not None], seconds),
        element("div", *drawn, class_="scroll"),
        note=note,
    )


def _charts(report: Report) -> str:
    charts = [
        (title, series)
        for title, series in (
            ("Iteration time", findings.time_series(report)),
            ("Delay of the links, as measured", findings.delay_series(report)),
        )
        if series
    ]
    marks, width = findings.replan_marks(report), 640 if len(charts) > 1 else 1160
    sections = [
        section(
            title,
            line_chart_svg(series, phases=report.phases, marks=marks, title=title, width=width),
        )
        for title, series in charts
    ]
    return element("div", *sections, class_="pair") if sections else ""


def _results(report: Report) -> str:
    arms = report.arms
    if not arms:
        return ""
    names = [
        element("th", f'<i style="background:{arm_colour(arm.name, i)}"></i>', text(arm.name))
        for i, arm in enumerate(arms)
    ]
    rows = [element("tr", "<th></th>", *names, "<th>speed</th>")]
    times = []
    for phase in findings.phases(report):
        cells = [_ms(findings.phase_ms(report, arm, phase)) for arm in arms]
        ratio = findings.ratio(report, phase)
        strong = phase == findings.key_phase(report)
        times.append(_row(phase, cells, f"{ratio:.2f}×" if ratio else NONE, strong))
    rows += _group("Iteration time, median", times, len(arms))
    plan = []
    if any(arm.predicted for arm in arms):
        plan.append(_row("predicted", [_span(arm.predicted) for arm in arms]))
    if any(arm.measured for arm in arms):
        plan.append(_row("measured", [_span(arm.measured) for arm in arms]))
    if any(arm.predicted and arm.measured for arm in arms):
        plan.append(_row("measured less predicted", [_error(arm) for arm in arms]))
    rows += _group("The iteration drawn above", plan, len(arms))
    peaks = [findings.peak_in_flight(report, arm) or NONE for arm in arms]
    if any(peak != NONE for peak in peaks):
        memory = [_row("most at once, microbatches per stage", peaks)]
        rows += _group("Activations in flight", memory, len(arms))
    body = element("table", element("tbody", *rows))
    return section("Results", element("div", body, class_="scroll"))


def _memory(report: Report) -> str:
    rows = findings.memory_rows(report.summary)
    if not rows:
        return ""
    stages = [element("th", text(f"stage {s}")) for s in range(len(rows[0][1]))]
    lines = [element("tr", "<th></th>", *stages)]
    for name, cells in rows:
        each = [element("td", text(cell)) for cell in cells]
        lines.append(element("tr", element("td", text(name)), *each))
    body = element("table", element("tbody", *lines))
    note = "A microbatch counts with all layers of its stage; bytes are those that autograd saved."
    title = "Activations of adaptra, stage by stage"
    return section(title, element("div", body, class_="scroll"), note=note)


def _group(title: str, rows: Sequence[str], arms: int) -> list[str]:
    head = element("tr", element("th", text(title), colspan=arms + 2), class_="group")
    return [head, *rows] if rows else []


def _row(name: str, cells: Sequence[str], last: str = "", strong: bool = False) -> str:
    return element(
        "tr",
        element("td", text(name)),
        *(element("td", text(cell)) for cell in cells),
        element("td", text(last), class_="strong" if strong else None),
    )


def _ms(value: float | None) -> str:
    return NONE if value is None else f"{number(value)} ms"


def _span(timeline: Timeline | None) -> str:
    return NONE if timeline is None else ms(timeline.iteration)


def _error(arm: ArmReport) -> str:
    if arm.measured is None or arm.predicted is None or not arm.predicted.iteration:
        return NONE
    return f"{100 * (arm.measured.iteration / arm.predicted.iteration - 1):+.1f} %"


def _replans(report: Report) -> str:
    replans = findings.replans(report)
    if not replans and "replans" not in report.summary:
        return ""
    items = [
        element(
            "li",
            element("b", text(f"iteration {replan.get('iteration', NONE)}")),
            element("div", text(replan.get("why") or "no reason was recorded"), _detail(replan)),
        )
        for replan in replans
    ]
    body = (
        element("ul", *items, class_="replans")
        if items
        else element("p", "The plan did not change during this run.", class_="note")
    )
    return section("Replans", body)


def _detail(replan: Mapping[str, Any]) -> str:
    parts = []
    before, after = replan.get("warmup_before"), replan.get("warmup_after")
    if before and after:
        parts.append(f"warmup {_words(before)} → {_words(after)}")
    for key in ("predicted", "measured"):
        value = findings.value(replan.get(f"{key}_ms"))
        if value is not None:
            parts.append(f"{key} {number(value)} ms")
    return element("small", text("; ".join(parts))) if parts else ""


def _footer(report: Report) -> str:
    lines = []
    for key, title in (("config", "Configuration"), ("versions", "Versions")):
        data = findings.mapping(report.summary.get(key))
        pairs = [
            element("span", text(f"{name.replace('_', ' ')} {_words(value)}"))
            for name, value in data.items()
            if value is not None
        ]
        if pairs:
            lines.append(element("p", element("b", text(title)), " ", *pairs))
    return element("footer", *lines)


def _words(value: object) -> str:
    """Lists without their brackets, the rest as it prints."""
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
