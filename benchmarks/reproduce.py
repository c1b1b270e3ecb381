"""Published measurements and our predictions, side by side: `python benchmarks/reproduce.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common import markdown
from dots import DotChart, Dots, dots_png
from reference import (
    BUDGETS,
    METHODS,
    Experiment,
    Prediction,
    as_json,
    experiments,
    predict,
    summary,
)

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.files import results_folder
from megatron_adaptra.cli.output import (
    Table,
    print_json,
    progress,
    say,
    show_table,
    write_report,
)
from megatron_adaptra.view.html.page import header, page, section, table
from megatron_adaptra.view.theme import ADAPTRA, BOUND, OTHER, STOCK

Pairs = Sequence[tuple[Experiment, Prediction]]
SOURCE = "Measured: Wu et al., Adaptra, arXiv:2504.19232, and its artifact PipeMorph."
LEAD = "The published profiles, predicted. " + SOURCE


def main(words: Sequence[str] | None = None) -> int:
    """Predict, print, and write the report if asked; the exit status."""
    parser = argparse.ArgumentParser(
        description="Predict stock and adaptive iterations for the profiles that the paper on "
        "Adaptra (arXiv:2504.19232) measured, and show both side by side. p is the number of "
        "stages, which is also what 1F1B holds.",
        allow_abbrev=False,
    )
    parser.add_argument("--name", help="only this profile")
    parser.add_argument(
        "--out", metavar="DIR", help="write reproduce.json, reproduce.html and reproduce.png there"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    what.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(words)
    try:
        chosen = experiments(args.name)
        folder = results_folder(Path(args.out)) if args.out else None
    except BadInput as error:
        parser.error(str(error))
    with progress("planning"):
        pairs = [(experiment, predict(experiment.conditions)) for experiment in chosen]
    files = []
    if folder:
        headline, picture = _headline(pairs), folder / "reproduce.png"
        files = write_report(folder, "reproduce", as_json(pairs), _html(pairs, headline))
        dots_png(picture, headline, LEAD, _charts(pairs))
        files.append(picture)
    if args.json:
        print_json(as_json(pairs))
        return 0
    for one in _tables(pairs):
        if args.markdown:
            say(markdown(one))
        else:
            show_table(one)
    if not args.markdown:
        say(SOURCE)
        for path in files:
            say(str(path))
    return 0


def _tables(pairs: Pairs) -> list[Table]:
    return [
        Table(
            "Milliseconds of an iteration, measured by others and predicted here",
            (
                "profile",
                *(f"{m.removeprefix('ZB-CPU-')} measured" for m in METHODS),
                *("published plan", "1F1B predicted", "of measured", "adaptive", "lower bound"),
            ),
            [
                (
                    e.name,
                    *(f"{e.measured[m]:.0f}" for m in METHODS),
                    f"{e.plan_ms:.0f}",
                    f"{p.stock:.0f}",
                    f"{p.stock / e.measured['1F1B']:.2f}",
                    f"{p.adaptive:.0f}",
                    f"{p.bound:.0f}",
                )
                for e, p in pairs
            ],
        ),
        Table(
            "Adaptive within an activation budget, times the lower bound (p: what 1F1B holds)",
            ("profile", *(name for name, _, _ in BUDGETS), "no limit", "holds then"),
            [
                (
                    e.name,
                    *(f"{p.budgets[name] / p.bound:.3f}" for name, _, _ in BUDGETS),
                    f"{p.adaptive / p.bound:.3f}",
                    f"{p.peak:g}",
                )
                for e, p in pairs
            ],
        ),
        Table(
            "All profiles",
            ("ratio", "mean", "lowest", "highest"),
            [(name, *(f"{v:.3f}" for v in of.values())) for name, of in summary(pairs).items()],
        ),
    ]


def _html(pairs: Pairs, headline: str) -> str:
    shown = [section(one.title, table(one.columns, one.rows)) for one in _tables(pairs)]
    return page(headline, header("", headline, [LEAD]), *shown)


def _headline(pairs: Pairs) -> str:
    total = summary(pairs)
    over = total["adaptive / lower bound"]["mean"]
    times = total["predicted 1F1B / adaptive"]["mean"]
    return f"Adaptive: {times:.2f}× as fast as 1F1B, {over:.3f}× the lower bound"


def _charts(pairs: Pairs) -> list[DotChart]:
    rows = [e.name.replace("increasing-delay", "increasing") for e, _ in pairs]
    times = [
        Dots("1F1B, measured", STOCK, [e.measured["1F1B"] for e, _ in pairs]),
        Dots("1F1B, predicted", "#d98032", [p.stock for _, p in pairs], bar=True),
        Dots("ReSchedule, measured", "#3f7fc1", [e.measured[METHODS[-1]] for e, _ in pairs]),
        Dots("adaptive, predicted", ADAPTRA, [p.adaptive for _, p in pairs]),
        Dots("lower bound", BOUND, [p.bound for _, p in pairs], bar=True),
    ]
    ratios = [
        Dots("published plan", STOCK, [e.plan_ms / p.bound for e, p in pairs], bar=True),
        *(
            Dots(f"adaptive within {name}", colour, [p.budgets[name] / p.bound for _, p in pairs])
            for (name, _, _), colour in zip(BUDGETS, OTHER, strict=False)
        ),
        Dots("adaptive, no limit", ADAPTRA, [p.adaptive / p.bound for _, p in pairs]),
    ]
    return [
        DotChart("Measured and predicted", "iteration, ms", rows, times),
        DotChart("How far from the lower bound", "times the lower bound", rows, ratios, 1.0),
    ]


if __name__ == "__main__":
    sys.exit(main())
