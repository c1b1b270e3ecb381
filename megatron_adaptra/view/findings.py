"""The words and numbers of a report and of the demo's closing table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from megatron_adaptra.view.axis import number, size
from megatron_adaptra.view.bars import Gantt
from megatron_adaptra.view.charts import Mark, Series, known
from megatron_adaptra.view.pipeline import pipeline_gantt
from megatron_adaptra.view.ranges import ranges
from megatron_adaptra.view.report import ArmReport, Report
from megatron_adaptra.view.theme import OTHER, STOCK, arm_colour

COLUMNS = 8  # stages that get a column each; more stages share one column of ranges
_MEMORY = (
    ("budget", "budget"),
    ("predicted_peak", "predicted peak"),
    ("measured_peak", "measured peak"),
)
QUIET = 0.25  # a link whose highest delay is below this share of the worst one stays grey
MOST_NAMED = 4  # links in the legend of a chart


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
    """Return the names of the phases."""
    return list(report.phases) or [p for p in [key_phase(report)] if p]


def phase_ms(report: Report, arm: ArmReport, phase: str) -> float | None:
    """Return the summary's ms in `phase`, else the median of its iterations; None for neither."""
    given = mapping(mapping(_arm(report, arm.name).get("phases")).get(phase))
    stated = value(given.get("iteration_ms"))
    if stated is not None:
        return stated
    first, end = report.phases.get(phase, (0, 0))
    times = [v for i, v in known(arm.iteration_ms) if first <= i < end]
    return median(times) if times else None


def ratio(report: Report, phase: str) -> float | None:
    """Return how many times as fast Adaptra runs in `phase`."""
    times = {arm.name: phase_ms(report, arm, phase) for arm in report.arms}
    stock, adaptra = times.get("stock"), times.get("adaptra")
    return stock / adaptra if stock and adaptra else None


def speedup(report: Report) -> float | None:
    """Return how many times as fast Adaptra runs in the phase that the headline is about."""
    stated = value(report.summary.get("speedup_slow"))
    phase = key_phase(report)
    return stated if stated is not None else ratio(report, phase) if phase else None


def slow_parts(report: Report) -> list[str]:
    """Name slow parts, such as: link 2–3; links 0–1 and 2–3; path 0.1–0.2; worker 1.1; port 2."""
    parts = []
    for key, noun in (
        ("slow_links", "link"), ("slow_paths", "path"), ("slow_workers", "worker"),
        ("slow_replicas", "replica"), ("slow_hosts", "port"),
    ):  # fmt: skip
        given = [str(one).partition(":")[0] for one in listing(config(report).get(key))]
        names = [name.replace("-", "–") for name in given]
        if names:
            parts.append(f"{noun}{'s' if len(names) > 1 else ''} {' and '.join(names)}")
    return parts


def late_ranks(report: Report) -> list[str]:
    """Name the ranks that came late, such as: rank 2; ranks 1 and 2."""
    given = [str(one).partition(":")[0] for one in listing(config(report).get("late_ranks"))]
    return [f"rank{'s' if len(given) > 1 else ''} {' and '.join(given)}"] if given else []


def slow_noun(summary: Mapping[str, Any]) -> str:
    """Return the noun for the cause: slow link, path, worker, replica or port, or late rank.

    `summary`: what summary.json holds.
    """
    given = mapping(summary.get("config"))
    nouns = (
        ("slow_links", "slow link"), ("slow_paths", "slow path"), ("slow_workers", "slow worker"),
        ("slow_replicas", "slow replica"), ("slow_hosts", "slow port"), ("late_ranks", "late rank"),
    )  # fmt: skip
    return next((noun for key, noun in nouns if listing(given.get(key))), "slow link")


def headline(report: Report) -> str:
    """Return the result in one line: the speed-up, and what was slow or late meanwhile."""
    times = speedup(report)
    if times is None:
        return report.title
    whiles = []
    for parts, how in ((slow_parts(report), "slow"), (late_ranks(report), "late")):
        if names := " and ".join(parts):
            whiles.append(f"{names} {'are' if ' and ' in names else 'is'} {how}")
    if whiles and key_phase(report) == "slow":
        return f"{times:.2f}× as fast while {' and '.join(whiles)}"
    healthy = ", links healthy" if key_phase(report) == "healthy" else ""
    return f"{times:.2f}× as fast as stock Megatron{healthy}"


def setting(report: Report) -> str:
    """The experiment in a sentence."""
    c, parts = config(report), []
    for key, noun, least in (
        ("data_parallel", "replicas", 2), ("stages", "stages", 1),
        ("microbatches", "microbatches", 1),
    ):  # fmt: skip
        count = value(c.get(key))
        if count is not None and count >= least:
            parts.append(f"{c[key]} {noun}")
    text = " × ".join(parts)
    if value(c.get("iterations")) is not None:
        text += (", " if text else "") + f"{c['iterations']} iterations"
    slow, changes = report.phases.get("slow"), _changes(c)
    if changes and slow is not None:
        first, end = slow
        when = f"iterations {first} to {end - 1}" if end - first > 1 else f"iteration {first}"
        text += ("; " if text else "") + f"in {when} {', '.join(changes)}"
    return text


def _changes(c: Mapping[str, Any]) -> list[str]:
    """Describe what the settings `c` made slow or late, and by how much."""
    out, delay = [], value(c.get("delay_ms"))
    names = [str(link).replace("-", "–") for link in listing(c.get("slow_links"))]
    rules = ", ".join(map(str, listing(c.get("emulate_link"))))
    if names and rules:
        out.append(f"slow links {rules}")
    elif names and delay is not None:
        rate = value(c.get("bandwidth"))
        more = [f"takes {number(delay)} ms longer"] if delay or not rate else []
        more += [f"crosses at {number(rate / 1e6)} MB/s"] if rate else []
        links = f"link{'s' if len(names) > 1 else ''} {' and '.join(names)}"
        out.append(f"every message over {links} {' and '.join(more)}")
    for key, noun in (
        ("slow_paths", "path"), ("slow_workers", "worker"), ("emulate_worker", "worker"),
        ("slow_replicas", "replica"),
    ):  # fmt: skip
        if given := [str(one) for one in listing(c.get(key))]:
            out.append(f"slow {noun}{'s' if len(given) > 1 else ''} {', '.join(given)}")
    for one in listing(c.get("slow_hosts")):
        host, _, most = str(one).partition(":")
        out.append(f"all links of host {host} together pass {most} each way")
    for one in listing(c.get("late_ranks")):
        rank, _, late = str(one).partition(":")
        out.append(f"data-parallel rank {rank} comes {late} late")
    if out and (ports := [str(one) for one in listing(c.get("hosts"))]):
        out[-1] += f" (ports of hosts: {', '.join(ports)})"
    return out


def comparisons(report: Report) -> list[tuple[str, bool]]:
    """Return a sentence on each comparison of the arms, and whether its result is fine."""
    out = []
    for what, words, good in equalities(report.summary):
        out.append((f"{what.capitalize()} {words}", good))
    return out


def equalities(summary: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """Return for losses and parameters: name, how equal the arms are, whether that is fine.

    `summary`: what summary.json holds.
    """
    out, found = [], summary.get("equal_to_rounding", False)
    for what in ("losses", "parameters"):
        same, apart = (summary.get(f"{what}_{k}") for k in ("identical", "difference"))
        if not isinstance(same, bool):
            continue
        share = value(apart)
        how = "" if same or share is None else f" by {share:.1g} of their size"
        words = "identical, bit for bit" if same else f"differ{how}"
        if found and not same:
            words = f"equal to rounding, they {words}"
        if found is None and not same:
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


def common_seconds(report: Report) -> float:
    """The length of the one axis on which all timelines are drawn."""
    lengths = [p.gantt.makespan for p in pictures(report) if p.gantt is not None]
    return 1.04 * max(lengths, default=0.0) or 1.0


def compared(report: Report) -> Mapping[str, Any]:
    """Return the plan that was predicted, and the iterations it ran in; empty if not known."""
    return mapping(report.summary.get("compared"))


def predicted_and_measured(report: Report, arm: ArmReport) -> tuple[float | None, float | None]:
    """Return both ms of an iteration under the plan compared: the summary's, else those drawn."""
    given = _arm(report, arm.name)
    stated = value(given.get("predicted_slow_ms")), value(given.get("measured_slow_ms"))
    drawn = (None if t is None else 1e3 * t.iteration for t in (arm.predicted, arm.measured))
    predicted, measured = (d if t is None else t for t, d in zip(stated, drawn, strict=True))
    return predicted, measured


def error(report: Report, arm: ArmReport) -> str:
    """Return how far the measurement is off the prediction; empty where one is missing."""
    predicted, measured = predicted_and_measured(report, arm)
    if not predicted or measured is None:
        return ""
    return f"{100 * (measured / predicted - 1):+.1f} %"


def notes(report: Report) -> list[str]:
    """Return the notes that explain the figures."""
    return [str(note) for note in listing(report.summary.get("notes"))]


def peak_in_flight(report: Report, arm: ArmReport) -> str:
    """Return the peak of microbatches per stage, from the summary, else from a timeline."""
    stated: Sequence[Any] = listing(_arm(report, arm.name).get("peak_in_flight"))
    timeline = arm.measured or arm.predicted
    if not stated and timeline is not None:
        stated = timeline.peak_in_flight()
    return ranges([v for v in map(value, stated) if v is not None])


def peak_bytes(summary: Mapping[str, Any], arm: str) -> str:
    """Return the bytes of the peak of microbatches of `arm`, per stage; empty where not known.

    `summary`: what summary.json holds.
    """
    memory = mapping(summary.get("memory"))
    peaks = listing(mapping(mapping(summary.get("arms")).get(arm)).get("peak_in_flight"))
    each = listing(memory.get("bytes_per_microbatch"))
    held = _known(memory.get("measured_peak_bytes")) if arm == "adaptra" else []
    return ranges([size(round(one)) for one in held or _products(peaks, each)])


def memory_table(
    summary: Mapping[str, Any], most: int = COLUMNS
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Return columns and rows (name, cells) of activations: budget, predicted and measured peak.

    A column per stage, or worker, or one for all where there are more than `most`. `summary`: what
    summary.json holds.
    """
    memory = mapping(summary.get("memory"))
    each = memory.get("bytes_per_microbatch")
    rows: list[tuple[str, list[str]]] = []
    for key, name in _MEMORY:
        in_microbatches = [value(one) for one in listing(memory.get(key))]
        cells = ["no limit" if one is None else f"{one:.4g}" for one in in_microbatches]
        rows.append((f"{name}, microbatches", cells))
        in_bytes = _known(memory.get(f"{key}_bytes")) or _products(in_microbatches, listing(each))
        rows.append((f"{name}, bytes", [size(round(one)) for one in in_bytes]))
    rows.append(("one microbatch, bytes", [size(round(one)) for one in _known(each)]))
    rows = [(name, cells) for name, cells in rows if cells]
    stages = max((len(cells) for _, cells in rows), default=0)
    names = [str(name) for name in listing(summary.get("workers"))]
    names = names if len(names) >= stages else [str(stage) for stage in range(stages)]
    if stages <= most:
        return [f"{row_noun(summary)} {name}" for name in names[:stages]], rows
    head = f"{row_noun(summary)}s {names[0]} to {names[stages - 1]}"
    return [head], [(name, [ranges(cells)]) for name, cells in rows]


def row_noun(summary: Mapping[str, Any]) -> str:
    """Return the noun of a `summary`'s lists: worker where replicas have one plan, else stage."""
    return "worker" if listing(summary.get("workers")) else "stage"


def _known(data: object) -> list[float]:
    """Return the numbers in the list `data`; empty where one of its values is no number."""
    numbers = [value(one) for one in listing(data)]
    known = [one for one in numbers if one is not None]
    return known if len(known) == len(numbers) else []


def _products(some: Sequence[Any], others: Sequence[Any]) -> list[float]:
    first, second = _known(some), _known(others)
    return [a * b for a, b in zip(first, second, strict=True)] if len(first) == len(second) else []


def replans(report: Report) -> list[Mapping[str, Any]]:
    """The decisions of the run, in order."""
    return [mapping(replan) for replan in listing(report.summary.get("replans"))]


def replan_marks(report: Report) -> list[Mark]:
    """The replans, changes of the all-reduce, and of replicas' microbatches, for a chart."""
    marks = []
    for replan in replans(report):
        at = value(replan.get("iteration"))
        if at is not None:
            marks.append(Mark(int(at), f"replan at iteration {at:g}: {replan.get('why') or ''}"))
    for one in map(mapping, listing(report.summary.get("all_reduces"))):
        if (at := value(one.get("iteration"))) is not None:
            why = one.get("why") or ""
            marks.append(Mark(int(at), f"another all-reduce at iteration {at:g}: {why}"))
    for one in map(mapping, listing(report.summary.get("shares"))):
        if (at := value(one.get("iteration"))) is not None:
            why = one.get("why") or ""
            marks.append(Mark(int(at), f"other counts of microbatches at iteration {at:g}: {why}"))
    return marks


def time_series(report: Report) -> list[Series]:
    """Return a line of iteration times per arm."""
    return [
        Series(arm.name, arm.iteration_ms, arm_colour(arm.name, i))
        for i, arm in enumerate(report.arms)
        if known(arm.iteration_ms)
    ]


def _goes_back(source: str, target: str) -> bool:
    """Return whether a link, between stages or workers, leads to an earlier stage."""
    here, there = (name.rpartition(".")[2] for name in (source, target))
    return int(here) > int(there) if here.isdecimal() and there.isdecimal() else here > there


def delay_series(report: Report) -> list[Series]:
    """Return a line of delays per directed link, the way back dashed.

    Quiet links, and all but the MOST_NAMED with the highest peaks, are grey under one name.
    """
    links = {name: values for name, values in report.link_delay_ms.items() if known(values)}
    peaks = {name: max(v for _, v in known(values)) for name, values in links.items()}
    worst = max(peaks.values(), default=0.0)
    highest = sorted(peaks, key=lambda name: -peaks[name])[:MOST_NAMED]
    quiet: list[Series] = []
    loud: list[Series] = []
    for name, values in links.items():
        source, _, target = name.partition(">")
        if worst > 0 and (peaks[name] < QUIET * worst or name not in highest):
            quiet.append(Series("other links", values, STOCK))
        else:
            colour = OTHER[len(loud) % len(OTHER)]
            loud.append(Series(f"{source} → {target}", values, colour, _goes_back(source, target)))
    return quiet + loud


def _arm(report: Report, name: str) -> Mapping[str, Any]:
    return mapping(mapping(report.summary.get("arms")).get(name))
