"""Why ranks have ended is found in what they have printed, and torchrun's agent leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from processes import outliving

from megatron_adaptra.launch.failures import ended_by, reason

CLOSED = "adaptra: rank 0: receiving F3 from rank 1 failed: its connection closed"


@pytest.mark.parametrize(
    ("lines", "status", "why"),
    [
        ([], 3, "the ranks ended with status 3"),
        ([CLOSED, f"adaptra: {ended_by(0, 'status 1')}"], 1, CLOSED.removeprefix("adaptra: ")),
        ([f"adaptra: {ended_by(0, 'status 1')}"], 1, ended_by(0, "status 1")),
        ([], -9, "torchrun's agent has ended: SIGKILL"),
        (["  File x", "ValueError: boom", "more"], 1, "ValueError: boom"),
        ([CLOSED, f"adaptra: {ended_by(1, 'SIGKILL')}"], 1,
         f"rank 1 has ended: SIGKILL; {CLOSED.removeprefix('adaptra: ')}"),
        ([CLOSED, "adaptra: the disk is full", f"adaptra: {ended_by(1, 'status 1')}"], 1,
         "the disk is full"),
        (["adaptra: no report, training goes on", "torch.OutOfMemoryError: 3 GiB"], 1,
         "torch.OutOfMemoryError: 3 GiB"),
        (["adaptra: a hang is named after 180 s; after it, torch's limit 600 s",
          "adaptra: slow link: rank 1 on a to rank 2 on b",
          "adaptra: replica 1: from iteration 4 on",
          "adaptra: link 0->1 takes 1.4 ms, from the start: the plan in force stays",
          "adaptra: late rank: rank 1 on a comes 30 ms late",
          "adaptra: the disk is full"], 1, "the disk is full"),
        (["RuntimeError: Connection closed by peer", "ValueError: boom"], 1, "ValueError: boom"),
        ([f"adaptra: {ended_by(0, 'RuntimeError: Connection reset by peer')}",
          "adaptra: no such text"], 1, "no such text"),
    ],
)  # fmt: skip
def test_the_reason_is_no_consequence(lines: list[str], status: int, why: str) -> None:
    assert reason(lines, status) == why


ENDS = """
import os, sys, tempfile
open(tempfile.gettempdir() + "/of-a-rank", "w").close()
if os.environ["RANK"] == "1":
    {end}
sys.stdin.read() if os.environ["RANK"] == "1" else __import__("signal").pause()
"""


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("raise ValueError('boom')", "ValueError: boom"),
        ("sys.exit(7)", "status 7"),
    ],
    ids=["killed", "raises", "exits"],
)
@pytest.mark.cold
def test_the_last_line_of_adaptra_run_says_which_rank_has_ended_and_why(
    end: str, why: str, tmp_path: Path
) -> None:
    script, tmp = tmp_path / "ends.py", tmp_path / "tmp"
    script.write_text(ENDS.format(end=end))
    tmp.mkdir()
    words = ["-m", "megatron_adaptra", "run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, "TMPDIR": str(tmp)}, capture_output=True,
        text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"adaptra: rank 1 has ended: {why}"
    assert [path.name for path in tmp.iterdir()] == ["of-a-rank"]  # the training's own


@pytest.mark.cold
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_adaptra_run_with_its_number(
    signum: int, status: int, tmp_path: Path
) -> None:
    script = tmp_path / "waits.py"
    fifo = tmp_path / "up"
    os.mkfifo(fifo)
    script.write_text(f"import signal\nopen({str(fifo)!r}, 'w').close()\nsignal.pause()\n")
    words = ["-m", "megatron_adaptra", "run", "--standalone", str(script)]
    process = subprocess.Popen(
        [sys.executable, *words], stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        fifo.read_text()
        process.send_signal(signum)
        err = process.communicate(timeout=PATIENCE)[1]
    finally:
        process.kill()
    assert process.returncode == status
    name = signal.Signals(signum).name
    assert err.splitlines()[-1] == f"adaptra: interrupted by {name}; all ranks have ended"


@pytest.mark.cold
def test_no_temporary_file_outlives_a_killed_command(tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    code = (
        "import os, signal, sys, tempfile\n"
        "open(os.path.join(tempfile.gettempdir(), 'file'), 'w').close()\n"
        "print(tempfile.gettempdir(), flush=True)\n"
        "signal.pause()\n"
    )
    script = tmp_path / "rank.py"
    script.write_text(code)
    owner = (
        "import os\n"
        "from megatron_adaptra.launch import torchrun\n"
        f"torchrun.script = lambda *_: [{str(script)!r}]\n"
        "torchrun.run_ranks(1, '', [], os.environ, lambda line: print(line, end='', flush=True))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        folder = Path(process.stdout.readline().strip())
        assert folder.parent == tmp
        process.kill()
    assert not outliving(str(folder))  # the agent's command line has it
    assert not folder.exists()
