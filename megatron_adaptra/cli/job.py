"""The job that a command is about: the same flags everywhere, over a profile where one is given."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_adaptra.cli.profile import conditions_of, load_profile
from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.check import SENDS
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.plan import PLANNERS, Plan, make_plan
from megatron_adaptra.units import number, whole

_MS = "milliseconds; one number, or one per {} with commas between"
_WHOLE = {
    "stages": "pipeline stages",
    "microbatches": "microbatches per iteration",
    "chunks": "model chunks per stage, as of Megatron's interleaved schedule (default: 1)",
}
_NUMBERS = {
    "forward_ms": "forward of a microbatch, " + _MS.format("stage"),
    "backward_ms": "its whole backward, in the same form",
    "backward_input_ms": "instead of --backward-ms: its part for the gradient of the input",
    "backward_weight_ms": "instead of --backward-ms: its part for the gradients of the weights",
    "link_delay_ms": "how much longer a message takes than on a healthy link, one per link; "
    "with chunks, the link from the last stage to the first may follow",
    "return_delay_ms": "the same for gradients, which go back (default: as --link-delay-ms)",
    "link_jitter": "standard deviation of a link's delay, as a share of the delay (default: 0)",
    "link_bandwidth": "bytes per second, one per link (default: no limit)",
    "message_bytes": "size of a message, for --link-bandwidth",
    "activation_budget": "microbatches whose activations a stage may hold (default: no limit)",
    "optimizer_ms": "from the last backward to the end of the optimizer step (default: 0)",
}
_SINGLE = ("message_bytes", "optimizer_ms")
_SWITCHES = {
    "split": "let a backward run in two parts, input and weights (default: yes)",
    "recompute": "let single microbatches be recomputed, to save memory (default: no)",
}
_EXAMPLE = "--stages 4 --microbatches 12 --forward-ms 9 --backward-ms 16 --link-delay-ms 0,0,40"


def add_job(parser: argparse.ArgumentParser) -> None:
    """The flags that describe a job, and how to plan for it."""
    parser.usage = "%(prog)s [flags]"
    parser.epilog = f"example: {parser.prog} {_EXAMPLE}"
    group = parser.add_argument_group("the job", "by flags, or by --profile FILE; flags win")
    add = group.add_argument
    for key, text in _WHOLE.items():
        add(_flag(key), dest=key, metavar="N", help=text)
    for key, text in _NUMBERS.items():
        add(_flag(key), dest=key, metavar="X" if key in _SINGLE else "X,...", help=text)
    for key, text in _SWITCHES.items():
        add(_flag(key), dest=key, action=argparse.BooleanOptionalAction, help=text)
    add("--profile", metavar="FILE", help="YAML or JSON file with these settings")
    add("--name", help="the job to take from a file that lists several")
    group = parser.add_argument_group("how it is planned")
    group.add_argument(
        "--sends",
        choices=SENDS,
        default="eager",
        help="eager: a message leaves at once; rendezvous: once its receive is posted, as over "
        "gloo (default: eager)",
    )
    group.add_argument(
        "--time-limit",
        metavar="S",
        help="seconds that making and proving a plan may take, at least as many as that takes "
        "without a search; the plan then depends on the machine's speed "
        "(default: a fixed number of steps, the same plan everywhere)",
    )


def add_policy(parser: argparse.ArgumentParser) -> None:
    """The flag that names a planner."""
    names = ", ".join(sorted(PLANNERS))
    parser.add_argument("--policy", default="adaptive", help=f"{names} (default: adaptive)")


def job_of(args: argparse.Namespace, default: Mapping[str, Any] | None = None) -> Conditions:
    """The job that flags and file describe, over `default`; raises BadInput."""
    flags = _given(args)
    values = {} if args.profile is None else load_profile(args.profile, args.name)
    if args.name and not args.profile:
        raise BadInput("--name", args.name, "it picks a job of --profile FILE, which is missing")
    if any(key.startswith("backward") for key in flags):
        values = {k: v for k, v in values.items() if not k.startswith("backward")}
    return conditions_of(
        {**(default or {}), **values, **flags},
        lambda key: _flag(key) if key in flags or not args.profile else key,
    )


def plan_of(args: argparse.Namespace, conditions: Conditions, policy: str) -> Plan:
    """Plan the job with the named `policy`, as --sends and --time-limit say; raises BadInput."""
    if policy not in PLANNERS:
        raise BadInput("--policy", policy, f"it has to be one of {', '.join(sorted(PLANNERS))}")
    return make_plan(conditions, policy, args.sends, _time_limit(args))


def _time_limit(args: argparse.Namespace) -> float | None:
    if args.time_limit is None:
        return None
    try:
        seconds = number(args.time_limit)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadInput("--time-limit", args.time_limit, "it has to be a number of seconds above 0")
    return seconds


def stock_of(conditions: Conditions, sends: str) -> Plan | None:
    """What Megatron runs by itself; None for a shape that it refuses.

    `sends`: eager or rendezvous, as of --sends.
    """
    try:
        return make_plan(conditions, "interleaved" if conditions.chunks > 1 else "1f1b", sends)
    except BadInput:
        return None


def title_of(args: argparse.Namespace) -> str:
    """What the user calls the job, if anything."""
    return args.name or (Path(args.profile).stem if args.profile else "")


def in_words(conditions: Conditions) -> str:
    """The job in a line, for titles."""
    c = conditions
    text = f"{c.stages} stages × {c.microbatches} microbatches"
    if c.chunks > 1:
        text += f" × {c.chunks} chunks"
    delays = sorted({round(1e3 * link.delay, 3) for link in c.links.values() if link.delay})
    slow = sorted({(min(pair), max(pair)) for pair, link in c.links.items() if link.delay})
    if not slow:
        return text + ", all links healthy"
    which = f"link {slow[0][0]}–{slow[0][1]}" if len(slow) == 1 else f"{len(slow)} links"
    span = f"{delays[0]:g}" if len(delays) == 1 else f"{delays[0]:g} to {delays[-1]:g}"
    return f"{text}, {which} slower by {span} ms"


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The job's flags as a profile would say them; raises BadInput."""
    out = {key: getattr(args, key) for key in _SWITCHES if getattr(args, key) is not None}
    for key in (*_WHOLE, *_NUMBERS):
        text = getattr(args, key)
        if text is None:
            continue
        try:
            if key in _WHOLE:
                out[key] = whole(text)
            else:
                numbers = [number(word) for word in text.split(",")]
                out[key] = numbers if "," in text else numbers[0]
        except ValueError:
            allowed = (
                "it has to be a whole number of at least 1"
                if key in _WHOLE
                else "it has to be a number, or several with commas between"
            )
            raise BadInput(_flag(key), text, allowed) from None
    return out
