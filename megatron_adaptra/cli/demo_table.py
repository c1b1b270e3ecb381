"""The closing output of `adaptra demo`: a table, and the decisions in words."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from megatron_adaptra.base.units import brief
from megatron_adaptra.demo.options import DemoOptions
from megatron_adaptra.view import gain
from megatron_adaptra.view.findings import decided, equalities
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
    groups = decided(summary)
    for group in groups:
        for at, why, detail in group.each:
            console.print(f"{group.what} at iteration {at}: {why} ({detail})", highlight=False)
    changes = any(group.each for group in groups)
    if why := gain.no_plan(summary["times"]) or ("" if changes else "No other plan was made"):
        console.print(why, highlight=False)
    for what, how, good in equalities(summary):
        console.print(f"{what}: {how if good else f'[red]DIFFERENT[/]: they {how}'}")
    for text in summary["notes"]:
        console.print(text, highlight=False, markup=False)
    console.print(f"results: {options.out}/report.html, timeline.json, decisions.jsonl")
    sys.stdout.flush()
