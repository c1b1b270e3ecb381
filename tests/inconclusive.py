"""Tests that were too late: failed, or inconclusive where the machine was short of cores meanwhile.

A test that compares a duration with a limit, or looks at what was decided from measured time,
raises patience.TooLate. Linux counts for how long some task has waited for a core
(/proc/pressure/cpu, Documentation/accounting/psi.rst). Where that was most of the time in which the
test's file has run, the machine explains the lateness: the test is inconclusive, which is printed
and is neither passed nor failed. Elsewhere, and where nothing counts, it has failed.

    pytest --again    run each of them once more, alone, after all others: that result counts
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from patience import too_late

STARVED = 0.8  # share of the time in which some task has waited for a core
PRESSURE = Path("/proc/pressure/cpu")
LONGEST = 1800  # seconds of a second run, against hanging
INCONCLUSIVE = "inconclusive"
SHORT = 0.1  # seconds in which that share says little
_BEGAN = pytest.StashKey[tuple[float, float]]()
_began: dict[Path, tuple[float, float]] = {}  # by file: the time, and what had been waited


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--again", action="store_true", help="run once more, alone, what was too late")


def waited() -> float:
    """Seconds for which some task has waited for a core, since the machine has started."""
    try:
        some = PRESSURE.read_text().splitlines()[0]
    except OSError:
        return 0.0
    return int(some.rpartition("total=")[2]) / 1e6


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    now = time.monotonic(), waited()
    _began.setdefault(item.path, now)
    item.stash[_BEGAN] = now
    return (yield)


def starved(item: pytest.Item) -> float:
    """The share of the test's time in which some task has waited for a core, or, if that was more,
    of the time since its file's first test began: what tests share was trained then."""
    (began, before), (first, at_first) = item.stash[_BEGAN], _began[item.path]
    now, total = time.monotonic(), waited()
    shares = [(total - at_first) / (now - first)]
    if now - began > SHORT:
        shares.append((total - before) / (now - began))
    return max(shares)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Decided where the exception is: a worker's report takes only simple values along."""
    report = yield
    if call.excinfo is not None and too_late(call.excinfo.value):
        share = starved(item)
        report.starved = share  # type: ignore[attr-defined]
        report.sections.append(("Cores", f"some task has waited for one {share:.0%} of the time"))
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
            if not all(getattr(report, "starved", 0.0) >= STARVED for report in reports):
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
        """What it is alone: passed, failed or inconclusive."""
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
            share = max(report.starved for report in self._failed[name])  # type: ignore[attr-defined]
            alone = "; passed alone" if outcome == "passed" else ""
            self._reporter().write_line(
                f"adaptra: {INCONCLUSIVE}: {name}: too late, while some task waited for a core "
                f"{share:.0%} of the time{alone}"
            )

    def _reporter(self) -> pytest.TerminalReporter:
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        assert isinstance(reporter, pytest.TerminalReporter)
        return reporter
