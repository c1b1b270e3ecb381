"""`adaptra draw --allreduce`: a collective plan, by its builder or from a file, over ports."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import parse_bytes, parse_seconds, whole
from megatron_adaptra.cli.once import Once, given
from megatron_adaptra.emulate.rules import PORT_SYNTAX, parse_port_rules
from megatron_adaptra.ir.collective import CollectivePlan
from megatron_adaptra.model.all_reduce import all_reduce_bound
from megatron_adaptra.model.all_reduce_forms import ALGORITHMS, AllReduce
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.direct import shares_without
from megatron_adaptra.plan.reductions.figures import Figures
from megatron_adaptra.plan.reductions.read import read_plan
from megatron_adaptra.plan.reductions.ring import ring
from megatron_adaptra.plan.reductions.selector import choose_all_reduce
from megatron_adaptra.plan.reductions.simulated import NATIVE_CUT
from megatron_adaptra.plan.reductions.sized import MESSAGE, sized
from megatron_adaptra.sim.ports import CollectiveRun, Ports, run_on_ports
from megatron_adaptra.view.all_reduce import all_reduce_drawing
from megatron_adaptra.view.axis import number
from megatron_adaptra.view.drawing import Drawing

FLAG = "--allreduce"
_AUTO = "auto"
_RANKS, _MOST_RANKS = 8, 128
_HOST, _BYTES, _DELAY = "all:20MB/s", "3.2MB", "0.3ms"
_OURS = ("ranks", "late_ranks", "late", "bytes", "host", "delay", "message_cost", "pieces")


def add_allreduce(parser: argparse.ArgumentParser) -> None:
    """The flags that describe an all-reduce."""
    group = parser.add_argument_group("an all-reduce, instead of a pipeline's schedule")
    add = partial(group.add_argument, action=Once)
    add(FLAG, metavar="HOW",
        help=f"{', '.join(ALGORITHMS)}; {_AUTO}, the fastest by the simulator, native's ring where "
        "none gains enough; or a file with a collective plan")  # fmt: skip
    add("--ranks", metavar="N", help=f"how many (default: {_RANKS}, or as in the file)")
    add("--late-ranks", metavar="RANK,...", help="which come late (default: none)")
    add("--late", metavar="TIME",
        help="by so much (default: the time of the buffer through a port)")  # fmt: skip
    add("--bytes", metavar="SIZE", help=f"of the buffer (default: {_BYTES})")
    group.add_argument("--host", action="append", metavar="RULE",
        help=f"{PORT_SYNTAX}, without the @ part; the first that fits counts "
        f"(default: {_HOST})")  # fmt: skip
    add("--delay", metavar="TIME", help=f"from a host to another one (default: {_DELAY})")
    add("--message-cost", metavar="TIME",
        help=f"what each message costs its sender (default: {1e3 * MESSAGE:g}ms)")  # fmt: skip
    add("--pieces", metavar="N",
        help="into which a ring cuts a chunk, a chain the buffer, the others the share of an owner "
        "(default: the best, by the model)")  # fmt: skip


def refuse_others(args: argparse.Namespace) -> None:
    """Raise BadInput for flags of a pipeline beside --allreduce, and of an all-reduce without."""
    asked = given(args)
    ours = [name for name in _OURS if name in asked or (name == "host" and args.host)]
    if FLAG.strip("-") not in asked:
        for name in ours:
            raise BadInput(_flag(name), getattr(args, name), f"it needs {FLAG}")
        return
    for name, value in [*asked.items(), ("schedule", args.schedule)]:
        if value is not None and name not in (*_OURS, FLAG.strip("-")):
            raise BadInput(_flag(name), value, f"it is of a pipeline's schedule, {FLAG} of none")


def allreduce_drawing(args: argparse.Namespace) -> tuple[Drawing, CollectivePlan, dict[str, Any]]:
    """The picture, the plan, and what --json prints of them. Raises BadInput."""
    ranks = _whole("--ranks", args.ranks, 2, _MOST_RANKS) if args.ranks is not None else None
    plan = None
    if args.allreduce == _AUTO:
        if args.pieces is not None:
            raise BadInput("--pieces", args.pieces, f"{_AUTO} finds them")
    elif args.allreduce not in ALGORITHMS:
        plan = read_plan(args.allreduce, FLAG, ", ".join((*ALGORITHMS, _AUTO)), ranks)
        if args.pieces is not None:
            raise BadInput("--pieces", args.pieces, f"the plan in {args.allreduce} has its own")
    ranks = ranks or (plan.ranks if plan else _RANKS)
    late_ranks = _ranks(args.late_ranks, ranks)
    nbytes = round(parse_bytes(args.bytes or _BYTES, "--bytes"))
    if not nbytes:
        raise BadInput("--bytes", args.bytes, "at least 1B")
    rates = _rates(args.host or [_HOST], ranks)
    delay = parse_seconds(args.delay or _DELAY, "--delay")
    cost = MESSAGE
    if args.message_cost is not None:
        cost = parse_seconds(args.message_cost, "--message-cost")
    job = AllReduce(ranks, nbytes, max(rates), delay, cost)
    late = 0.0
    if args.late is not None:
        if not late_ranks:
            raise BadInput("--late", args.late, "it needs --late-ranks")
        late = parse_seconds(args.late, "--late")
    elif late_ranks:
        late = job.buffer
    arrivals = [late if rank in late_ranks else 0.0 for rank in range(ranks)]
    ports = Ports.equal(rates, delay, cost)
    if args.allreduce == _AUTO:
        plan = _chosen(nbytes, ports, arrivals)
    elif plan is None:
        job = AllReduce(ranks, nbytes, max(rates), delay, cost, late)
        pieces = _whole("--pieces", args.pieces, 1, 1024) if args.pieces is not None else 0
        plan = sized(args.allreduce, job, late_ranks, pieces)
    run = run_on_ports(plan, nbytes, ports, arrivals)
    bound = all_reduce_bound(nbytes, rates, rates, arrivals, delay)
    words = f"{ranks} ranks, {number(nbytes / 1e6)} MB, ports of {_range(rates)}"
    if late_ranks:
        who = f"rank {late_ranks[0]}" if len(late_ranks) == 1 else f"{len(late_ranks)} ranks"
        words += f", {who} late by {number(1e3 * late)} ms"
    drawing = all_reduce_drawing(plan, run, words, bound)
    return drawing, plan, _data(plan, run, bound)


def _chosen(nbytes: int, ports: Ports, arrivals: Sequence[float]) -> CollectivePlan:
    """The fastest plan, with why in words; native's where none of ours gains enough."""
    ranks = len(arrivals)
    figures = Figures(nbytes, ports, tuple(arrivals), 1.0)
    found = choose_all_reduce(figures, Choice(ranks), 0.0)
    plan = found.choice.plan()
    if plan is None:
        return replace(ring(ranks, NATIVE_CUT), why="native, which nothing clearly beats")
    gain = f"{1e3 * found.seconds:.0f} ms, native {1e3 * found.native:.0f} ms"
    return replace(plan, why=f"{plan.why}; {gain}")


def _data(plan: CollectivePlan, run: CollectiveRun, bound: float) -> dict[str, Any]:
    return {
        "allreduce": plan.name,
        "why": plan.why,
        "ranks": plan.ranks,
        "pieces": plan.pieces,
        "predicted_ms": 1e3 * run.after_arrival,
        "lower_bound_ms": 1e3 * bound,
        "ends_ms": [1e3 * end for end in run.ends],
        "messages": [[t.source, t.target, str(t.op), *t[3:]] for t in run.transfers],
        "plan": plan.text(),
    }


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _whole(flag: str, text: str, least: int, most: int) -> int:
    try:
        value = whole(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise BadInput(flag, text, f"it has to be a whole number from {least} to {most}")
    return value


def _ranks(text: str | None, ranks: int) -> list[int]:
    """The late ones, of so many. Raises BadInput."""
    try:
        late = sorted({whole(word) for word in text.split(",")}) if text is not None else []
        shares_without(ranks, late)
    except ValueError:
        allowed = "it has to be whole numbers with commas between"
        raise BadInput("--late-ranks", text, allowed) from None
    except BadInput as error:
        raise BadInput("--late-ranks", text, error.allowed) from None
    return late


def _rates(rules: list[str], ranks: int) -> list[float]:
    """Bytes per second of each rank's port; the first rule that fits counts."""
    rates = [math.nan] * ranks
    for text in rules:
        for rule in parse_port_rules(text, ranks, "--host"):
            if rule.first or rule.end < math.inf:
                raise BadInput("--host", text, "a rule here has no @ part")
            if math.isnan(rates[rule.host]):
                rates[rule.host] = rule.rate
    for host, rate in enumerate(rates):
        if math.isnan(rate):
            raise BadInput("--host", rules[0], f"no rule has a rate for host {host}")
    return rates


def _range(rates: list[float]) -> str:
    low, high = (number(rate / 1e6) for rate in (min(rates), max(rates)))
    return f"{low} MB/s" if low == high else f"{low} to {high} MB/s"
