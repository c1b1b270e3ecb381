"""Tests that were too late: failed, or inconclusive where others used the machine meanwhile.

A test that compares a duration with a limit, or looks at what was decided from measured time,
raises patience.TooLate. Linux counts what all cores do (/proc/stat) and what each process has
taken. Where processes that are none of the test's own took much of the machine while the test ran,
or since the first one of its file began, which may have trained for all, they explain the
lateness: the test is inconclusive, which is printed and is neither passed nor failed. Elsewhere it
has failed.

    pytest --again    run each of them once more, alone, after all others: that result counts
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from patience import too_late

MUCH = 0.25  # share of what all cores could do
LONGEST = 1800  # seconds of a second run, against hanging
INCONCLUSIVE = "inconclusive"
TICKS, CORES = os.sysconf("SC_CLK_TCK"), os.cpu_count() or 1
# By file, and by test: the time, and what others had taken.
_began: dict[Path | str, tuple[float, float]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--again", action="store_true", help="run once more, alone, what was too late")


def others() -> float:
    """Seconds of cores that processes but this one and its descendants have taken so far."""
    user, nice, system, _, _, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    busy = sum(map(int, (user, nice, system, irq, softirq, steal)))
    parents, taken = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            fields = path.read_text().rpartition(") ")[2].split()
            pid = int(path.parent.name)
            # Its own, and that of children it has waited for.
            parents[pid], taken[pid] = int(fields[1]), sum(map(int, fields[11:15]))

    def ours(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid > 1

    return (busy - sum(ticks for pid, ticks in taken.items() if ours(pid))) / TICKS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _began[item.nodeid] = time.monotonic(), others()
    _began.setdefault(item.path, _began[item.nodeid])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Decided where the exception is: a worker's report takes only simple values along."""
    report = yield
    if call.excinfo is not None and too_late(call.excinfo.value):
        now, taken = time.monotonic(), others()
        begins = _began[item.path], _began[item.nodeid]
        share = max((taken - before) / (now - began) / CORES for began, before in begins)
        report.others = share  # type: ignore[attr-defined]
        report.sections.append(("Cores", f"others took {share:.0%} while it, or its file, ran"))
    return report


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(Judge(config), "judge of lateness")


class Judge:
    """A judge takes inconclusive tests out of those that have failed, at the end of a run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, list[pytest.TestReport]] = {}
        self._outcomes: dict[str, str] = {}

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
            if not all(getattr(report, "others", 0.0) >= MUCH for report in reports):
                continue
            outcome = self._again(name) if self._config.getoption("again") else INCONCLUSIVE
            if outcome != "failed":
                self._outcomes[name] = outcome
                session.testsfailed -= len(reports)
        stats = self._reporter().stats
        for kind in ("failed", "error"):
            kept = [
                r for r in stats.pop(kind, []) if getattr(r, "nodeid", "") not in self._outcomes
            ]
            if kept:
                stats[kind] = kept
        for name, outcome in self._outcomes.items():
            stats.setdefault(outcome, []).append(self._failed[name][0])
        if session.testsfailed == 0:
            session.exitstatus = pytest.ExitCode.OK
        return result

    def _again(self, name: str) -> str:
        """The outcome of a test alone: passed, failed or inconclusive."""
        words = [*self._modes(), "-p", "no:xdist", "-q", name]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *words], cwd=self._config.rootpath,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", check=False, timeout=LONGEST,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "failed"
        if done.returncode != 0:
            self._failed[name][-1].sections.append(("Run once more, alone", done.stdout))
            return "failed"
        return INCONCLUSIVE if f" {INCONCLUSIVE}: " in done.stdout else "passed"

    def _modes(self) -> list[str]:
        return [mode for mode in ("--quick", "--full") if self._config.getoption(mode, False)]

    def pytest_terminal_summary(self) -> None:
        for name, outcome in self._outcomes.items():
            share = max(report.others for report in self._failed[name])  # type: ignore[attr-defined]
            alone = "; passed alone" if outcome == "passed" else ""
            self._reporter().write_line(
                f"adaptra: {INCONCLUSIVE}: {name}: too late, while others took {share:.0%} of all "
                f"cores{alone}"
            )

    def _reporter(self) -> pytest.TerminalReporter:
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        assert isinstance(reporter, pytest.TerminalReporter)
        return reporter
