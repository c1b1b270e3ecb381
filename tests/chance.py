"""Tests that failed by chance: found in each run of pytest, judged at the end of scripts/test.sh.

    pytest --chance=FILE              run once more what was too late; FILE gets what then passed
    python tests/chance.py FILE       judge a run by its FILE: exit status 1 if there were too many
    python tests/chance.py mended NAME    its cause is mended: forget that NAME has failed

Run once more, alone, is a test that is marked for what it needs of its machine and has failed with
nothing but patience.TooLate. Wrong results, crashes, leftovers and hangs raise something else.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Generator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from patience import too_late

NEEDS = ("vm", "timing", "crowd")  # marks of tests that a busy machine may make too late
MOST = 3  # of one run
LONGEST = 3600  # seconds of a second run, against hanging
RUNS, TWICE = 10, 2  # so often in so many runs it is no chance
FAILED_BY_CHANCE = "failed by chance"


# --- in pytest -----------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--chance", type=Path, metavar="FILE",
        help="run tests once more that were too late; names of those that pass are added to FILE",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    in_worker = hasattr(config, "workerinput")
    if config.getoption("chance") and not in_worker and not config.option.collectonly:
        config.pluginmanager.register(OnceMore(config), "once more")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Decided where the exception is: a worker's report takes only simple values along."""
    report = yield
    late = call.excinfo is not None and too_late(call.excinfo.value)
    report.too_late = late and any(item.get_closest_marker(mark) for mark in NEEDS)
    return report


class OnceMore:
    """Runs what was too late once more, after all else and with all workers gone."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, list[pytest.TestReport]] = {}
        self._passed: dict[str, str] = {}  # name -> what the second run has printed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(wrapper=True, trylast=True)  # after xdist's own, before the summary
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        result = yield
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            return result
        for name, reports in self._failed.items():
            # A worker that has crashed leaves a report that no test has made.
            if not all(getattr(report, "too_late", False) for report in reports):
                continue
            passed, output = self._run(name)
            if passed:
                self._passed[name] = output
                session.testsfailed -= len(reports)
            else:
                reports[-1].sections.append(("Run once more, alone", output))
        self._group_apart()
        with self._config.getoption("chance").open("a") as file:
            file.writelines(f"{name}\n" for name in self._passed)
        if session.testsfailed == 0:
            session.exitstatus = pytest.ExitCode.OK
        return result

    def _run(self, name: str) -> tuple[bool, str]:
        """Whether the test passes alone, and what its run has printed."""
        full = ["--full"] if self._config.getoption("--full", False) else []
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "report.xml"
            options = ["-rfEP", f"--junitxml={found}", *full, name]
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "pytest", *options], cwd=self._config.rootpath,
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    text=True, errors="replace", check=False, timeout=LONGEST,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return False, f"the second run had not ended after {LONGEST} s"
            cases = list(ElementTree.parse(found).iter("testcase")) if found.is_file() else []
        skipped = any(case.find("skipped") is not None for case in cases)
        return done.returncode == 0 and len(cases) == 1 and not skipped, done.stdout

    def _group_apart(self) -> None:
        """A group of their own among the results, instead of failures or errors."""
        stats = self._reporter().stats
        for kind in ("failed", "error"):
            reports = stats.pop(kind, [])
            if kept := [r for r in reports if getattr(r, "nodeid", "") not in self._passed]:
                stats[kind] = kept
        if self._passed:
            stats[FAILED_BY_CHANCE] = [self._failed[name][0] for name in self._passed]

    def pytest_terminal_summary(self) -> None:
        out = self._reporter()
        out.write_sep("=", f"{len(self._passed)} {FAILED_BY_CHANCE}")
        for name, second in self._passed.items():
            out.write_line(f"{FAILED_BY_CHANCE}: {name}")
            for report in self._failed[name]:
                parts = [report.longreprtext, *map("\n".join, report.sections)]
                out.write_line(_indented(f"the first run, {report.when}:", "\n".join(parts)))
            out.write_line(_indented("the second run, alone:", second))

    def _reporter(self) -> pytest.TerminalReporter:
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        assert isinstance(reporter, pytest.TerminalReporter)
        return reporter


def _indented(title: str, text: str) -> str:
    """So that no line of it is taken for one of the run that shows it."""
    return f"  {title}\n{textwrap.indent(text, '    ')}"


# --- in scripts/test.sh --------------------------------------------------------------------------


def cache() -> Path:
    """The folder of what outlives a checkout."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "adaptra-tests"


class History:
    """What failed by chance in the last ten runs on this machine: a list of names for each.

    Suites may end at the same moment. A file that cannot be read counts as empty.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "chance.json"

    @contextlib.contextmanager
    def runs(self) -> Iterator[list[dict[str, Any]]]:
        """All runs, the newest last, for the caller to change. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            runs = self._read()
            yield runs
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(runs[-RUNS:], indent=1) + "\n")
            new.replace(self.path)

    def _read(self) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return [
                {"ended": str(run["ended"]), "names": [str(name) for name in run["names"]]}
                for run in json.loads(self.path.read_text())
            ]
        return []


def judge(names: list[str], history: History) -> int:
    """Note a run, print the result: 1 if too many tests failed by chance, or one too often.

    A name counts once in each run, which may have it on both lines: a busy hour is one chance. What
    has not failed in this run is no failure: its cause may be mended in this commit.

    Without a memory, as in a clean container, only the run itself counts.
    """
    kept = f"the last {RUNS} runs are in {history.path}"
    names = sorted(set(names))
    runs = [{"names": names}]
    try:
        with history.runs() as known:
            known.append({"ended": f"{datetime.now():%F %T}", "names": names})
            runs = known[-RUNS:]
    except OSError as error:
        kept = f"this run could not be noted: {error}"
    print(f"adaptra: {len(names)} {FAILED_BY_CHANCE}; {kept}")
    for name in names:
        print(f"  {FAILED_BY_CHANCE}: {name}")
    if too_many := len(names) > MOST:
        print(f"adaptra: more than {MOST} {FAILED_BY_CHANCE}, which is a failure")
    counts = Counter(name for run in runs for name in set(run["names"]))
    often = [name for name in names if counts[name] >= TWICE]
    for name in often:
        print(f"adaptra: {name} {FAILED_BY_CHANCE} {counts[name]} times in {len(runs)} runs")
    if often:
        print("adaptra: mend the cause, then: python tests/chance.py mended NAME")
    return int(too_many or bool(often))


def forget(name: str, history: History) -> int:
    """Take a name out of all runs: 1 if it is in none."""
    with history.runs() as runs:
        known = [run for run in runs if name in run["names"]]
        for run in known:
            run["names"] = [other for other in run["names"] if other != name]
    print(f"adaptra: {name} was in {len(known)} runs of {history.path}")
    return int(not known)


def main(words: list[str]) -> int:
    if len(words) == 2 and words[0] == "mended":
        return forget(words[1], History(cache()))
    if len(words) == 1 and Path(words[0]).is_file():
        return judge(Path(words[0]).read_text().splitlines(), History(cache()))
    print("usage: python tests/chance.py FILE, or: python tests/chance.py mended NAME")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
