"""`adaptra plan`: the best warmup depths for a job, and what they gain over 1F1B."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from megatron_adaptra.cli.profile import conditions_of, load_profile
from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.check import check
from megatron_adaptra.plan import PLANNERS, Plan, make_plan

_MS = "milliseconds; one number, or one per {} with commas between"
_WHOLE = {"stages": "pipeline stages", "microbatches": "microbatches per iteration"}
_NUMBERS = {
    "forward_ms": "forward of a microbatch, " + _MS.format("stage"),
    "backward_ms": "its backward",
    "backward_input_ms": "the half of the backward that makes the input's gradient",
    "backward_weight_ms": "the half of the backward that makes the weights' gradients",
    "link_delay_ms": "what a message takes longer than on a healthy link, one per link",
    "return_delay_ms": "the same for gradients, which go back (default: as --link-delay-ms)",
    "activation_budget": "microbatches whose activations a stage may hold (default: no limit)",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="the schedule that a job with slow links should run",
        description="Plan the schedule of a job whose links may be slow. The job is given by "
        "flags, or by a file, over which flags win.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    for key, text in _WHOLE.items():
        add(_flag(key), metavar="N", help=text)
    for key, text in _NUMBERS.items():
        add(_flag(key), metavar="X[,X...]", help=text)
    add("--profile", metavar="FILE", help="YAML or JSON file with these settings")
    add("--name", help="the job to take from a file that lists several")
    add("--policy", default="adaptive", help=f"{', '.join(sorted(PLANNERS))} (default: adaptive)")
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    flags = _given(args)
    values = load_profile(args.profile, args.name) if args.profile else {}
    if args.name and not args.profile:
        raise BadInput("--name", args.name, "only together with --profile")
    if any(key.startswith("backward") for key in flags):
        values = {k: v for k, v in values.items() if not k.startswith("backward")}
    conditions = conditions_of(
        {**values, **flags}, lambda key: _flag(key) if key in flags or not args.profile else key
    )
    start = time.perf_counter()
    plan = make_plan(conditions, args.policy)
    planning_ms = 1e3 * (time.perf_counter() - start)
    check(plan.program, conditions.activation_budget)
    stock = make_plan(conditions, "1f1b")
    if args.json:
        more = {"stock_ms": 1e3 * stock.predicted, "planning_ms": planning_ms}
        print(json.dumps({**plan.to_json(), **more}))
    else:
        show(plan, stock, planning_ms)
    return 0


def show(plan: Plan, stock: Plan, planning_ms: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for title in ("policy", "iteration, ms", "1F1B / this", "warmup depths", "peak in flight"):
        table.add_column(title)
    rows = [(plan.schedule.policy, plan.predicted, plan), ("1f1b", stock.predicted, stock)]
    for name, seconds, of in rows[: 1 if plan.schedule.policy == "1f1b" else 2]:
        table.add_row(
            name,
            _ms(seconds),
            _times(stock.predicted, seconds),
            ",".join(map(str, of.schedule.warmup)),
            ",".join(f"{peak:g}" for peak in of.peak_in_flight),
        )
    bound = plan.lower_bound
    table.add_row("lower bound", _ms(bound), _times(stock.predicted, bound))
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(plan.schedule.why)
    console.print(f"planned in {planning_ms:.0f} ms")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:10.1f}"


def _times(stock: float, seconds: float) -> str:
    return f"{stock / seconds:9.2f} x" if seconds else ""


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The job's flags as a profile would say them; raises BadInput."""
    out: dict[str, Any] = {}
    for key in (*_WHOLE, *_NUMBERS):
        text = getattr(args, key)
        if text is None:
            continue
        try:
            if key in _WHOLE:
                out[key] = int(text)
            else:
                numbers = [float(word) for word in text.split(",")]
                out[key] = numbers if "," in text else numbers[0]
        except ValueError:
            allowed = (
                "a whole number of at least 1"
                if key in _WHOLE
                else "a number, or several with commas between"
            )
            raise BadInput(_flag(key), text, allowed) from None
    return out
