"""What a report says, in words and numbers, whatever of it is missing: shared by page and PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from megatron_adaptra.view.axis import number
from megatron_adaptra.view.bars import Gantt
from megatron_adaptra.view.charts import Mark, Series, known
from megatron_adaptra.view.pipeline import pipeline_gantt
from megatron_adaptra.view.report import ArmReport, Report
from megatron_adaptra.view.theme import OTHER, STOCK, arm_colour

QUIET = 0.25  # a link whose highest delay is below this share of the worst one stays grey


class Picture(NamedTuple):
    """A timeline to draw; `gantt` None says that there is none."""

    title: str
    gantt: Gantt | None
    measured: bool


def value(data: object) -> float | None:
    """The finite number that `data` is, or None."""
    if isinstance(data, (int, float)) and not isinstance(data, bool) and math.isfinite(data):
        return float(data)
    return None


def mapping(data: object) -> Mapping[str, Any]:
    """The mapping that `data` is, or an empty one."""
    return data if isinstance(data, Mapping) else {}


def listing(data: object) -> Sequence[Any]:
    """The list that `data` is, or an empty one."""
    return data if isinstance(data, Sequence) and not isinstance(data, str) else ()


def config(report: Report) -> Mapping[str, Any]:
    """The settings of the run."""
    return mapping(report.summary.get("config"))


def key_phase(report: Report) -> str | None:
    """The phase the headline is about."""
    names = list(report.phases) or [
        phase for arm in report.arms for phase in mapping(_arm(report, arm.name).get("phases"))
    ]
    return next((n for n in ("slow", "measured") if n in names), names[0] if names else None)


def phases(report: Report) -> list[str]:
    """Their names."""
    return list(report.phases) or [p for p in [key_phase(report)] if p]


def phase_ms(report: Report, arm: ArmReport, phase: str) -> float | None:
    """Of `phase`, the time that the summary gives, else the median of its iterations."""
    given = mapping(mapping(_arm(report, arm.name).get("phases")).get(phase))
    told = value(given.get("iteration_ms"))
    if told is not None:
        return told
    first, end = report.phases.get(phase, (0, 0))
    times = [v for i, v in known(arm.iteration_ms) if first <= i < end]
    return median(times) if times else None


def ratio(report: Report, phase: str) -> float | None:
    """How many times as fast Adaptra runs in `phase`."""
    times = {arm.name: phase_ms(report, arm, phase) for arm in report.arms}
    stock, adaptra = times.get("stock"), times.get("adaptra")
    return stock / adaptra if stock and adaptra else None


def speedup(report: Report) -> float | None:
    """How many times as fast Adaptra runs in the phase the headline is about."""
    told = value(report.summary.get("speedup_slow"))
    phase = key_phase(report)
    return told if told is not None else ratio(report, phase) if phase else None


def slow_links(report: Report) -> str:
    """Such as: link 2–3, or: links 0–1 and 2–3; or nothing."""
    names = [str(link).replace("-", "–") for link in listing(config(report).get("slow_links"))]
    if not names:
        return ""
    return ("link " if len(names) == 1 else "links ") + " and ".join(names)


def headline(report: Report) -> str:
    """What came out, in one line."""
    times, links = speedup(report), slow_links(report)
    if times is None:
        return report.title
    if links:
        return f"{times:.2f}× as fast while {links} {'is' if 'links' not in links else 'are'} slow"
    return f"{times:.2f}× as fast as stock Megatron"


def setting(report: Report) -> str:
    """The experiment in a sentence."""
    c, parts = config(report), []
    for key, noun in (("stages", "stages"), ("microbatches", "microbatches")):
        if value(c.get(key)) is not None:
            parts.append(f"{c[key]} {noun}")
    text = " × ".join(parts)
    if value(c.get("iterations")) is not None:
        text += (", " if text else "") + f"{c['iterations']} iterations"
    delay = value(c.get("delay_ms"))
    if slow_links(report) and delay is not None:
        since = value(c.get("from_iteration"))
        when = f"from iteration {since:g} on, " if since else ""
        text += ("; " if text else "") + (
            f"{when}every message over {slow_links(report)} takes {number(delay)} ms longer"
        )
    return text


def verdicts(report: Report) -> list[tuple[str, bool]]:
    """What was proved equal, or found different; what was not compared is left out."""
    out = []
    for key, noun in (("losses_identical", "Losses"), ("parameters_identical", "Parameters")):
        same = report.summary.get(key)
        if isinstance(same, bool):
            out.append((f"{noun} {'identical, bit for bit' if same else 'differ'}", same))
    return out


def pictures(report: Report) -> list[Picture]:
    """Measured and, beneath it, predicted, arm by arm; two missing ones leave no trace."""
    out = []
    for arm in report.arms:
        if arm.measured is not None or arm.predicted is not None:
            for timeline, word in ((arm.measured, "measured"), (arm.predicted, "predicted")):
                gantt = None if timeline is None else pipeline_gantt(timeline)
                out.append(Picture(f"{arm.name} {word}", gantt, word == "measured"))
    return out


def common_seconds(report: Report) -> float:
    """The length of the one axis on which all timelines are drawn."""
    lengths = [p.gantt.makespan for p in pictures(report) if p.gantt is not None]
    return 1.04 * max(lengths, default=0.0) or 1.0


def peak_in_flight(report: Report, arm: ArmReport) -> str:
    """Per stage; from the summary, else from a timeline."""
    told: Sequence[Any] = listing(_arm(report, arm.name).get("peak_in_flight"))
    timeline = arm.measured or arm.predicted
    if not told and timeline is not None:
        told = timeline.peak_in_flight()
    return ", ".join(number(v) for v in map(value, told) if v is not None)


def memory_rows(summary: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """A name, and a cell per stage: what activations may take, should have taken, and took.

    `summary`: what summary.json holds.
    """
    rows: list[tuple[str, list[str]]] = []
    for key, each in mapping(summary.get("memory")).items():
        numbers = [value(one) for one in listing(each)]
        name, unit = key.replace("_", " "), "microbatches"
        if key.endswith("_bytes"):
            name, unit = name.removesuffix(" bytes"), "KiB"
            cells = ["–" if one is None else f"{one / 1024:.0f}" for one in numbers]
        else:
            cells = ["no limit" if one is None else f"{one:.4g}" for one in numbers]
        if cells:
            rows.append((f"{name}, {unit}", cells))
    return rows


def replans(report: Report) -> list[Mapping[str, Any]]:
    """The decisions of the run, in order."""
    return [mapping(replan) for replan in listing(report.summary.get("replans"))]


def replan_marks(report: Report) -> list[Mark]:
    """The replans, to stand in a chart."""
    marks = []
    for replan in replans(report):
        at = value(replan.get("iteration"))
        if at is not None:
            marks.append(Mark(int(at), f"replan at iteration {at:g}: {replan.get('why') or ''}"))
    return marks


def time_series(report: Report) -> list[Series]:
    """One line per arm."""
    return [
        Series(arm.name, arm.iteration_ms, arm_colour(arm.name, i))
        for i, arm in enumerate(report.arms)
        if known(arm.iteration_ms)
    ]


def delay_series(report: Report) -> list[Series]:
    """One line per directed link; the quiet ones grey under one name, the way back dashed."""
    links = {name: values for name, values in report.link_delay_ms.items() if known(values)}
    peaks = {name: max(v for _, v in known(values)) for name, values in links.items()}
    worst = max(peaks.values(), default=0.0)
    quiet: list[Series] = []
    loud: list[Series] = []
    for name, values in links.items():
        source, _, target = name.partition(">")
        if worst > 0 and peaks[name] < QUIET * worst:
            quiet.append(Series("other links", values, STOCK))
        else:
            colour = OTHER[len(loud) % len(OTHER)]
            loud.append(Series(f"{source} → {target}", values, colour, source > target))
    return quiet + loud


def _arm(report: Report, name: str) -> Mapping[str, Any]:
    return mapping(mapping(report.summary.get("arms")).get(name))
