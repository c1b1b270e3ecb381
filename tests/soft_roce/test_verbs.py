"""The engine over real ibverbs: each test is a case of verbs_cases.py in one virtual machine."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.soft_roce.vm import boot, prepared
from soft_roce.verbs_cases import CASES

from megatron_adaptra.transport.engine.bindings import missing

ROOT = Path(__file__).parents[2]
GUEST = "tests/fakes/soft_roce/guest.py"
SECONDS = 1500  # for all cases; nothing is measured with it
# What measures takes a third of the machine's time: --full alone runs it.
MEASURES = ("adaptra_bench_has_rows_of_verbs", "speed_beside_perftest")
ALL = [pytest.param(name, marks=[pytest.mark.large] if name in MEASURES else []) for name in CASES]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of all cases that are run, by name; and what the machine has printed."""
    if missing():
        pytest.skip(f"no engine: {missing()}")
    made, why = prepared()
    if made is None:
        pytest.skip(why)
    chosen = [
        i.callspec.params["name"] for i in request.session.items if i.module is request.module
    ]
    names = [name for name in CASES if name in chosen]
    exchange = tmp_path_factory.mktemp("exchange")
    full = ["--full"] if request.config.getoption("--full") else []
    command = [
        sys.executable,
        "tests/fakes/soft_roce/guest.py",
        *full,
        "/exchange/outcomes",
        *names,
    ]
    console = boot(made, exchange, f"""
        set -e
        cd {shlex.quote(str(ROOT))}
        tests/fakes/soft_roce/rails.sh
        export PYTHONPATH=$PWD:$PWD/tests PYTHONDONTWRITEBYTECODE=1
        {shlex.join(command)}
    """, SECONDS)  # fmt: skip
    lines = (exchange / "outcomes").read_text().splitlines()
    return {line["name"]: line for line in map(json.loads, lines)}, console


@pytest.mark.vm
@pytest.mark.timeout(SECONDS + 1000)
@pytest.mark.parametrize("name", ALL)
def test_verbs(name: str, outcomes: Any) -> None:
    by_name, console = outcomes
    outcome = by_name[name]
    if "skipped" in outcome:
        pytest.skip(f"in the virtual machine: {outcome['skipped']}")
    print(f"{name}: {outcome['seconds']} s in the machine\n{outcome['text']}")
    assert outcome["passed"], console
