"""The closing output of `adaptra demo`: a table, and the decisions in words."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from megatron_adaptra.base.units import brief
from megatron_adaptra.demo.options import DemoOptions
from megatron_adaptra.view import gain
from megatron_adaptra.view.findings import all_reduce_detail, equalities, shares_line
from megatron_adaptra.view.summary import Summary


def show(summary: Summary, options: DemoOptions, console: Console) -> None:
    """Print the closing table and the sentences below it.

    `summary`: what summary.json holds, of a run with these `options`. `console`: where it goes.
    """
    arms = summary["arms"]["stock"], summary["arms"]["adaptra"]
    table = Table(title="Iteration time, median ms (of so many iterations)")
    for name in ("phase", "stock", "adaptra", "stock / adaptra"):
        words = name == "phase"
        table.add_column(name, justify="left" if words else "right", no_wrap=words)
    for times in summary["times"]:
        ms = (f"{times['stock_ms']:.0f}", f"{times['adaptra_ms']:.0f}")
        style = "red" if gain.sign(times) == "slower" else None
        table.add_row(gain.name(times), *ms, gain.factor(times, " x"), style=style)
    if (compared := summary["compared"]) is not None:
        table.add_section()
        first, last = compared["first_iteration"], compared["last_iteration"]
        table.add_row(f"iterations {first} to {last}", "", "", "")
        for word, (stock, ours) in (
            ("predicted", [arm["predicted_slow_ms"] for arm in arms]),
            ("measured", [arm["measured_slow_ms"] for arm in arms]),
        ):
            assert stock is not None  # known where arms are compared
            assert ours is not None
            table.add_row(f"  {word}", f"{stock:.0f}", f"{ours:.0f}", f"{stock / ours:.2f} x")
        peaks = [brief(arm["peak_in_flight"] or []) for arm in arms]
        if any(peaks):
            table.add_row("  most microbatches in flight", *peaks, "")
    console.print(table)
    for replan in summary["replans"]:
        measured = replan["measured_ms"]
        console.print(
            f"replan at iteration {replan['iteration']}: {replan['why']} "
            f"(predicted {replan['predicted_ms']:.0f} ms, measured "
            + (f"{measured:.0f} ms)" if measured is not None else "in no whole iteration)"),
            highlight=False,
        )
    for one in summary["all_reduces"]:
        line = f"gradients from iteration {one['iteration']} on: {one['why']}"
        console.print(f"{line} ({all_reduce_detail(one)})", highlight=False)
    for shares in summary["shares"]:
        console.print(shares_line(shares), highlight=False)
    changes = summary["replans"] or summary["all_reduces"] or summary["shares"]
    if why := gain.no_plan(summary["times"]) or ("" if changes else "No other plan was made"):
        console.print(why, highlight=False)
    for what, how, good in equalities(summary):
        console.print(f"{what}: {how if good else f'[red]DIFFERENT[/]: they {how}'}")
    for text in summary["notes"]:
        console.print(text, highlight=False, markup=False)
    console.print(f"results: {options.out}/report.html, timeline.json, decisions.jsonl")
    sys.stdout.flush()
