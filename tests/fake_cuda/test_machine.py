"""The command that makes a machine, its traces, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_runs import run_script
from fakes.cuda import building, machine, traces
from patience import PATIENCE

pytestmark = pytest.mark.large

TRACE = """\
# thread 0 python
0\tcudaStreamCreateWithPriority\t{stream}\t-\t
# kernel 00ab _Z3addPf
0\tcudaEventQuery\t-\t-\t
0\tcudaLaunchKernel\t{stream}\t-\t00ab 1x32
# thread 1 pt_nccl_watchdg
1\tcudaStreamSynchronize\t7\t-\t
0\tncclSend\t{stream}\t{size}\tcomm 0 peer 1
0\tmark\t-\t-\titeration
0\tcudaMemcpyAsync\t{stream}\t4\t
"""


def written(folder: Path, **values: int) -> Path:
    folder.mkdir()
    (folder / "rank-0.trace").write_text(TRACE.format(**values))
    return folder


def test_traces_are_compared_by_what_was_called_and_not_by_chance(tmp_path: Path) -> None:
    first = written(tmp_path / "first", stream=3, size=100)
    same = written(tmp_path / "same", stream=5, size=100)
    other = written(tmp_path / "other", stream=3, size=200)
    assert traces.compare(first, same) == []
    (text,) = traces.compare(first, other)
    assert text.startswith("rank-0: thread python, call 2 of 5 and 5, after")
    assert "\n  ncclSend stream 0 100 bytes comm 0 peer 1" in text
    assert "\n  ncclSend stream 0 200 bytes comm 0 peer 1" in text
    assert traces.compare(first, other, ["ncclSend"]) == []
    rank = traces.read(first / "rank-0.trace")
    assert rank.iterations == [{"cudaMemcpyAsync": 1}]
    with pytest.raises(FileNotFoundError, match="no rank"):
        traces.read_all(tmp_path)


def test_a_real_trace_is_read_back(tmp_path: Path) -> None:
    run_script("nccl_script.py", "lazily", ranks=2, trace=tmp_path)
    ranks = traces.read_all(tmp_path)
    assert ranks["rank-0"].counts()["ncclSend"] == 2
    (received,) = {call for call in ranks["rank-1"].threads["python"] if call.name == "ncclRecv"}
    assert str(received) == "ncclRecv stream 0 4000 bytes comm 0 peer 0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--queue", "1", "true"], "unrecognized arguments: --queue"),
        ([], "which program is it to run?"),
        (["no-such-program"], "there is no program 'no-such-program'"),
    ],
)
def test_mistakes_on_the_command_line(words: list[str], message: str) -> None:
    command = [sys.executable, str(machine.__file__), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_an_option_that_is_no_number_is_refused() -> None:
    environment = machine.environment({"kernel-us": "fast"})
    done = subprocess.run(
        [sys.executable, "-c", "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0)"],
        env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "FAKE_CUDA_KERNEL_US=fast has to be a number from 0 on" in done.stderr


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = building.build()
    assert {path.name for path in folder.iterdir()} >= {
        building.DRIVER, building.RUNTIME, building.NVML,
    }  # fmt: skip
    assert not list(folder.glob("*.o"))
    monkeypatch.setattr(building, "_build", lambda *_: pytest.fail("it compiles again"))
    assert building.build() == folder
    assert os.access(folder / building.DRIVER, os.R_OK)
