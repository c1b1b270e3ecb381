"""The words and numbers of a report and of the demo's closing table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_adaptra.base.units import brief
from megatron_adaptra.view import gain
from megatron_adaptra.view.axis import number, size
from megatron_adaptra.view.bars import Gantt
from megatron_adaptra.view.charts import Curve, Mark
from megatron_adaptra.view.pipeline import pipeline_gantt
from megatron_adaptra.view.report import ArmReport, Report
from megatron_adaptra.view.summary import AllReduce, MemoryFigures, Replan, Shares, Summary
from megatron_adaptra.view.theme import OTHER, STOCK, arm_colour

COLUMNS = 8  # stages that get a column each; more stages share one column of ranges
QUIET = 0.25  # a link whose highest delay is below this share of the worst one stays grey
MOST_NAMED = 4  # links in the legend of a chart
_SLOW = {
    "slow_links": "link", "slow_paths": "path", "slow_workers": "worker",
    "slow_replicas": "replica", "slow_hosts": "port",
}  # fmt: skip


class Picture(NamedTuple):
    """A timeline to draw; `gantt` None says that there is none."""

    title: str
    gantt: Gantt | None
    measured: bool


def key_phase(phases: Mapping[str, tuple[int, int]]) -> str:
    """Return the one of `phases` that a report is about: slow, measured, or the first."""
    return next((name for name in ("slow", "measured") if name in phases), next(iter(phases)))


def slow_noun(config: Mapping[str, Any]) -> str:
    """Return the noun for the cause: slow link, path, worker, replica or port, or late rank.

    `config`: of a summary.
    """
    late = "late rank" if config["late_ranks"] else "slow link"
    return next((f"slow {noun}" for key, noun in _SLOW.items() if config[key]), late)


def headline(report: Report) -> str:
    """Return the result in one line: what the plan has gained, and what was slow meanwhile."""
    config, phase = report.summary["config"], key_phase(report.phases)
    if words := gain.no_plan(report.summary["times"]):
        return words
    key = gain.key_times(report.summary["times"], phase)
    words = gain.in_words(key)
    slow = " and ".join(_named(config[one], noun) for one, noun in _SLOW.items() if config[one])
    late = _named(config["late_ranks"], "rank") if config["late_ranks"] else ""
    whiles = [
        f"{names} {'are' if ' and ' in names else 'is'} {how}"
        for names, how in ((slow, "slow"), (late, "late"))
        if names
    ]
    if whiles and phase == "slow":
        return f"{words} while {' and '.join(whiles)}"
    healthy = ", links healthy" if phase == "healthy" else ""
    than = {"faster": "as", "slower": "than", "alike": "from"}
    return f"{words} {than[gain.sign(key)]} stock Megatron{healthy}"


def _named(given: Sequence[str], noun: str) -> str:
    """Name parts of a run, such as: link 2–3; links 0–1 and 2–3; worker 1.1; rank 2."""
    names = [one.partition(":")[0].replace("-", "–") for one in given]
    return f"{noun}{'s' if len(names) > 1 else ''} {' and '.join(names)}"


def setting(report: Report) -> str:
    """The experiment in a sentence."""
    c = report.summary["config"]
    text = f"{c['stages']} stages × {c['microbatches']} microbatches, {c['iterations']} iterations"
    if c["data_parallel"] > 1:
        text = f"{c['data_parallel']} replicas × {text}"
    slow, changes = report.phases.get("slow"), _changes(c)
    if changes and slow is not None:
        first, end = slow
        when = f"iterations {first} to {end - 1}" if end - first > 1 else f"iteration {first}"
        text += f"; in {when} {', '.join(changes)}"
    return text


def _changes(c: Mapping[str, Any]) -> list[str]:
    """Describe what the settings `c` made slow or late, and by how much."""
    out = []
    for key, noun in (
        ("slow_links", "link"), ("slow_paths", "path"), ("slow_workers", "worker"),
        ("slow_replicas", "replica"),
    ):  # fmt: skip
        if given := c[key]:
            out.append(f"slow {noun}{'s' if len(given) > 1 else ''} {', '.join(given)}")
    for one in c["slow_hosts"]:
        host, _, most = one.partition(":")
        out.append(f"all links of host {host} together pass {most} each way")
    for one in c["late_ranks"]:
        rank, _, late = one.partition(":")
        out.append(f"data-parallel rank {rank} comes {late} late")
    if out and (ports := c["hosts"]):
        out[-1] += f" (ports of hosts: {', '.join(ports)})"
    return out


def equalities(summary: Summary) -> list[tuple[str, str, bool]]:
    """Return for losses and parameters: name, how equal the arms are, whether that is fine.

    `summary`: what summary.json holds.
    """
    out, found = [], summary["equal_to_rounding"]
    for what, same, share in (
        ("losses", summary["losses_identical"], summary["losses_difference"]),
        ("parameters", summary["parameters_identical"], summary["parameters_difference"]),
    ):
        words = "identical, bit for bit"
        if not same:
            words = "differ" + ("" if share is None else f" by {share:.1g} of their size")
            if found:
                words = f"equal to rounding, they {words}"
            if found is None:
                words = f"{words}, as dropout falls on other values where microbatches move"
        out.append((what, words, same or found in (True, None)))
    return out


def pictures(report: Report) -> list[Picture]:
    """Return each arm's measured and predicted timeline; an arm without both is left out."""
    out = []
    for arm in report.arms:
        if arm.measured is not None or arm.predicted is not None:
            for timeline, word in ((arm.measured, "measured"), (arm.predicted, "predicted")):
                gantt = None
                if timeline is not None:  # rows of a prediction are too low for notes
                    who = arm.conditions if word == "measured" else None
                    gantt = pipeline_gantt(timeline, conditions=who)
                out.append(Picture(f"{arm.name} {word}", gantt, word == "measured"))
    return out


def error(report: Report, arm: ArmReport) -> str:
    """Return how far the measurement is off the prediction; empty where one is missing."""
    figures = report.summary["arms"][arm.name]
    predicted, measured = figures["predicted_slow_ms"], figures["measured_slow_ms"]
    if not predicted or measured is None:
        return ""
    return f"{100 * (measured / predicted - 1):+.1f} %"


def peak_in_flight(report: Report, arm: ArmReport) -> str:
    """Return the peak of microbatches per stage, from the summary, else from a timeline."""
    stated = report.summary["arms"][arm.name]["peak_in_flight"]
    timeline = arm.measured or arm.predicted
    return brief(stated or (timeline.peak_in_flight() if timeline is not None else ()))


def peak_bytes(summary: Summary, arm: str) -> str:
    """Return the bytes of the peak of microbatches of `arm`, per stage; empty where not known.

    `summary`: what summary.json holds.
    """
    if (memory := summary["memory"]) is None:
        return ""
    held = memory["measured_peak_bytes"] if arm == "adaptra" else None
    peaks = summary["arms"][arm]["peak_in_flight"] or ()
    return brief([size(round(one)) for one in held or _bytes(peaks, memory)])


def row_noun(summary: Summary) -> str:
    """Return the noun of a `summary`'s lists: worker where replicas have one plan, else stage."""
    return "worker" if summary["workers"] else "stage"


def _bytes(peaks: Sequence[float | None], memory: MemoryFigures) -> list[float]:
    """Return the bytes of `peaks`, which are microbatches; empty where some are not known."""
    known = [peak for peak in peaks if peak is not None]
    each = memory["bytes_per_microbatch"] or ()
    return [a * b for a, b in zip(known, each, strict=True)] if len(known) == len(each) else []


class Decided(NamedTuple):
    """A group of decisions holds those of one kind: iteration, reason and detail of each.

    `title`: of its section. `what`: noun of one. `note`: explains the details.
    """

    title: str
    what: str
    note: str
    each: list[tuple[int, str, str]]


def decided(summary: Summary) -> list[Decided]:
    """Return all decisions of a run by kind; `summary`: what summary.json holds."""
    warmup = f"Warmup: how many forwards each {row_noun(summary)} runs before its first backward."
    ranks = "Ranks in a reason are those of the data-parallel group."
    counts = "Counts are by replica; the global batch, and the weight of each sample, stay."
    replans = [(one["iteration"], one["why"], _replan_detail(one)) for one in summary["replans"]]
    reduced = [(one["iteration"], one["why"], _reduced(one)) for one in summary["all_reduces"]]
    shares = [(one["iteration"], one["why"], _shares_detail(one)) for one in summary["shares"]]
    return [
        Decided("Replans", "replan", warmup, replans),
        Decided("Reductions of gradients", "another all-reduce", ranks, reduced),
        Decided("Shares of microbatches", "other counts of microbatches", counts, shares),
    ]


def _replan_detail(one: Replan) -> str:
    before, after, parts = one["warmup_before"], one["warmup_after"], []
    if before and after and "warmup" not in one["why"]:
        parts.append(f"warmup {brief(before)} → {brief(after)}")
    parts.append(_times(("predicted", one["predicted_ms"]), ("measured", one["measured_ms"])))
    return "; ".join(parts)


def replan_marks(report: Report) -> list[Mark]:
    """The replans, changes of the all-reduce, and of replicas' microbatches, for a chart."""
    return [
        Mark(at, f"{group.what} at iteration {at}: {why}")
        for group in decided(report.summary)
        for at, why, _ in group.each
    ]


def time_curves(report: Report) -> list[Curve]:
    """Return a curve of iteration times per arm."""
    arms = report.summary["arms"]
    curves = [
        Curve(arm.name, arm_colour(arm.name, i), _known(arms[arm.name]["iteration_ms"]))
        for i, arm in enumerate(report.arms)
    ]
    return [curve for curve in curves if curve.points]


def _known(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return iteration and value of the finite numbers among `values`."""
    return [(i, value) for i, value in enumerate(values) if math.isfinite(value)]


def _goes_back(source: str, target: str) -> bool:
    """Return whether a link, between stages or workers, leads to an earlier stage."""
    here, there = (name.rpartition(".")[2] for name in (source, target))
    return int(here) > int(there) if here.isdecimal() and there.isdecimal() else here > there


def delay_curves(report: Report) -> list[Curve]:
    """Return a curve of delays per directed link, the way back dashed.

    Quiet links, and all but the MOST_NAMED with the highest peaks, are grey under one name.
    """
    links = {name: points for name, ms in report.link_delay_ms.items() if (points := _known(ms))}
    peaks = {name: max(ms for _, ms in points) for name, points in links.items()}
    worst = max(peaks.values(), default=0.0)
    highest = sorted(peaks, key=lambda name: -peaks[name])[:MOST_NAMED]
    quiet: list[Curve] = []
    loud: list[Curve] = []
    for name, points in links.items():
        source, _, target = name.partition(">")
        if worst > 0 and (peaks[name] < QUIET * worst or name not in highest):
            quiet.append(Curve("other links", STOCK, points))
        else:
            words, colour = f"{source} → {target}", OTHER[len(loud) % len(OTHER)]
            loud.append(Curve(words, colour, points, dashed=_goes_back(source, target)))
    return quiet + loud


def _reduced(one: AllReduce) -> str:
    times = _times(
        ("native", one["native_ms"]),
        ("predicted", one["predicted_ms"]),
        ("measured", one["measured_ms"]),
    )
    text = f"{one['before']} → {one['after']}; ranks {brief(one['ranks'])}"
    return text + (f"; after the last arrival {times}" if times else "")


def _shares_detail(one: Shares) -> str:
    times = _times(
        ("with equal counts", one["full_ms"]),
        ("predicted", one["predicted_ms"]),
        ("measured", one["measured_ms"]),
    )
    others = [
        f"{other['remedy']} would leave {number(other['leaves_ms'])} ms"
        for other in one["cheaper"]
        if other["leaves_ms"] is not None
    ]
    change = f"{counts(one['before'])} → {counts(one['after'])} microbatches"
    return "; ".join([change, f"an iteration {times}", *others])


def _times(*times: tuple[str, float | None]) -> str:
    return ", ".join(f"{word} {number(ms)} ms" for word, ms in times if ms)


def counts(each: Sequence[int]) -> str:
    """Return the microbatches of `each` replica as text, `9,9,5,9`."""
    return ",".join(map(str, each))
