"""`adaptra bench allreduce`: all-reduces of which some ranks are late, by plan and by gloo."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_adaptra.base.errors import AdaptraError, BadInput
from megatron_adaptra.base.files import results_folder
from megatron_adaptra.base.units import parse_seconds, whole
from megatron_adaptra.bench.allreduce_options import (
    ALGORITHMS,
    AllReduceOptions,
    algorithms_of,
    goal_of,
)
from megatron_adaptra.bench.allreduce_rate import Rate, at_kept_rate
from megatron_adaptra.bench.launch import from_torchrun, measure
from megatron_adaptra.bench.options import ALLREDUCE, SIZES
from megatron_adaptra.bench.sizes import sizes_of
from megatron_adaptra.cli.bench_allreduce_report import (
    EXPLAINED,
    Finding,
    html,
    off_text,
    png,
    rate_lines,
    tables_of,
)
from megatron_adaptra.cli.output import note, print_json, progress, say, show_table, write_report
from megatron_adaptra.emulate.rules import PORT_SYNTAX
from megatron_adaptra.ir.collective import Goal
from megatron_adaptra.netlab.shaper import choose
from megatron_adaptra.view.axis import size

_HOSTS = ("all:20MB/s",)
_RANKS = "8"
_EXAMPLE = """example: eight hosts of 20 MB/s, host 7 late by 80 and by 160 ms
  adaptra bench allreduce --host all:20MB/s --late 80ms,160ms --late-ranks 7

A ring and the other plans go over the plugin's engine, native is torch's all-reduce over gloo; they
take turns on the same calls. Times count from the arrival of the last rank. In `direct` each piece
has an owner, and late ranks own nothing, also where they are late by 0 ms.
Rates are halved, twice at most, until the ring takes what its own model predicts, up to 5 %.
Hosts with rates need root and the kernel's bridge and tbf; see `adaptra netlab --help`."""


def add_parser(kinds: Any) -> None:
    """Add this command to the subparsers of `adaptra bench`, `kinds`."""
    parser = kinds.add_parser(
        ALLREDUCE,
        help="all-reduces with late ranks: owners' shares, rings and others against gloo",
        description="Sum a buffer over all ranks, of which some are late.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    sizes = ", ".join(size(nbytes) for nbytes in SIZES[ALLREDUCE])
    add("--sizes", metavar="SIZE,...", help=f"of the buffer, such as 3200kB or 8M ({sizes})")
    add("--ranks", default=_RANKS, metavar="N,...",
        help=f"numbers of ranks, each measured by itself (default: {_RANKS})")  # fmt: skip
    add("--late", metavar="TIME,...",
        help="what late ranks come after the others (default: 0 and the time of one buffer "
        "through a port; 20 ms on this machine)")  # fmt: skip
    add("--late-ranks", metavar="RANK,...", help="which these are (default: the one whose port is "
        "slowest, the last of equals)")  # fmt: skip
    add("--host", action="append", default=[], metavar="RULE",
        help=f"{PORT_SYNTAX}, without the @ part; the first that fits counts (default: this "
        f"machine as it is, then {_HOSTS[0]} where that can be)")  # fmt: skip
    add("--link", default="", metavar="LINK",
        help="instead of --host: links between hosts of a laboratory, such as 10ms")  # fmt: skip
    add("--delay", default="0", metavar="TIME",
        help="beside --host: from each host to each other one, such as 10ms")  # fmt: skip
    add("--collective", default=Goal.ALL_REDUCE.value, metavar="NAME",
        help=f"{', '.join(goal.value for goal in Goal)} (default: %(default)s); the last two, of "
        "the distributed optimizer's shards, by ring, direct and native")  # fmt: skip
    add("--algorithms", metavar="NAME,...",
        help=f"of these, in this order (default: {','.join(ALGORITHMS)})")  # fmt: skip
    add("--rounds", type=whole, default=7, metavar="N",
        help="turns whose median is shown (default: 7)")  # fmt: skip
    add("--out", metavar="DIR", help="write allreduce.json, .html and .png there")
    add("--json", action="store_true", help="print one JSON object, with a list of rows")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the report if asked; the exit status. Raises BadInput."""
    if from_torchrun():
        raise BadInput("torchrun", ALLREDUCE, "it starts its ranks by itself, on this machine")
    asked = list(_options(args))
    folder = results_folder(Path(args.out)) if args.out else None
    rows: list[dict[str, Any]] = []
    rates: list[Rate] = []
    with progress("measuring", lines=True) as show:
        for number, options in enumerate(asked, 1):

            def far(now: AllReduceOptions, before: Rate | None = None) -> None:
                part = f"({number} of {len(asked)})"  # noqa: B023
                show(f"{now.ranks} ranks, {now.where} {part}")
                if before:
                    note(f"{off_text(before)}: measured again with {now.where}")

            far(options)
            found, rate = at_kept_rate(options, _rows, far)
            rows += found
            rates += [rate] if options.hosts else []
    finding = Finding(rows, rates, goal_of(args.collective))
    if folder:
        files = write_report(
            folder, ALLREDUCE, finding.data(), html(finding), lambda path: png(path, finding)
        )
    if args.json:
        print_json(finding.data())
        return 0
    for line in (EXPLAINED, *rate_lines(finding)):
        say(line)
    for table in tables_of(finding):
        show_table(table)
    for path in files if folder else ():
        say(str(path))
    return 0


def _options(args: argparse.Namespace) -> Iterator[AllReduceOptions]:
    """What to measure, one number of ranks and one network after another."""
    sizes = sizes_of(args.sizes, "--sizes") if args.sizes is not None else SIZES[ALLREDUCE]
    words = [] if args.late is None else [word.strip() for word in args.late.split(",")]
    late = tuple(0.0 if word == "0" else parse_seconds(word, "--late") for word in words)
    goal = goal_of(args.collective)
    algorithms = args.algorithms or ",".join(algorithms_of(goal))
    delay = 0.0 if args.delay == "0" else parse_seconds(args.delay, "--delay")
    networks: list[tuple[str, ...]] = [tuple(args.host)]
    if not args.host and not args.link and not (why := _no_rates()):
        networks.append(_HOSTS)
    elif not args.host and not args.link:
        note(f"measured on this machine alone, not behind ports with rates: {why}")
    for ranks in _whole_numbers(args.ranks, "--ranks"):
        named = args.late_ranks is not None
        late_ranks = _whole_numbers(args.late_ranks, "--late-ranks") if named else []
        for hosts in networks:
            options = AllReduceOptions(
                ALLREDUCE, sizes, ranks, args.rounds, args.link,
                hosts=hosts, late=late, late_ranks=tuple(late_ranks),
                algorithms=tuple(word.strip() for word in algorithms.split(",")),
                collective=goal.value, delay=delay,
            )  # fmt: skip
            yield options if named else replace(options, late_ranks=(options.slowest,))


def _no_rates() -> str:
    """Why hosts cannot have rates here; empty where they can."""
    if os.geteuid() != 0:
        return "the laboratory needs root"
    try:
        choose("auto", slow=False, ports=True)
    except (AdaptraError, OSError) as error:
        return str(error)
    return ""


def _whole_numbers(text: str, flag: str) -> list[int]:
    try:
        return list(dict.fromkeys(whole(word) for word in text.split(",")))
    except ValueError:
        raise BadInput(flag, text, "it has to be whole numbers with commas between") from None


def _rows(options: AllReduceOptions) -> list[dict[str, Any]]:
    return [{**row, "network": options.where} for row in measure(options, note) or []]
