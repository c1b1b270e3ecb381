"""What to run first on a machine with GPUs: six parts, each with a verdict in one line.

lanes     messages from GPU to GPU through the hosts' memory: bits, times, beside compute
clock     moments of the GPU on the host's clock: error, drift, cost
sync      what waits for the whole GPU while messages are outstanding: nobody waits for the peer
hide      a pipeline of two stages over a slow link: stock and ours, gained and predicted
equality  losses and parameters have the bits of stock Megatron
memory    peak bytes against budget and prediction, pinned memory, Megatron's own report
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
sys.path[:0] = map(str, (HERE, HERE.parent, TESTS, TESTS / "adapter", HERE.parents[1]))

import page  # noqa: E402
import where  # noqa: E402
from ranks import Deadline, Failed  # noqa: E402
from verdict import FAIL, Verdict  # noqa: E402

from megatron_adaptra.cli.output import show_table  # noqa: E402
from megatron_adaptra.processes import become_subreaper  # noqa: E402

PARTS = ("lanes", "clock", "sync", "hide", "equality", "memory")
MOST = 290.0  # seconds of a part


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line."""
        self.exit(2, f"gpu_check: error: {message}; see --help\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="gpu_check.sh", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Status 0: no part says FAIL. 1: some part does. 2: not run. Ranks get a GPU each "
        "where there are as many, and NCCL; else they share them, and what NCCL does goes by gloo.",
    )  # fmt: skip
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    text = "the same parts without a GPU: over the fake machine of tests/fake_cuda where torch is "
    add("--rehearse", action="store_true", help=f"{text}its build for CUDA, else on the CPU")
    add("--gpus", type=int, metavar="N", help="use so many (default: all; of the fake machine 2)")
    add("--write", action="store_true", help=f"write the results of these parts into {page.NAME}")
    add("--timeout", type=float, default=MOST, metavar="S",
        help=f"seconds of each part, at most (default: {MOST:g})")  # fmt: skip
    add("--delay", type=float, default=40.0, metavar="MS",
        help="of the slow link of hide and memory, one way (default: 40)")  # fmt: skip
    add("--layouts", metavar="NAMES", help="of equality: layouts of tests/adapter/cases.py, all "
        "their cases (default: those of pp2)")  # fmt: skip
    add("--plant", action="store_true", help="plant a fault in every part, which has to find it")
    options = parser.parse_args(argv)
    options.words = sys.argv[1:] if argv is None else list(argv)
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"part {part}: known are {', '.join(PARTS)}")
    options.parts = [part for part in PARTS if part in options.parts or not options.parts]
    if options.write and (options.rehearse or options.plant):
        parser.error("--write: only what was run on a GPU, without planted faults, is written")
    for flag in ("gpus", "timeout", "delay"):
        value = getattr(options, flag)
        if value is not None and not value > 0:
            parser.error(f"--{flag} {value:g}: more than 0")
    if options.layouts is not None:
        import equality

        options.layouts = options.layouts.split(",")
        for name in options.layouts:
            if name not in equality.LAYOUTS:
                parser.error(f"--layouts {name}: known are {', '.join(equality.LAYOUTS)}")
    return options


def judge(part: str, here: where.Where, work: Path, options: Any) -> Verdict:
    """A part's verdict; whatever ends it early is one, too."""
    try:
        found: Verdict = importlib.import_module(part).run(
            here, work, Deadline(options.timeout), options
        )
    except (Failed, OSError, ValueError, KeyError, where.NoPlace) as error:
        found = Verdict(part, wrong=[str(error) if isinstance(error, Failed) else repr(error)])
        if isinstance(error, Failed):
            print(error.log, file=sys.stderr)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        here = where.find(options.rehearse, options.gpus)
    except where.NoPlace as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return 2
    become_subreaper()
    print(here.text, flush=True)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="adaptra-gpu-") as work:
        for part in options.parts:
            verdict = judge(part, here, Path(work), options)
            verdicts.append(verdict)
            print(verdict.line, flush=True)
    for verdict in verdicts:
        for table in verdict.tables:
            print()
            show_table(table)
    if options.write:
        page.write(here.text, options.words, verdicts, PARTS)
        print(f"\nwritten: {page.NAME}")
    return 1 if any(verdict.word == FAIL for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
