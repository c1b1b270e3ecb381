"""The report of a demo run as one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_adaptra.base.units import brief
from megatron_adaptra.view import findings, gain
from megatron_adaptra.view.axis import number
from megatron_adaptra.view.charts import XYChart
from megatron_adaptra.view.html.page import (
    charts_row,
    gantt_legend,
    header,
    page,
    section,
    tiles,
)
from megatron_adaptra.view.markup import element, prose, text
from megatron_adaptra.view.report import Report
from megatron_adaptra.view.summary import Times
from megatron_adaptra.view.svg.gantt import gantt_svg
from megatron_adaptra.view.theme import arm_colour

NONE = "–"


def report_html(report: Report) -> str:
    """The whole page; what the report lacks is left out, and everything from it is escaped."""
    parts = [
        _header(report),
        _tiles(report),
        _notes(report),
        _timelines(report),
        _charts(report),
        _results(report),
        *map(_decided, findings.decided(report.summary)),
    ]
    return page(report.title, *parts, footer=_footer(report))


def _header(report: Report) -> str:
    setting = findings.setting(report)
    results = [
        element(
            "span",
            text(f"{'✓' if good else '✗'} {what.capitalize()} {words}"),
            class_="result" if good else "result bad",
        )
        for what, words, good in findings.equalities(report.summary)
    ]
    lead = setting[:1].upper() + setting[1:] + "."
    return header(report.title, findings.headline(report), [lead], *results)


def _tiles(report: Report) -> str:
    """The few numbers a reader takes home."""
    phase, times = findings.key_phase(report.phases), report.summary["times"]
    key, waits = gain.key_times(times, phase), gain.wait(times)
    shown = f"{number(key['stock_ms'])} → {number(key['adaptra_ms'])} ms"
    where = f" in the {phase} phase" if phase != "measured" else ""
    part = f", {key['what']}" if key["what"] else ""
    items = [(shown, f"an iteration{where}{part}, stock → adaptra")]
    for arm in report.arms:
        if arm.name == "adaptra" and (error := findings.error(report, arm)):
            items.append((error, "measured against the plan's prediction"))
    if "healthy" in report.phases and phase != "healthy":
        healthy = gain.key_times(times, "healthy")
        noise = ", within noise" if gain.sign(healthy) == "alike" else ""
        words = f"stock / adaptra in the healthy phase{noise}"
        items.append((f"{gain.ratio(healthy):.2f}×", words))
    if waits is not None and waits is not key:
        cause, ms = findings.slow_noun(report.summary["config"]), number(waits["adaptra_ms"])
        items.append((gain.length(waits), f"of {ms} ms until a plan for the {cause} ran"))
    return tiles(items, {"faster": "main", "slower": "bad", "alike": ""}[gain.sign(key)])


def _notes(report: Report) -> str:
    items = [element("li", prose(note)) for note in report.summary["notes"]]
    return element("ul", *items, class_="notes") if items else ""


def _timelines(report: Report) -> str:
    pictures = findings.pictures(report)
    if not pictures:
        return ""
    gantts = [picture.gantt for picture in pictures if picture.gantt is not None]
    seconds = 1.04 * max(gantt.makespan for gantt in gantts) or 1.0
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
    phase = findings.key_phase(report.phases)
    which = f" of the {phase} phase" if phase != "measured" else ""
    note = f"All on one time scale. Hover over a box for its times.{_which_plan(report)}"
    return section(
        f"One iteration{which}, measured and predicted",
        gantt_legend(gantts, seconds),
        element("div", *drawn, class_="scroll"),
        note=note,
    )


def _which_plan(report: Report) -> str:
    if (compared := report.summary["compared"]) is None:
        return ""
    first, last = compared["first_iteration"], compared["last_iteration"]
    when = f"{first} to {last}" if first < last else f"{first}"
    return (
        f" Drawn is a typical one of iterations {when}, all under one plan: adaptra ran "
        f"{brief(compared['warmup'])} forwards per {findings.row_noun(report.summary)} before its "
        "first backward (the warmup)."
    )


def _charts(report: Report) -> str:
    marks = findings.replan_marks(report)
    charts = [
        XYChart(title, "iteration", "ms", curves, phases=report.phases, marks=marks, start_up=True)
        for title, curves in (
            ("Iteration time", findings.time_curves(report)),
            ("Delay of the links, as measured", findings.delay_curves(report)),
        )
        if curves
    ]
    return charts_row(charts) if charts else ""


def _results(report: Report) -> str:
    arms, key = report.arms, findings.key_phase(report.phases)
    names = [
        element("th", f'<i style="background:{arm_colour(arm.name, i)}"></i>', text(arm.name))
        for i, arm in enumerate(arms)
    ]
    rows = [element("tr", "<th></th>", *names, "<th>stock / adaptra</th>")]
    times = [
        _row(
            gain.name(one),
            [_ms(one["stock_ms"]), _ms(one["adaptra_ms"])],
            gain.factor(one, "×"),
            _tone(one, one is gain.key_times(report.summary["times"], key)),
        )
        for one in report.summary["times"]
    ]
    rows += _group("Iteration time, median (of so many iterations)", times, len(arms))
    figures = [report.summary["arms"][arm.name] for arm in arms]
    plan = [
        _row(word, [_ms(one) for one in ms], _times(ms))
        for word, ms in (
            ("predicted", [one["predicted_slow_ms"] for one in figures]),
            ("measured, median", [one["measured_slow_ms"] for one in figures]),
        )
        if any(one is not None for one in ms)
    ]
    errors = [findings.error(report, arm) for arm in arms]
    if any(errors):
        plan.append(_row("measured less predicted", [error or NONE for error in errors]))
    rows += _group(_compared(report), plan, len(arms))
    row = findings.row_noun(report.summary)
    peaks = [findings.peak_in_flight(report, arm) for arm in arms]
    held = [findings.peak_bytes(report.summary, arm.name) for arm in arms]
    memory = [
        _row(name, [cell or NONE for cell in cells], wraps=True)
        for name, cells in ((f"microbatches per {row}", peaks), (f"bytes per {row}", held))
        if any(cells)
    ]
    rows += _group("Activations kept for backwards, at most", memory, len(arms))
    body = element("table", element("tbody", *rows))
    return section("Results", element("div", body, class_="scroll"))


def _times(ms: Sequence[float | None]) -> str:
    """Return how many times as fast the second of two times is; empty where one is missing."""
    stock, ours = ms if len(ms) == 2 else (None, None)
    return f"{stock / ours:.2f}×" if stock and ours else ""


def _compared(report: Report) -> str:
    if (compared := report.summary["compared"]) is None:
        return "The iteration drawn above"
    first, last = compared["first_iteration"], compared["last_iteration"]
    return f"Under the plan drawn above, iterations {first} to {last}"


def _group(title: str, rows: Sequence[str], arms: int) -> list[str]:
    head = element("tr", element("th", text(title), colspan=arms + 2), class_="group")
    return [head, *rows] if rows else []


def _tone(times: Times, strong: bool) -> str:
    """Return the class of a cell: colour follows the sign of what is gained."""
    found = gain.sign(times)
    tone = {"faster": "", "slower": "bad", "alike": "plain"}[found]
    return f"{'strong' * strong} {tone}".strip()


def _row(
    name: str, cells: Sequence[str], last: str = "", tone: str = "", wraps: bool = False
) -> str:
    kind = "wraps" if wraps else None
    return element(
        "tr",
        element("td", text(name)),
        *(element("td", text(cell), class_=kind) for cell in cells),
        element("td", text(last), class_=tone or None),
    )


def _ms(value: float | None) -> str:
    return NONE if value is None else f"{number(value)} ms"


def _decided(group: findings.Decided) -> str:
    """Return the section on a `group` of decisions; empty where there are none."""
    items = [
        element(
            "li",
            element("b", text(f"iteration {at}")),
            element("div", prose(why), element("small", text(detail))),
        )
        for at, why, detail in group.each
    ]
    if not items:
        return ""
    return section(group.title, element("ul", *items, class_="replans"), note=group.note)


def _footer(report: Report) -> str:
    lines = []
    for title, data in (
        ("Configuration", report.summary["config"]),
        ("Versions", report.summary["versions"]),
    ):
        pairs = [
            element("span", text(f"{name.replace('_', ' ')} {_words(value)}"))
            for name, value in data.items()
            if value not in (None, [])
        ]
        lines.append(element("p", element("b", text(title)), " ", *pairs))
    return element("footer", *lines)


def _words(value: object) -> str:
    """Return a list as text without brackets, and any other value as it prints."""
    return brief(value, whole=True) if isinstance(value, (list, tuple)) else str(value)
