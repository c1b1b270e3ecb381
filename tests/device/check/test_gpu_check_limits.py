"""Part `equality` where its time runs out: what its cases came to is reported all the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_check import __main__ as program
from gpu_check import equality, trainings
from gpu_check.ranks import Deadline, Failed, run_command
from gpu_check.result import Result
from gpu_check.target import CPU, GPU, Target

VERSIONS = {"name": "", "nccl": "", "torch": "2", "cuda": "", "core": "0", "python": "3"}
ENDLESS = "import threading; print('begun', flush=True); threading.Event().wait()"
CASES = "2 of 2 cases have the bits of stock"


def out_of_time(text: str = ENDLESS, seconds: float = 0.5) -> Callable[..., Any]:
    """A training that its limit ends."""

    def train(target: Target, folder: Path, *_: Any) -> Any:
        folder.mkdir()
        run_command([sys.executable, "-c", text], f"training, {folder.name}",
                    target.environment(), Deadline(seconds), folder / "text.log")  # fmt: skip
        raise AssertionError("it has ended")

    return train


def judged(work: Path, seconds: float) -> Result:
    """Judge a GPU's part, whose ranks find none and run two cases of a rehearsal on the CPU."""
    options = program.parse(["--timeout", f"{seconds:g}", "equality"])
    found = Result("equality")
    program.judge(found, Target(GPU, 1, VERSIONS), work, options)
    return found


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    chosen = equality.chosen("pp2", Target(CPU, 0, VERSIONS))[:2]
    monkeypatch.setattr(equality, "chosen", lambda *_: chosen)
    monkeypatch.setattr(equality, "why_not", lambda _: "")
    monkeypatch.setattr(trainings, "_done", {})


@pytest.mark.cold
@pytest.mark.trains
@pytest.mark.usefixtures("on_the_cpu")
def test_a_training_that_does_not_end_keeps_the_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainings, "_train", out_of_time())
    found = judged(tmp_path, program.MOST)
    assert found.word == "FAIL"
    assert "training, stock: not done after 0.5 s: rank 0" in found.line
    assert found.line.endswith(f"(found before: {CASES})")
    (table,) = found.tables
    assert [row[2:4] for row in table.rows] == [["2", "2"]]
    assert float(table.rows[0][4]) > 0, "seconds"


def test_an_ended_limit_begins_nothing(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="work: not begun"):
        run_command(["false"], "work", {}, Deadline(0.0), tmp_path / "log")
    with pytest.raises(Failed, match="work, rank 0: exit status 1"):
        run_command(["false"], "work", {}, Deadline(60.0), tmp_path / "log")
