"""`adaptra doctor`: what this machine lacks for a training, and the command that mends it."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from megatron_adaptra.cli.output import print_json, progress, say
from megatron_adaptra.doctor.examine import examine
from megatron_adaptra.doctor.finding import Finding, Status

_WIDTH = 4  # columns of a status


def add_parser(subparsers: Any) -> None:
    """Add this command to the `subparsers` of argparse."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine lacks for a training, and what mends it",
        description="Look at this machine: its clock, limits and network; torch, Megatron and what "
        "the plugin patches of it; the engine, RDMA ports and GPUs. Nothing is changed. None of it "
        "has to be there. The exit status is 1 if anything fails.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--strict", action="store_true", help="the exit status is 1 for a WARN, too"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings; the exit status."""
    with progress("looking around"):
        parts = list(examine())
    findings = [finding for part in parts for finding in part.findings]
    counts = Counter(finding.status for finding in findings)
    bad = counts[Status.FAIL] + (counts[Status.WARN] if args.strict else 0)
    if args.json:
        rows = {part.name: [finding.to_json() for finding in part.findings] for part in parts}
        print_json({"ok": not bad, "parts": rows})
        return int(bool(bad))
    for part in parts:
        say(f"{part.name}")
        width = max((len(finding.what) for finding in part.findings), default=0)
        for finding in part.findings:
            say(_line(finding, width))
    total = ", ".join(f"{counts[status]} {status.value}" for status in Status)
    say(total)
    return int(bool(bad))


def _line(finding: Finding, width: int) -> str:
    line = f"  {finding.status.value:{_WIDTH}}  {finding.what:{width}}  {finding.says}"
    return line + (f"\n{'':{_WIDTH + width + 6}}-> {finding.remedy}" if finding.remedy else "")
