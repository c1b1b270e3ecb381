"""The report of a demo run as one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_adaptra.view import findings, reductions, share_decisions
from megatron_adaptra.view.axis import number
from megatron_adaptra.view.html.legend import gantt_legend
from megatron_adaptra.view.html.page import header, page, section, table, tiles
from megatron_adaptra.view.markup import element, text
from megatron_adaptra.view.ranges import ranges
from megatron_adaptra.view.report import Report
from megatron_adaptra.view.svg.gantt import gantt_svg
from megatron_adaptra.view.svg.line_chart import line_chart_svg
from megatron_adaptra.view.theme import arm_colour

NONE = "–"
_RESULT = {True: "result", False: "result bad"}  # classes


def report_html(report: Report) -> str:
    """The whole page; what the report lacks is left out, and everything from it is escaped."""
    parts = [
        _header(report),
        _tiles(report),
        _notes(report),
        _timelines(report),
        _charts(report),
        _reduction(report),
        _shared(report),
        _results(report),
        _memory(report),
        _replans(report),
        _all_reduces(report),
        _shares(report),
    ]
    return page(report.title, *parts, footer=_footer(report))


def _header(report: Report) -> str:
    headline, setting = findings.headline(report), findings.setting(report)
    results = [
        element("span", text(("✓ " if good else "✗ ") + words), class_=_RESULT[good])
        for words, good in findings.comparisons(report)
    ]
    name = report.title if headline != report.title else ""
    lead = setting[:1].upper() + setting[1:] + "." if setting else ""
    return header(name, headline, [lead], *results)


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
    errors = [findings.error(report, arm) for arm in report.arms if arm.name == "adaptra"]
    if errors and errors[0]:
        items.append((errors[0], "measured against the plan's prediction"))
    healthy = findings.ratio(report, "healthy")
    if healthy and phase != "healthy":
        items.append((f"{healthy:.2f}×", "stock / adaptra in the healthy phase"))
    after = findings.value(report.summary.get("detected_after_iterations"))
    if after is not None:
        noun = "iteration" if after == 1 else "iterations"
        items.append(
            (f"{after:g} {noun}", f"until the {findings.slow_noun(report.summary)} was known")
        )
    return tiles(items)


def _notes(report: Report) -> str:
    items = [element("li", text(note)) for note in findings.notes(report)]
    return element("ul", *items, class_="notes") if items else ""


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
    note = f"All on one time scale. Hover over a box for its times.{_which_plan(report)}"
    return section(
        f"One iteration{which}, measured and predicted",
        gantt_legend([p.gantt for p in pictures if p.gantt is not None], seconds),
        element("div", *drawn, class_="scroll"),
        note=note,
    )


def _which_plan(report: Report) -> str:
    compared = findings.compared(report)
    first, last = (findings.value(compared.get(f"{end}_iteration")) for end in ("first", "last"))
    if first is None or last is None:
        return ""
    warmup = ranges(findings.listing(compared.get("warmup")))
    when = f"{first:g} to {last:g}" if first < last else f"{first:g}"
    return (
        f" Drawn is a typical one of iterations {when}, all under one plan: adaptra ran {warmup} "
        f"forwards per {findings.row_noun(report.summary)} before its first backward (the warmup)."
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
            element(
                "div",
                line_chart_svg(series, phases=report.phases, marks=marks, title=title, width=width),
                class_="scroll",
            ),
        )
        for title, series in charts
    ]
    return element("div", *sections, class_="pair") if sections else ""


def _reduction(report: Report) -> str:
    """One all-reduce by native, and by what was chosen in its place."""
    if (reduction := report.reduction) is None:
        return ""
    seconds = reductions.common_seconds(reduction)
    pictures = [(p.title, p.gantt) for p in reductions.pictures(reduction) if p.gantt is not None]
    drawn = [
        gantt_svg(gantt, seconds, row=13, title=title[:1].upper() + title[1:])
        for title, gantt in pictures
    ]
    return section(
        "One reduction of gradients, native and ours",
        gantt_legend([gantt for _, gantt in pictures], seconds),
        element("div", *drawn, class_="scroll"),
        note=reductions.about(reduction),
    )


def _shared(report: Report) -> str:
    """One iteration of all replicas, before and after their microbatches were shared out."""
    if (shared := report.shared) is None:
        return ""
    seconds = share_decisions.common_seconds(shared)
    words = share_decisions.title(shared)
    svg = gantt_svg(shared.gantt, seconds, row=16, title=words)
    return section(
        share_decisions.TITLE,
        gantt_legend([shared.gantt], seconds),
        element("div", svg, class_="scroll"),
        note=share_decisions.about(shared),
    )


def _results(report: Report) -> str:
    arms = report.arms
    if not arms:
        return ""
    names = [
        element("th", f'<i style="background:{arm_colour(arm.name, i)}"></i>', text(arm.name))
        for i, arm in enumerate(arms)
    ]
    rows = [element("tr", "<th></th>", *names, "<th>stock / adaptra</th>")]
    times = []
    for phase in findings.phases(report):
        cells = [_ms(findings.phase_ms(report, arm, phase)) for arm in arms]
        ratio = findings.ratio(report, phase)
        strong = phase == findings.key_phase(report)
        times.append(_row(phase, cells, f"{ratio:.2f}×" if ratio else NONE, strong))
    rows += _group("Iteration time, median", times, len(arms))
    pairs = [findings.predicted_and_measured(report, arm) for arm in arms]
    plan = [
        _row(word, [_ms(pair[k]) for pair in pairs], _times([pair[k] for pair in pairs]))
        for k, word in enumerate(("predicted", "measured, median"))
        if any(pair[k] is not None for pair in pairs)
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
    compared = findings.compared(report)
    first, last = (compared.get(f"{end}_iteration") for end in ("first", "last"))
    if first is None or last is None:
        return "The iteration drawn above"
    return f"Under the plan drawn above, iterations {first} to {last}"


def _memory(report: Report) -> str:
    columns, rows = findings.memory_table(report.summary)
    if not rows:
        return ""
    note = "A microbatch counts with all layers of its stage; bytes are those that autograd saved."
    row = findings.row_noun(report.summary)
    title = f"Activations of adaptra, {row} by {row}"
    return section(
        title, table(["", *columns], [[name, *cells] for name, cells in rows]), note=note
    )


def _group(title: str, rows: Sequence[str], arms: int) -> list[str]:
    head = element("tr", element("th", text(title), colspan=arms + 2), class_="group")
    return [head, *rows] if rows else []


def _row(
    name: str, cells: Sequence[str], last: str = "", strong: bool = False, wraps: bool = False
) -> str:
    kind = "wraps" if wraps else None
    return element(
        "tr",
        element("td", text(name)),
        *(element("td", text(cell), class_=kind) for cell in cells),
        element("td", text(last), class_="strong" if strong else None),
    )


def _ms(value: float | None) -> str:
    return NONE if value is None else f"{number(value)} ms"


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
    row = findings.row_noun(report.summary)
    note = f"Warmup: how many forwards each {row} runs before its first backward." if items else ""
    return section("Replans", body, note=note)


def _all_reduces(report: Report) -> str:
    """Return the section on the all-reduces of gradients: which, from when on, and why."""
    items = [_decision(one, reductions.detail(one)) for one in reductions.all_reduces(report)]
    if not items:
        return ""
    note = "Ranks in a reason are those of the data-parallel group."
    return section("Reductions of gradients", element("ul", *items, class_="replans"), note=note)


def _shares(report: Report) -> str:
    """Return the section on the microbatches of replicas: how many, from when on, and why."""
    decisions = share_decisions.share_decisions(report)
    if not decisions:
        return ""
    items = [_decision(one, share_decisions.detail(one)) for one in decisions]
    note = "Counts are by replica; the global batch, and the weight of each sample, stay."
    return section("Shares of microbatches", element("ul", *items, class_="replans"), note=note)


def _decision(one: Mapping[str, Any], detail: str) -> str:
    return element(
        "li",
        element("b", text(f"iteration {one.get('iteration', NONE)}")),
        element(
            "div",
            text(one.get("why") or "no reason was recorded"),
            element("small", text(detail)),
        ),
    )


def _detail(replan: Mapping[str, Any]) -> str:
    parts = []
    before, after = replan.get("warmup_before"), replan.get("warmup_after")
    if before and after and "warmup" not in str(replan.get("why")):
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
            if value not in (None, [])
        ]
        if pairs:
            lines.append(element("p", element("b", text(title)), " ", *pairs))
    return element("footer", *lines)


def _words(value: object) -> str:
    """Return a list as text without brackets, and any other value as it prints."""
    return ranges(value) if isinstance(value, (list, tuple)) else str(value)
