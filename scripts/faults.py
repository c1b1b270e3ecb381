#!/usr/bin/env python3
"""Does the suite notice? Put one deliberate fault after the other into a copy, and run its tests.

    .venv/bin/python scripts/faults.py --jobs 3    all of tests/release/faults, three at a time
    .venv/bin/python scripts/faults.py late-swap   this one; several may be named
    .venv/bin/python scripts/faults.py --list

A fault is caught if its tests pass without it, and one of them fails with it, twice. Prints a table
of what caught each. Exit status 1 unless all are caught.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "release" / "faults"))

from fitting import Fault, Misfit, changed, load  # noqa: E402

from megatron_adaptra.base.processes import become_subreaper, die_with_parent, started  # noqa: E402

BUILT = "megatron_adaptra/transport/engine/_native*.so"
COMPILED = "build/temp.*/**/*.o"
# setup.py, but a file that has not changed since it was compiled is not compiled again.
BUILD = """
import functools, runpy
from pybind11 import setup_helpers as helpers
changed = helpers.naive_recompile
helpers.ParallelCompile = functools.partial(helpers.ParallelCompile, needs_recompile=changed)
runpy.run_path("setup.py", run_name="__main__")
"""
LIMIT = 1800.0  # seconds of one run of a fault's tests
BUILDING = 600.0  # seconds of building the engine
HANG, TIMES = 60.0, 5.0  # with a fault a test hangs after these, or so many times all without it
GRACE = 5.0  # and of what is left of it, between SIGTERM and SIGKILL
# What several tests share is set up, and looked at, before the first of them.
_SET_UP = ('failed on setup with "AssertionError', 'failed on setup with "assert ')
# What shows that a fault is code that does not run, not that a test has noticed it.
_BROKEN = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "UnboundLocalError")


class NotCaught(Exception):
    """Why a fault does not count as caught."""


@dataclass
class Outcome:
    """The outcome of a fault: the test that has noticed it, or the `problem`."""

    id: str
    wrong: str
    caught_by: str = ""
    seconds: float = 0.0
    problem: str = ""


class Copy:
    """A folder with a package and its tests, where tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of_checkout(cls, folder: Path) -> Copy:
        """The tracked files of this checkout and its engine, if it was built, put into `folder`."""
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        built = (str(p.relative_to(ROOT)) for some in (BUILT, COMPILED) for p in ROOT.glob(some))
        for name in (*filter(None, listed.stdout.split("\0")), *built):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        return cls(folder)

    @contextmanager
    def changed(self, path: Path, text: str) -> Iterator[None]:
        """A file is `text`, and the engine is built anew if that is its code; then as before.

        Raises NotCaught if it cannot be built.
        """
        before = {file: file.read_bytes() for file in (path, *self.folder.glob(BUILT))}
        path.write_text(text)
        try:
            if path.suffix == ".cpp":
                self._build()
            yield
        finally:
            for file, content in before.items():
                file.write_bytes(content)

    def _build(self) -> None:
        words = [sys.executable, "-c", BUILD, "-q", "build_ext", "--inplace", "--force"]
        done = subprocess.run(
            words, cwd=self.folder, capture_output=True, text=True, timeout=BUILDING
        )
        if done.returncode or "error:" in done.stderr:  # the engine is optional: then it goes on
            raise NotCaught(f"the engine cannot be built with it:\n{done.stderr[-2000:]}")

    def pytest(self, words: Sequence[str], hang: float | None) -> subprocess.CompletedProcess[str]:
        """Run pytest here; raises NotCaught when it does not end. Nothing of it is left behind.

        `hang`: seconds after which a test, and what it waits for, is given up; None: the suite's.
        """
        environment = {
            **os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
        if hang is not None:
            command.append(f"--timeout={hang:.0f}")
            environment["ADAPTRA_TEST_PATIENCE"] = f"{hang:.0f}"
        with tempfile.TemporaryFile("w+") as output:
            options = {"cwd": self.folder, "env": environment, "stdout": output}
            try:
                with started(command, GRACE, stderr=subprocess.STDOUT, **options) as process:
                    status = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                raise NotCaught(f"the tests did not end in {LIMIT:g} s") from None
            output.seek(0)
            return subprocess.CompletedProcess(command, status, output.read())


def run_tests(copy: Copy, words: Sequence[str], hang: float | None = None) -> tuple[list[str], int]:
    """Node ids of the tests that fail, and how many pass. Errors around tests do not count.

    Raises NotCaught if there is an error and no failure, or no report.
    """
    report = copy.folder / "report.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-x", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    result = copy.pytest([*options, *words], hang)
    last = "\n".join(result.stdout.splitlines()[-15:])
    if not report.is_file():
        raise NotCaught(f"pytest ended with status {result.returncode} and no report:\n{last}")
    failed, passed, errors = [], 0, []
    for case in ElementTree.parse(report).iter("testcase"):
        found = [e for e in case if e.tag in ("failure", "error")]
        for element in found[:1]:
            message = element.get("message", "")
            noticed = element.tag == "failure" and not message.startswith(_BROKEN)
            if noticed or message.startswith(_SET_UP):
                failed.append(f"{case.get('file')}::{case.get('name')}")
            else:
                errors.append(f"{case.get('name')}: {message}")
        if not found and case.find("skipped") is None:
            passed += 1
    if errors and not failed:
        raise NotCaught(f"an error, not a failing test: {errors[0]}")
    if not failed and result.returncode != 0:
        raise NotCaught(f"pytest ended with status {result.returncode}:\n{last}")
    return failed, passed


class Judge:
    """Looks at faults one by one; what their tests do without a fault is found out once."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._passing: dict[tuple[str, ...], tuple[int, float]] = {}

    def look_at(self, fault: Fault) -> Outcome:
        """Put the fault into the copy, run its tests, take it out again."""
        outcome = Outcome(fault.id, fault.wrong)
        try:
            path, text = changed(fault, self._copy.folder)
            outcome.caught_by = self._caught_by(fault.tests, path, text, outcome)
        except Misfit as misfit:
            outcome.problem = f"does not fit any more: {misfit}"
        except NotCaught as why:
            outcome.problem = f"NOT CAUGHT: {why}"
        return outcome

    def _caught_by(self, tests: tuple[str, ...], path: Path, text: str, outcome: Outcome) -> str:
        """The test that fails with the fault; raises NotCaught."""
        passing, seconds = self._without(tests)
        if not passing:
            raise NotCaught("its tests are all skipped here")
        hang = max(HANG, TIMES * seconds)
        with self._copy.changed(path, text):
            began = time.monotonic()
            failed, _ = run_tests(self._copy, tests, hang)
            outcome.seconds = time.monotonic() - began
            if not failed:
                raise NotCaught("all its tests pass")
            again, _ = run_tests(self._copy, failed[:1], hang)
        if not again:
            raise NotCaught(f"{failed[0]} fails by chance: the second time it passes")
        return failed[0]

    def _without(self, tests: tuple[str, ...]) -> tuple[int, float]:
        """How many of these `tests` pass without a fault, in how many seconds.

        Raises NotCaught if one fails.
        """
        if tests not in self._passing:
            began = time.monotonic()
            failed, passed = run_tests(self._copy, tests)
            if failed:
                raise NotCaught(f"{failed[0]} fails without the fault, too")
            self._passing[tests] = passed, time.monotonic() - began
        return self._passing[tests]


def judged(
    faults: Sequence[Fault], jobs: int, make_copy: Callable[[Path], Copy]
) -> Iterator[Outcome]:
    """What becomes of each fault, in the order in which that is known.

    `jobs`: how many processes look at faults side by side, each in a copy of its own, which
    `make_copy` puts into a folder. Raises RuntimeError if one of them ends early.
    """
    fork = multiprocessing.get_context("fork")
    # Those with the same tests stay together: these pass without a fault, or not, for all of them.
    by_tests: dict[tuple[str, ...], list[Fault]] = {}
    for fault in faults:
        by_tests.setdefault(fault.tests, []).append(fault)
    groups = list(by_tests.values())
    taken = fork.Value("i", 0)
    workers = {}
    with tempfile.TemporaryDirectory(prefix="adaptra-faults-") as folder:
        try:
            for number in range(jobs):
                ours, theirs = fork.Pipe(duplex=False)
                words = Path(folder).resolve() / str(number), make_copy, groups, taken, theirs
                worker = fork.Process(target=_judge, args=words)
                worker.start()
                theirs.close()
                workers[ours] = worker
            while workers:
                for connection in wait(list(workers)):
                    assert isinstance(connection, Connection)
                    try:
                        yield connection.recv()
                    except EOFError:
                        ended = workers.pop(connection)
                        ended.join()
                        if ended.exitcode:
                            raise RuntimeError(
                                f"a process that looks at faults ended with {ended.exitcode}"
                            ) from None
        finally:
            for worker in workers.values():
                worker.terminate()
            for worker in workers.values():
                worker.join()


def _judge(
    folder: Path,
    make_copy: Callable[[Path], Copy],
    groups: Sequence[Sequence[Fault]],
    taken: Synchronized[int],
    outcomes: Connection,
) -> None:
    """Look at groups of faults, of which so many are `taken`, until none is left."""
    die_with_parent(signal.SIGTERM)
    become_subreaper()  # some faults leave processes behind
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that those end, too
    folder.mkdir()
    judge = Judge(make_copy(folder))
    while True:
        with taken.get_lock():
            number, taken.value = taken.value, taken.value + 1
        if number >= len(groups):
            return
        for fault in groups[number]:
            outcomes.send(judge.look_at(fault))


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown."""
    rows = ["| fault | what is wrong | caught by | s |", "|---|---|---|---:|"]
    for o in outcomes:
        test = o.caught_by.partition("[")[0].removeprefix("tests/")
        by = f"`{test}`" if o.caught_by else o.problem.partition("\n")[0]
        rows.append(f"| {o.id} | {o.wrong} | {by} | {o.seconds:.0f} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="faults; without any, all")
    parser.add_argument("--list", action="store_true", help="only list what there is")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of the table")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="look at N faults at a time (default 1)"
    )
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least 1")
    faults = load()
    if unknown := set(options.ids) - {fault.id for fault in faults}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; --list names all")
    faults = [fault for fault in faults if not options.ids or fault.id in options.ids]
    if options.list:
        for fault in faults:
            print(f"{fault.id:28s} {fault.wrong}")
        return 0
    outcomes = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no copy stays behind
    for outcome in judged(faults, options.jobs, Copy.of_checkout):
        outcomes.append(outcome)
        found = outcome.problem or f"caught by {outcome.caught_by}"
        print(f"{outcome.id}: {found} [{outcome.seconds:.0f} s]", file=sys.stderr, flush=True)
    places = {fault.id: place for place, fault in enumerate(faults)}
    outcomes.sort(key=lambda outcome: places[outcome.id])
    print(json.dumps([asdict(o) for o in outcomes], indent=1) if options.json else table(outcomes))
    caught = sum(not o.problem for o in outcomes)
    print(f"{caught} of {len(outcomes)} caught", file=sys.stderr)
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
