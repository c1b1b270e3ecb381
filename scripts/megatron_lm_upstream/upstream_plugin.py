"""`pytest -p upstream_plugin`: one rank of a run of Megatron-LM's own unit tests on CPUs.

UPSTREAM_SETTINGS: those of the plugin, as JSON; null leaves Megatron alone.
UPSTREAM_OUTCOMES: a file that gets one JSON line when a test begins and one when it has ended, so
that the file of a killed process shows how far it came.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import stand_ins

stand_ins.install(int(os.environ["WORLD_SIZE"]))

import megatron.core  # noqa: E402

from megatron_adaptra.config import AdaptraConfig  # noqa: E402

# Another Megatron on the path would be tested instead, and nobody would know.
assert Path(megatron.core.__file__).is_relative_to(Path.cwd().resolve()), megatron.core.__file__

from patched import Front  # noqa: E402

SETTINGS = json.loads(os.environ["UPSTREAM_SETTINGS"])
CALLS = Front(AdaptraConfig(**SETTINGS) if SETTINGS else None).calls
OUTCOMES = open(os.environ["UPSTREAM_OUTCOMES"], "w", buffering=1)  # noqa: SIM115
_reports: list[pytest.TestReport] = []


def pytest_runtest_logstart(nodeid: str) -> None:
    _reports.clear()
    CALLS.clear()
    _write(nodeid, "stalled")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _reports.append(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    outcome, why = "passed", ""
    for report in _reports:
        if report.outcome != "passed":
            error = report.failed and report.when != "call"
            outcome, why = ("error" if error else report.outcome), str(report.longrepr)
            break
    _write(nodeid, outcome, why)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, "not collected", str(report.longrepr))


def _write(test: str, outcome: str, why: str = "") -> None:
    line = {"test": test, "outcome": outcome, "why": why[-3000:], "calls": CALLS}
    OUTCOMES.write(json.dumps(line) + "\n")
