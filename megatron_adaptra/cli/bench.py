"""`adaptra bench`: how fast messages and small collectives are, and what a slow transfer costs."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.files import results_folder
from megatron_adaptra.base.units import whole
from megatron_adaptra.bench.launch import from_torchrun, measure
from megatron_adaptra.bench.options import (
    COLLECTIVE,
    HOL,
    LEAST,
    MOST_RANKS,
    P2P,
    SIZES,
    Options,
    check_sizes,
)
from megatron_adaptra.bench.sizes import sizes_between, sizes_of
from megatron_adaptra.cli.bench_report import Finding, html, table_of
from megatron_adaptra.cli.output import finish, note, progress, show_table
from megatron_adaptra.transport.engine.rails import fabric
from megatron_adaptra.view.axis import size

_ABOUT = {
    P2P: (
        "messages between two ranks: shm, tcp and verbs against gloo and a copy of memory",
        "Send messages between two processes, one way and both ways. Transports: the engine's "
        "shared memory and tcp, its RDMA ports if any (verbs; NCCL_IB_HCA names them), gloo's "
        "send and recv, and plain copies of memory. They take turns; medians are "
        "shown. busbw is the bus bandwidth of nccl-tests.",
    ),
    COLLECTIVE: (
        "sums of a few numbers: torch's all-reduce against our all-gathers",
        "Sum a few numbers over all ranks: with torch's all_reduce over gloo, and with the "
        "plugin's all-gather over gloo and over the engine. They take turns; medians are shown. "
        "busbw is the bus bandwidth of nccl-tests.",
    ),
    HOL: (
        "head-of-line blocking: how fast a rank computes while messages cross a slow link",
        "Compute, and send a message after each step over a slow link. queue in: the next step "
        "waits for the message, as in stock Megatron; queue off: it starts while the transport "
        "carries the message. Without --link the link is emulated, 40 ms long.",
    ),
}
_LAST = {P2P: "256M", COLLECTIVE: "64K"}
_HOSTS = """several hosts: start it on each with torchrun, one rank per host, as
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
    -m megatron_adaptra bench {kind} -b 8 -e {most} -f 2"""
_RANKS = "2,4"


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the example, and fills those of the description."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


def add_parser(subparsers: Any) -> None:
    """Add this command to the `subparsers` of argparse."""
    parser = subparsers.add_parser(
        "bench",
        help="measure messages, small collectives, and what a slow transfer costs",
        description="Measure on this machine, or between hosts of a laboratory; p2p and collective "
        "also between real hosts, under torchrun. All take --json and --out.",
        allow_abbrev=False,
    )
    kinds = parser.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    for kind, (brief, description) in _ABOUT.items():
        each = kinds.add_parser(
            kind,
            help=brief,
            description=description,
            epilog="" if kind == HOL else _HOSTS.format(kind=kind, most=_LAST[kind]),
            formatter_class=_Help,
            allow_abbrev=False,
        )
        _add_flags(each, kind)
        each.set_defaults(run=run, kind=kind)


def _add_flags(parser: Any, kind: str) -> None:
    sizes = ", ".join(size(nbytes) for nbytes in SIZES[kind])
    add = parser.add_argument
    add(
        "--sizes",
        metavar="SIZE,...",
        help=f"of a message, such as 8,1K,256M or 4KiB,1MiB (default: {sizes})",
    )
    add("-b", "--minbytes", metavar="SIZE", help="instead of --sizes: from this size on")
    add("-e", "--maxbytes", metavar="SIZE", help="up to this size")
    add("-f", "--stepfactor", metavar="N", help="each size is N times the one before (default: 2)")
    if kind == COLLECTIVE:
        add(
            "--ranks",
            metavar="N,...",
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
    add("--out", metavar="DIR", help=f"write {kind}.json and {kind}.html there")
    add("--json", action="store_true", help="print one JSON object, with a list of rows")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write the report if asked; the exit status.

    Under torchrun, rank 0 does so, and the others only measure.
    """
    sizes = _sizes_of(args)
    if args.kind == P2P and not args.link:
        fabric(os.environ)  # refused here, not by each rank
    asked = [Options(args.kind, sizes, ranks, args.rounds, args.link) for ranks in _counts_of(args)]
    first = (from_torchrun() or (0, 1))[0] == 0
    folder = results_folder(Path(args.out)) if args.out and first else None
    rows: list[dict[str, Any]] = []
    with progress("measuring") if first else nullcontext():
        for options in asked:
            rows += measure(options, note) or []
    if not first:
        return 0
    finding = Finding(args.kind, args.link, rows, asked[0].least_seconds)
    return finish(
        args,
        folder,
        args.kind,
        finding.data(),
        lambda: html(finding),
        lambda: show_table(table_of(finding)),
    )


def _sizes_of(args: argparse.Namespace) -> tuple[int, ...]:
    span = (args.minbytes, args.maxbytes, args.stepfactor)
    if args.sizes is not None:
        if any(word is not None for word in span):
            raise BadInput("--sizes", args.sizes, "it has no place beside -b, -e and -f")
        return sizes_of(args.sizes, "--sizes")
    if span == (None, None, None):
        return SIZES[args.kind]
    sizes = sizes_between(*span, SIZES[args.kind], LEAST[args.kind])
    check_sizes(args.kind, sizes, "-b")
    return sizes


def _counts_of(args: argparse.Namespace) -> list[int]:
    """Numbers of ranks to measure with, one after another."""
    words = getattr(args, "ranks", None)
    if started := from_torchrun():
        _check_torchrun(args, started[1], words)
        return [started[1]]
    if args.kind != COLLECTIVE:
        return [2]
    try:
        return list(dict.fromkeys(whole(word) for word in (words or _RANKS).split(",")))
    except ValueError:
        raise BadInput("--ranks", words, "it has to be whole numbers with commas between") from None


def _check_torchrun(args: argparse.Namespace, started: int, words: str | None) -> None:
    """Raise BadInput for what cannot be asked of the ranks that torchrun has started."""
    if args.kind == HOL:
        raise BadInput(
            "torchrun", HOL, "it has to be p2p or collective; hol starts its two ranks by itself"
        )
    most = 2 if args.kind == P2P else MOST_RANKS
    if not 2 <= started <= most:
        allowed = "it has to be 2 for p2p" if most == 2 else f"it has to be 2 to {most}"
        raise BadInput("torchrun's number of ranks", started, allowed)
    for flag, value in (("--ranks", words), ("--link", args.link)):
        if value:
            raise BadInput(
                flag, value, "it has no place under torchrun, which has started the ranks"
            )
