"""`adaptra bench`: how fast messages and small collectives are, and what a slow transfer costs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_adaptra.bench.options import COLLECTIVE, HOL, P2P, SIZES, Options
from megatron_adaptra.cli.bench_report import Finding, html, png, table_of
from megatron_adaptra.cli.output import note, print_json, progress, say, show_table, write_report
from megatron_adaptra.errors import BadInput
from megatron_adaptra.files import results_folder
from megatron_adaptra.units import parse_bytes, whole
from megatron_adaptra.view.axis import size

_ABOUT = {
    P2P: (
        "messages between two ranks: shm, tcp and verbs against gloo and a copy of memory",
        "Send messages between two processes, one way and both ways: over the engine's shared "
        "memory and tcp, where there are RDMA ports over these (verbs; NCCL_IB_HCA names them), "
        "over gloo's send and recv, and as plain copies of memory. They take turns; medians are "
        "shown.",
    ),
    COLLECTIVE: (
        "sums of a few numbers: torch's all-reduce against our all-gathers",
        "Sum a few numbers over all ranks: with torch's all_reduce over gloo, and with the "
        "plugin's all-gather over gloo and over the engine. They take turns; medians are shown.",
    ),
    HOL: (
        "compute throughput while messages cross a slow link",
        "Compute, and send a message after each step over a slow link: in the compute queue, where "
        "a step waits for the message before it, and off it. Without --link the link is emulated, "
        "40 ms long.",
    ),
}
_RANKS = "2,4"


def add_parser(subparsers: Any) -> None:
    """Add this command to the `subparsers` of argparse."""
    parser = subparsers.add_parser(
        "bench",
        help="measure messages, small collectives, and what a slow transfer costs",
        description="Measure on this machine. p2p, collective and hol take --json and --out.",
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    for kind, (brief, description) in _ABOUT.items():
        each = kinds.add_parser(kind, help=brief, description=description, allow_abbrev=False)
        _add_flags(each, kind)
        each.set_defaults(run=run, kind=kind)


def _add_flags(parser: Any, kind: str) -> None:
    sizes = ", ".join(size(nbytes) for nbytes in SIZES[kind])
    add = parser.add_argument
    add(
        "--sizes",
        metavar="SIZE,...",
        help=f"of a message, such as 4KiB,1MiB (default: {sizes})",
    )
    if kind == COLLECTIVE:
        add(
            "--ranks",
            metavar="N,...",
            default=_RANKS,
            help=f"numbers of ranks, each measured by itself (default: {_RANKS})",
        )
    add(
        "--rounds",
        type=whole,
        default=Options.rounds,
        metavar="N",
        help=f"turns whose median is shown (default: {Options.rounds})",
    )
    add(
        "--link",
        default="",
        metavar="LINK",
        help="between hosts of a laboratory (adaptra netlab) instead of on this machine, such as "
        "40ms,bandwidth=100MB/s; needs root",
    )
    add("--out", metavar="DIR", help=f"write {kind}.json, {kind}.html and {kind}.png there")
    add("--json", action="store_true", help="print one JSON object, with a list of rows")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the report if asked; the exit status."""
    sizes = _sizes_of(args.sizes) if args.sizes else SIZES[args.kind]
    counts = _counts_of(args.ranks) if args.kind == COLLECTIVE else [2]
    asked = [Options(args.kind, sizes, ranks, args.rounds, args.link) for ranks in counts]
    folder = results_folder(Path(args.out)) if args.out else None
    from megatron_adaptra.bench.launch import measure

    rows: list[dict[str, Any]] = []
    with progress("measuring"):
        for options in asked:
            rows += measure(options, note)
    finding = Finding(args.kind, args.link, rows, asked[0].least_seconds)
    data = finding.data()
    files = []
    if folder:
        files = write_report(
            folder, args.kind, data, html(finding), lambda path: png(path, finding)
        )
    if args.json:
        print_json(data)
        return 0
    show_table(table_of(finding))
    for path in files:
        say(str(path))
    return 0


def _sizes_of(text: str) -> tuple[int, ...]:
    allowed = "sizes such as 4KiB,1MiB"
    sizes = [parse_bytes(word, "--sizes", allowed) for word in text.split(",")]
    if any(nbytes % 1 for nbytes in sizes):
        raise BadInput("--sizes", text, "whole numbers of bytes")
    return tuple(dict.fromkeys(map(int, sizes)))


def _counts_of(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(whole(word) for word in text.split(",")))
    except ValueError:
        raise BadInput("--ranks", text, "whole numbers with commas between") from None
