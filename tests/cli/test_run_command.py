"""`adaptra run` and `python -m megatron_adaptra.run`: a script runs as it would by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, sys
import beside
late = [name for name in sys.modules if name.split(".")[0] in ("torch", "megatron")]
print(json.dumps([sys.argv[1:], __name__, os.path.basename(__file__), beside.WORD, late]))
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "with space"
    folder.mkdir()
    folder.joinpath("beside.py").write_text("WORD = 'found'\n")
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return path


def run(*words, **environment):
    env = {**os.environ, **environment}
    env.pop("RANK", None) if "RANK" not in environment else None
    command = [sys.executable, "-m", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.parametrize("way", [("megatron_adaptra.run",), ("megatron_adaptra", "run")])
def test_a_rank_runs_the_script(way, script):
    done = run(*way, script, "--a", "1", "--adaptra", RANK="0")
    assert done.returncode == 0, done.stderr
    argv, name, file, word, late = json.loads(done.stdout)
    assert argv == ["--a", "1", "--adaptra"]
    assert (name, file, word) == ("__main__", "train.py", "found")
    assert late == [], "a script that does not want Megatron gets none"


def test_adaptra_run_starts_torchrun(script, tmp_path):
    """Every rank writes a file of its own: what several print at once may run into one line."""
    options = ("--standalone", "--nproc-per-node", "2", "--redirects", "1", "--log-dir", tmp_path)
    done = run("megatron_adaptra", "run", *options, script, "--b")
    assert done.returncode == 0, done.stderr
    said = [
        json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/attempt_0/*/stdout.log"))
    ]
    assert [argv for argv, *_ in said] == [["--b"], ["--b"]]


@pytest.mark.parametrize("way", [("megatron_adaptra.run",), ("megatron_adaptra", "run")])
def test_what_is_no_script_is_refused_in_one_line(way):
    done = run(*way, "nowhere.py")
    assert done.returncode == 2
    assert done.stderr == "adaptra: error: SCRIPT 'nowhere.py': there is no such file\n"
    assert run(*way).returncode == 2
    assert "usage: torchrun" in run(*way, "--help").stdout


def test_the_status_of_the_script_is_ours(tmp_path):
    path = tmp_path / "ends.py"
    path.write_text("raise SystemExit(7)")
    assert run("megatron_adaptra.run", path).returncode == 7
