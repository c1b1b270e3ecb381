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


@pytest.mark.parametrize("way", [("megatron_adaptra.run",), ("megatron_adaptra", "run")])
def test_what_is_no_script_is_refused_in_one_line(way):
    done = run(*way, "nowhere.py")
    assert done.returncode == 2
    assert done.stderr == "adaptra: error: SCRIPT 'nowhere.py': there is no such file\n"
    done = run(*way)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    helps = run(*way, "--help").stdout
    assert "usage: torchrun" in helps
    assert "--adaptra-emulate-link RULE" in helps


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--bogus"], "--bogus"),
        pytest.param(["--nnodes", "2:1"], "2", marks=pytest.mark.cold),
        pytest.param(["--nproc-per-node", "abc"], "abc", marks=pytest.mark.cold),
        pytest.param(["--redirects", "9"], "9", marks=pytest.mark.cold),
    ],
)
def test_options_that_torchrun_refuses_end_with_2_and_one_line(words, says, script):
    done = run("megatron_adaptra", "run", *words, script)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("adaptra: error: options of torchrun: ")
    assert says in line


@pytest.mark.parametrize(
    ("way", "start"),
    [
        (("megatron_adaptra.run",), "a rank"),
        (("megatron_adaptra", "run"), "alone"),
    ],
)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--adaptra-engine", "warp"], "invalid choice: 'warp' (choose from"),
        (["--adaptra", "--adaptra-emulate-link", "0-1:soon"], "it has to be a duration such as"),
        (["--adaptra", "--adaptra-emulate-link", "0.1-0.3:4ms"], "no such path"),
        (["--adaptra", "--adaptra-emulate-worker", "1.2:slow"], "a rule such as 1.2:2x@10.."),
        (["--adaptra", "--adaptra-engin", "native"], "did you mean --adaptra-engine?"),
        (["--adaptra-config", "nowhere.yaml"], "--adaptra-config 'nowhere.yaml': it cannot be"),
    ],
    ids=["value", "rule", "path", "worker", "flag", "file"],
)
def test_a_misspelt_flag_ends_a_script_that_never_reads_it(way, start, words, says, script):
    done = run(*way, script, *words, **({"RANK": "0"} if start == "a rank" else {}))
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("adaptra: error: ")
    assert says in line


ENDS = {"falls off": "", "exits": "\nsys.exit()"}


@pytest.mark.parametrize("ends", ["falls off", pytest.param("exits", marks=pytest.mark.cold)])
def test_flags_that_had_no_effect_are_named_at_the_end_once(ends, script, tmp_path):
    script.write_text(SCRIPT + ENDS[ends])
    done = run("megatron_adaptra.run", script, "--adaptra", RANK="0")
    assert (done.returncode, done.stderr) == (
        0,
        "adaptra: --adaptra had no effect: the script has not called Megatron's training program, "
        "which reads it\n",
    )
    done = run("megatron_adaptra.run", script, "--adaptra-policy=1f1b", RANK="0")
    says = "adaptra: --adaptra-policy had no effect: only --adaptra switches the plugin on\n"
    assert done.stderr == says
    assert run("megatron_adaptra.run", script, "--adaptra", RANK="1").stderr == ""
    assert run("megatron_adaptra.run", script, RANK="0").stderr == ""
    if ends == "exits":
        options = ("--standalone", "--nproc-per-node", "2", "--log-dir", tmp_path)
        done = run("megatron_adaptra", "run", *options, script, "--adaptra")
        assert done.stderr.count("had no effect") == 1


def test_a_script_that_switches_the_plugin_on_itself_is_not_contradicted(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("import megatron_adaptra.adapter.entry.activate")
    assert "no effect" not in run("megatron_adaptra.run", path, "--adaptra", RANK="0").stderr


def test_the_status_of_the_script_is_ours(tmp_path):
    path = tmp_path / "ends.py"
    path.write_text("raise SystemExit(7)")
    assert run("megatron_adaptra.run", path).returncode == 7
