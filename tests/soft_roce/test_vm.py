"""The virtual machine of these tests: it leaves nothing behind, and is not waited for in vain."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from fakes.soft_roce.vm import FrozenError, boot, prepared, run_cases
from patience import PATIENCE
from processes import living, outliving
from transport.ranks import until

pytestmark = pytest.mark.large

BOOTS = """
import sys
from pathlib import Path
from fakes.soft_roce.vm import boot
boot(Path(sys.argv[1]), Path(sys.argv[2]), "sleep 1000", 1000)
"""


@pytest.fixture
def made() -> Path:
    """The folder with the machine's kernel."""
    found, why = prepared()
    if found is None:
        pytest.skip(why)
    return found


@pytest.mark.vm
def test_a_run_that_is_killed_leaves_no_machine(made: Path, tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", BOOTS, str(made), str(tmp_path)], cwd=Path(__file__).parents[1]
    )
    until(lambda: (tmp_path / "console.txt").exists(), "the machine runs")
    assert len(living(f"path={tmp_path},")) == 1
    run.kill()
    run.wait(PATIENCE)
    assert not outliving(f"path={tmp_path},")


@pytest.mark.vm
def test_a_machine_that_stands_still_is_not_waited_for(made: Path, tmp_path: Path) -> None:
    def freeze() -> None:
        until(lambda: (tmp_path / "console.txt").exists(), "the machine runs")
        (pid,) = living(f"path={tmp_path},")
        os.kill(pid, signal.SIGSTOP)

    thread = threading.Thread(target=freeze)
    thread.start()
    with pytest.raises(FrozenError, match=r"before .*, no life for 5 s: .* qemu itself does not"):
        boot(made, tmp_path, "sleep 1000", 1000, frozen=5)
    thread.join(PATIENCE)
    assert not outliving(f"path={tmp_path},")


BEATS = """
pulse() { cat /exchange/pulse; }
for n in 1 2 3; do
  before=$(pulse)
  until [ -n "$(pulse)" ] && [ "$(pulse)" != "$before" ]; do sleep 0.1; done
done
"""


@pytest.mark.vm
def test_a_machine_that_works_shows_it(made: Path, tmp_path: Path) -> None:
    boot(made, tmp_path, BEATS, 1000)


class Machines:
    """Stand for `boot`: each does a number of cases, and then what it is asked to."""

    def __init__(self, *ends: tuple[int, Exception | None]) -> None:
        self._ends = list(ends)
        self.asked: list[list[str]] = []

    def __call__(self, made: Path, exchange: Path, script: str, seconds: float) -> str:
        names = script.split("/exchange/outcomes")[1].split()
        self.asked.append(names)
        done, error = self._ends.pop(0)
        outcomes = [{"name": name, "passed": True, "text": "", "seconds": 1} for name in names]
        if done >= 0:
            lines = [json.dumps(outcome) + "\n" for outcome in outcomes[:done]]
            (exchange / "outcomes").write_text("".join(lines))
        if error is not None:
            raise error
        return "the console"


FROZEN, HUNG = FrozenError("frozen"), RuntimeError("hung")


def _run(exchange: Path, *ends: tuple[int, Exception | None]) -> tuple[Machines, Any]:
    machines = Machines(*ends)
    return machines, run_cases(exchange, exchange, ["a", "b", "c"], False, 100, boot=machines)


def _again(ends: list[Any]) -> AbstractContextManager[Any]:
    """The warning of a new machine, of all that end but the last."""
    if len(ends) == 1:
        return contextlib.nullcontext()
    return pytest.warns(UserWarning, match="started again for")


def test_a_new_machine_goes_on_where_one_froze(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="again for b: frozen"):
        machines, found = _run(tmp_path, (1, FROZEN), (2, None))
    assert machines.asked == [["a", "b", "c"], ["b", "c"]]
    assert [found[name]["passed"] for name in "abc"] == [True, True, True]


@pytest.mark.parametrize("ends", [[(1, FROZEN), (0, FROZEN)], [(1, HUNG)]])
def test_a_case_that_freezes_it_twice_or_hangs_has_failed(ends: Any, tmp_path: Path) -> None:
    with _again(ends):
        machines, found = _run(tmp_path, *ends, (1, None))
    assert machines.asked[-1] == ["c"]
    assert [found[name]["passed"] for name in "abc"] == [True, False, True]
    assert str(ends[-1][1]) in found["b"]["text"]


@pytest.mark.parametrize("ends", [[(-1, FROZEN), (-1, FROZEN)], [(-1, HUNG)]])
def test_a_machine_that_runs_no_case_is_an_error(ends: Any, tmp_path: Path) -> None:
    with _again(ends):
        with pytest.raises(RuntimeError, match=str(ends[-1][1])):
            _run(tmp_path, *ends)
