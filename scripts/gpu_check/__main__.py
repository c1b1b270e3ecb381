"""What to run first on a machine with GPUs: eight parts, each with a result in one line.

paths     messages from GPU to GPU through the hosts' memory: bits, times, beside compute
pieces    large messages, whole and in pieces whose copies overlap: which size is best
clock     moments of the GPU on the host's clock: error, drift, cost
sync      what waits for the whole GPU while messages are outstanding: nobody waits for the peer
hide      a pipeline of two stages over a slow link: stock and ours, gained and predicted
equality  losses and parameters have the bits of stock Megatron
graphs    the same where layers run as CUDA graphs and messages leave the GPU's queue
memory    peak bytes against budget and prediction, pinned memory, Megatron's own report
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gpu_check import page
from gpu_check.ranks import Deadline, Failed
from gpu_check.result import FAIL, Result
from gpu_check.target import NoTarget, Target, find
from gpu_check.trainings import MESSAGE

from megatron_adaptra.base.processes import become_subreaper, ending_on_sigterm
from megatron_adaptra.cli.output import show_table

PARTS = ("paths", "pieces", "clock", "sync", "hide", "equality", "graphs", "memory")
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
    text = "the same parts without a GPU: over the fake machine of fakes/cuda where torch is "
    add("--rehearse", action="store_true", help=f"{text}its build for CUDA, else on the CPU")
    add("--gpus", type=int, metavar="N", help="use so many (default: all; of the fake machine 2)")
    add("--write", action="store_true", help=f"write the results of these parts into {page.NAME}")
    add("--out", type=Path, metavar="PLACE", help="write them to a folder, or a file of .md or "
        ".json, too: as for the page, and as JSON")  # fmt: skip
    add("--keep", type=Path, metavar="FOLDER", help="what ranks print stays in this new folder")
    add("--timeout", type=float, default=MOST, metavar="S",
        help=f"seconds of each part, at most (default: {MOST:g})")  # fmt: skip
    add("--delay", type=float, default=40.0, metavar="MS",
        help="of the slow link of hide and memory, one way (default: 40)")  # fmt: skip
    add("--hide-message", type=float, default=MESSAGE, metavar="MIB",
        help="of hide and memory, a multiple of the default, by samples of a microbatch (default: "
        f"{MESSAGE:g}; a rehearsal's is 8 KiB, and so many times more)")  # fmt: skip
    add("--layouts", metavar="NAMES", help="of equality: layouts of train/ranks/cases.py, all "
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
    if not options.hide_message >= MESSAGE or options.hide_message % MESSAGE:
        parser.error(f"--hide-message {options.hide_message:g}: a multiple of {MESSAGE:g}")
    if options.keep is not None and options.keep.exists():
        parser.error(f"--keep {options.keep}: it is there already")
    if options.layouts is not None:
        from gpu_check import equality

        options.layouts = options.layouts.split(",")
        for name in options.layouts:
            if name not in equality.LAYOUTS:
                parser.error(f"--layouts {name}: known are {', '.join(equality.LAYOUTS)}")
    return options


def judge(found: Result, target: Target, work: Path, options: Any) -> None:
    """Run a part; an error that ends it early is a result, too, beside what it found before."""
    begin = time.monotonic()
    try:
        part = importlib.import_module(f"gpu_check.{found.part}")
        part.run(found, target, work, Deadline(options.timeout), options)
    except Failed as error:
        found.wrong.append(str(error))
        print(error.log, file=sys.stderr, flush=True)
    except Exception as error:  # the other parts have still to be run
        found.wrong.append(repr(error))
        traceback.print_exc()
    found.ended = True
    found.seconds = time.monotonic() - begin


@contextlib.contextmanager
def _work(keep: Path | None) -> Iterator[Path]:
    """Where ranks write."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="adaptra-gpu-") as work:
            yield Path(work)
    else:
        keep.mkdir(parents=True)
        yield keep.resolve()


def run_parts(target: Target, work: Path, options: Any) -> list[Result]:
    """Each is shown, and written, when it has ended: a later one may be the machine's last."""
    results: list[Result] = []

    def write() -> None:
        if options.write:
            page.write(target.text, options.words, results, PARTS)
        if options.out:
            page.write_apart(options.out, target.text, options.words, results, PARTS)
        sys.stdout.flush()

    for part in options.parts:
        result = Result(part, write=write)
        results.append(result)
        judge(result, target, work, options)
        print(f"{result.line} [{result.seconds:.0f} s]", flush=True)
        for table in result.tables:
            show_table(table)
        write()
    return results


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        target = find(options.rehearse, options.gpus)
    except NoTarget as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return 2
    become_subreaper()
    print(target.text, flush=True)
    try:
        with ending_on_sigterm(), _work(options.keep) as work:
            results = run_parts(target, work, options)
    except OSError as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return 2
    written = [page.NAME] if options.write else []
    written += [str(options.out)] if options.out else []
    if written:
        print(f"written: {', '.join(written)}")
    return 1 if any(result.word == FAIL for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
