"""A rank that dies, a demo that is killed, and input that is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import living, outliving
from running import ENVIRONMENT, SMALL, demo

from megatron_adaptra.base.files import MARKER
from megatron_adaptra.base.processes import die_with_parent
from megatron_adaptra.demo.launch import prepare
from megatron_adaptra.demo.options import DemoOptions


def ranks(out: Path) -> dict[int, int]:
    """Rank -> process of the demo that writes to `out`."""
    return {int(rank): pid for pid, rank in living(str(out)).items() if rank}


@contextlib.contextmanager
def training(out: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A small demo of two stages that has trained for some iterations."""
    command = [sys.executable, "-m", "megatron_adaptra", "demo", "--out", str(out), *SMALL]
    process = subprocess.Popen(
        [*command, "--stages", "2", "--iterations", "500", *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
        preexec_fn=die_with_parent,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "iteration 8" in line:
                break
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.cold
def test_a_killed_rank_is_named_with_the_op_and_all_end(tmp_path: Path) -> None:
    with training(tmp_path) as process:
        os.kill(ranks(tmp_path)[1], signal.SIGKILL)
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 1
    assert "died: rank 1" in output
    assert re.search(r"waited [\d.]+ s for (SF|SB|F|B)\d+ \w+ stage \d \(rank \d\)", output) or (
        re.search(r"was in (iteration|the barrier before iteration) \d+ of (stock|adaptra)", output)
    )
    assert outliving(str(tmp_path)) == {}


@pytest.mark.cold
def test_interrupting_the_demo_reports_what_it_has(tmp_path: Path) -> None:
    with training(tmp_path, "--slow", "0-1:40ms@4..333") as process:
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=300)[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert "Interrupted by SIGTERM after" in output
    done = json.loads((tmp_path / "summary.json").read_text())
    assert done["interrupted"] == "SIGTERM"
    ran = len(done["arms"]["stock"]["iteration_ms"])
    assert 8 <= ran < 500
    assert done["losses_identical"]
    assert done["parameters_identical"]
    assert set(done["arms"]["adaptra"]["phases"]) == {"healthy", "slow"}
    last, replans = ran - 1, done["replans"]
    if replans and replans[-1]["iteration"] == last:  # a plan without one whole iteration
        note = f"came into force in iteration {last} and ran no whole iteration"
        assert any(note in one for one in done["notes"])
        last -= 1
    assert done["compared"]["last_iteration"] == last
    assert f"after {ran} of 500 iterations" in (tmp_path / "report.html").read_text()
    assert outliving(str(tmp_path)) == {}
    assert list(tmp_path.glob("data*")) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--slow", "3-4:40ms"), ("--slow", "3-4", "0-1, 1-2, 2-3")),
        (("--slow", "2-3:40"), ("--slow", "40", "40ms")),
        (("--num-layers", "5"), ("--num-layers", "5", "multiple of the 4 stages")),
        (("--slow", "2-3:40ms,jiter=1ms"), ("jiter", "a rule such as")),
        (("--text", "/no/such/text"), ("--text", "/no/such/text", "No such file")),
    ],
)
def test_bad_input_ends_with_2_and_says_what_is_allowed(
    options: tuple[str, ...], words: tuple[str, ...], tmp_path: Path
) -> None:
    done = demo(tmp_path, *options)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last
    assert "Traceback" not in done.stderr


def test_a_folder_of_the_users_is_left_as_it_is(tmp_path: Path) -> None:
    mine = {"data": "my text", "summary.json": "{}", "ranks.log": "mine"}
    (tmp_path / "data").mkdir()
    for name, text in mine.items():
        (tmp_path / name / "text" if name == "data" else tmp_path / name).write_text(text)
    done = demo(tmp_path, "--text", str(tmp_path / "data"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--out" in line
    assert "it holds files that are not adaptra's" in line
    found = {path.relative_to(tmp_path).parts[0]: path for path in tmp_path.rglob("*")}
    assert {name: path.read_text() for name, path in found.items()} == mine


def test_a_folder_of_an_earlier_demo_loses_its_results_only(tmp_path: Path) -> None:
    options = DemoOptions(out=str(tmp_path / "out"))
    out = prepare(options)
    for name in ("summary.json", "data", "my notes"):
        (out / name).write_text("")
    assert {path.name for path in prepare(options).iterdir()} == {MARKER, "data", "my notes"}
