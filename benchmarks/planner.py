"""Planning time and plan quality, over sizes, delays and memory: `python benchmarks/planner.py`.

Two policies: `adaptive` with all levers; and `warmup` under rendezvous sends, which is what runs
inside Megatron today. Every job has equal stages and one slow link in the middle.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from common import job, markdown, save
from gantt_png import INCHES, INK, STYLE, write_header

from megatron_adaptra.cli.output import Table, progress, say, show_table
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.plan import Plan, make_plan
from megatron_adaptra.view.theme import ADAPTRA, STOCK

SMALL, MEDIUM, LARGE = ((4, 12), (8, 24)), ((16, 128),), ((64, 512),)
FORWARD_MS = 9.0  # of `job`
DELAYS = 0, 2, 6  # of the slow link, in forwards
BUDGETS = 0, 2, 1  # activations that a stage may hold, in numbers of stages; 0: no limit
AT_BOUND = 5e-5  # a smaller gap is none
TICKS = 0, 0.5, 1, 2, 5, 10, 20, 50, 100  # of the gaps, in percent


@dataclass(frozen=True)
class Case:
    policy: str
    stages: int
    microbatches: int
    chunks: int
    recompute: bool
    budget: int
    delay: int

    @property
    def sends(self) -> str:
        return "eager" if self.policy == "adaptive" else "rendezvous"

    @property
    def conditions(self) -> Conditions:
        """`warmup` knows no halves, so what bounds it is a job without them."""
        limit = {"activation_budget": (self.budget * self.stages,) * self.stages}
        return job(
            self.stages,
            self.microbatches,
            {self.stages // 2 - 1: FORWARD_MS * self.delay},
            chunks=self.chunks,
            split=self.policy == "adaptive",
            recompute=self.recompute,
            **limit if self.budget else {},
        )

    @property
    def size(self) -> str:
        text = f"{self.stages} x {self.microbatches}"
        return text + f", {self.chunks} chunks" * (self.chunks > 1)

    @property
    def memory(self) -> str:
        """What a stage may hold; p is the number of stages, which is what 1F1B holds."""
        words = {0: "no limit", 1: "p"}.get(self.budget, f"{self.budget} p")
        return words + " + recompute" * self.recompute


@dataclass(frozen=True)
class Result:
    """`long_ms`: the iteration that a long search finds, where one was asked for."""

    case: Case
    ops: int
    planning_ms: float
    predicted_ms: float
    lower_bound_ms: float
    stock_ms: float
    peak_in_flight: float
    long_ms: float | None

    @property
    def gap(self) -> float:
        return max(0.0, self.predicted_ms / self.lower_bound_ms - 1)

    @property
    def at_bound(self) -> bool:
        return self.gap < AT_BOUND

    @property
    def times_stock(self) -> float:
        return self.stock_ms / self.predicted_ms

    def to_json(self) -> dict[str, Any]:
        case = {**asdict(self.case), "sends": self.case.sends}
        return {**case, **{k: v for k, v in asdict(self).items() if k != "case"}}


def cases(large: bool) -> Iterator[Case]:
    sizes = (*SMALL, *MEDIUM, *(LARGE if large else ()))
    for policy in ("adaptive", "warmup"):
        for size in sizes:
            for chunks in (1, 2) if policy == "adaptive" and size in SMALL else (1,):
                # Without a limit of memory there is nothing that a recompute could save.
                levers = [(budget, False) for budget in BUDGETS]
                if policy == "adaptive" and size in SMALL:
                    levers += [(budget, True) for budget in BUDGETS if budget]
                for budget, recompute in levers:
                    for delay in DELAYS:
                        yield Case(policy, *size, chunks, recompute, budget, delay)


def measure(case: Case, runs: int, long: float | None) -> Result:
    c, sends = case.conditions, case.sends
    plan, planning_ms = timed(lambda: make_plan(c, case.policy, sends), runs)
    stock = make_plan(c, "interleaved" if case.chunks > 1 else "1f1b", sends)
    longer = None
    if long is not None and case.policy == "adaptive":
        # At the bound there is nothing left to find.
        done = plan.gap < AT_BOUND
        longer = plan if done else make_plan(c, case.policy, sends, time_limit=long)
    return Result(
        case,
        (3 if c.split else 2) * c.stages * c.chunks * c.microbatches,
        planning_ms,
        1e3 * plan.predicted,
        1e3 * plan.lower_bound,
        1e3 * stock.predicted,
        max(plan.peak_in_flight),
        None if longer is None else 1e3 * longer.predicted,
    )


def timed(plan: Callable[[], Plan], runs: int) -> tuple[Plan, float]:
    """The plan, which is the same every time, and the median of its processor time in ms."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        made = plan()
        times.append(1e3 * (time.process_time() - start))
    return made, median(times)


# --- what is shown -------------------------------------------------------------------------------


def tables(results: Sequence[Result]) -> Iterator[Table]:
    """One row per job and memory; in each cell one value per delay."""
    for policy, of in groupby(results, lambda r: r.case.policy):
        rows = [
            (*names, *cells(list(group)))
            for names, group in groupby(of, lambda r: (r.case.size, r.case.memory))
        ]
        columns = ("p x m", "memory", "planning, ms", "plan / bound", "stock / plan", "holds")
        if len(rows[0]) > len(columns):
            columns += ("default / long search",)
        delays = ", ".join(map(str, DELAYS[:-1])) + f" and {DELAYS[-1]}"
        yield Table(f"{policy}, with a delay of {delays} forwards", columns, rows)


def cells(group: Sequence[Result]) -> Iterator[str]:
    yield joined(f"{r.planning_ms:.0f}" for r in group)
    yield joined(f"{1 + r.gap:.3f}" for r in group)
    yield joined(f"{r.times_stock:.2f}" for r in group)
    yield joined(f"{r.peak_in_flight:g}" for r in group)
    ratios = [r.predicted_ms / r.long_ms for r in group if r.long_ms]
    if ratios:
        yield joined(f"{ratio:.3f}" for ratio in ratios)


def joined(words: Iterable[str]) -> str:
    return " / ".join(words)


COLOURS = "#8a93a1", "#3f7fc1", "#cb4d7b"  # of the delays


def draw(folder: Path, results: Sequence[Result], runs: int) -> None:
    """Raises ImportError where matplotlib is not installed."""
    import matplotlib
    from matplotlib.figure import Figure

    mine = [r for r in results if r.case.policy == "adaptive"]
    gaps = [r.gap for r in mine if not r.at_bound]
    headline = f"{len(mine) - len(gaps)} of {len(mine)} plans at the lower bound"
    if gaps:
        headline += f", the others {100 * median(gaps):.1f} % above (median)"
    lead = (
        f"Policy adaptive, one slow link in the middle; processor time, median of {runs} runs. "
        "p: the number of stages, which is what 1F1B holds."
    )
    rows = len({(r.case.memory, r.case.size) for r in mine}) + len({r.case.memory for r in mine})
    height = 1.9 + 0.17 * rows
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "none", "svg.hashsalt": "planner"}):
        figure = Figure(figsize=(INCHES, height), dpi=100, facecolor="white")
        write_header(figure, height, headline, lead)
        low, high = 0.6 / height, (height - 1.4) / height
        draw_times(figure.add_axes((0.05, low, 0.41, high - low)), results)
        draw_gaps(figure.add_axes((0.60, low, 0.38, high - low)), mine)
        figure.savefig(folder / "planner.png")
        figure.savefig(folder / "planner.svg", metadata={"Date": None})


def draw_times(axes: Any, results: Sequence[Result]) -> None:
    """A dot per case, and a line through the median of each size."""
    mine = [r for r in results if r.case.policy == "adaptive"]
    above = [r for r in mine if not r.at_bound]
    for label, colour, of in (
        ("the bound is reached", ADAPTRA, [r for r in mine if r.at_bound]),
        ("not reached", "#d98032", [r for r in above if not r.case.recompute]),
        ("not reached, with recompute", "#7d5fb2", [r for r in above if r.case.recompute]),
        ("policy warmup", STOCK, [r for r in results if r.case.policy == "warmup"]),
    ):
        points: dict[int, list[float]] = {}
        for r in sorted(of, key=lambda r: r.ops):
            points.setdefault(r.ops, []).append(r.planning_ms)
        axes.scatter([r.ops for r in of], [r.planning_ms for r in of], s=20, color=colour, lw=0)
        middle = [median(times) for times in points.values()]
        axes.plot(list(points), middle, color=colour, linewidth=1.6, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}".replace(",", " "))
    axes.grid(color="#e8ecf0", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    finish(axes, "Planning time, ms", "ops of the job (stages x chunks x microbatches x kinds)")


def draw_gaps(axes: Any, results: Sequence[Result]) -> None:
    """By memory, a row per job and a dot per delay."""
    places: dict[tuple[str, str], int] = {}
    for memory in dict.fromkeys(r.case.memory for r in results):
        places[memory, ""] = len(places)
        for size in dict.fromkeys(r.case.size for r in results if r.case.memory == memory):
            places[memory, size] = len(places)
    for i, (delay, colour) in enumerate(zip(DELAYS, COLOURS, strict=True)):
        of = [r for r in results if r.case.delay == delay]
        axes.scatter(
            [100 * r.gap for r in of],
            [places[r.case.memory, r.case.size] + 0.2 * (i - 1) for r in of],
            s=20,
            color=colour,
            lw=0,
            clip_on=False,
            label=f"delay of {delay} forwards" if delay else "no delay",
            zorder=3,
        )
    axes.set_xscale("symlog", linthresh=1, linscale=0.6)
    axes.set_xlim(left=0)
    axes.set_xticks([x for x in TICKS if x <= axes.get_xlim()[1]])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_yticks(list(places.values()), [size or memory for memory, size in places])
    for (_, size), label in zip(places, axes.get_yticklabels(), strict=True):
        if not size:
            label.set(fontweight="bold", color=INK)
    axes.grid(axis="x", color="#e8ecf0", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8.5, loc="upper right")
    finish(axes, "Gap to the lower bound, %, by memory of a stage", "no schedule can gain more")


def finish(axes: Any, title: str, x_label: str) -> None:
    axes.set_xlabel(x_label, fontsize=8.5)
    axes.tick_params(length=0, labelsize=8, which="both")
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", pad=10)


def main() -> None:
    parser = argparse.ArgumentParser(description="Planning time and plan quality")
    add = parser.add_argument
    add("--runs", type=int, default=3, metavar="N", help="median of (default: 3)")
    add("--large", action="store_true", help="64 stages x 512 microbatches, too")
    add("--long", type=float, metavar="S", help="also search for S seconds where a gap is left")
    add("--out", metavar="DIR", help="write planner.json, planner.png and planner.svg there")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    args = parser.parse_args()
    results = []
    for case in cases(args.large):
        with progress(f"{case.policy}, {case.size}, {case.memory}"):
            results.append(measure(case, args.runs, args.long))
    for table in tables(results):
        if args.markdown:
            say(markdown(table))
        else:
            show_table(table)
    if args.out:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        save(folder / "planner.json", args.runs, [r.to_json() for r in results])
        draw(folder, results, args.runs)


if __name__ == "__main__":
    main()
