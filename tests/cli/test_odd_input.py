"""Whatever a user gives: exit status 2 and one line, no traceback, no hang."""

import contextlib
import io
import os
import subprocess
import sys

import pytest
from commands import FLAGS, SMALL, over
from odd_input import PROFILES, SCENARIOS, SCHEDULES, SETTINGS, flag_cases, odd_files

from megatron_adaptra.cli.main import main

TIMES = ("--forward-ms", "1", "--backward-ms", "1")


@pytest.fixture
def wrong(tmp_path, monkeypatch):
    """Of command lines, those that are not refused as they should be, with what they did."""

    def started(*words):
        raise AssertionError(f"something was started: {words}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", started)

    def wrong(cases):
        found = []
        for words in cases:
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    status = main(over(*words))
                except SystemExit as ended:
                    status = ended.code
                except Exception as error:
                    status = repr(error)
            printed = err.getvalue()
            line = printed.startswith("adaptra: error: ") and printed.count("\n") == 1
            if status != 2 or not line or len(printed) > 1100 or out.getvalue():
                found.append(([str(word)[:60] for word in words], status, printed[:200]))
        return found

    return wrong


def written(folder, texts, suffix=""):
    for name, text in texts.items():
        path = folder / f"{name}{suffix}"
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        path.write_bytes(data)
        yield path


def test_words(wrong):
    assert wrong(flag_cases()) == []


def test_profiles(wrong, tmp_path):
    assert wrong(["plan", "--profile", path] for path in written(tmp_path, PROFILES)) == []


def test_schedules(wrong, tmp_path):
    files = written(tmp_path, SCHEDULES)
    assert wrong(["simulate", *TIMES, "--schedule", path] for path in files) == []


def test_settings(wrong, tmp_path):
    files = written(tmp_path, SETTINGS, ".yaml")
    assert wrong(["demo", "--config", path] for path in files) == []


@pytest.mark.parametrize("words", [("netlab", "measure"), ("demo", "--emulate-link")])
def test_scenarios(wrong, tmp_path, words):
    files = written(tmp_path, SCENARIOS, ".yaml")
    assert wrong([*words, path] for path in files) == []


READERS = {
    ".yaml": [("plan", "--profile"), ("demo", "--config"), ("netlab", "measure")],
    ".json": [("compare", "--profile"), ("draw", "--schedule"), ("run",), ("demo", "--text")],
}


def test_what_is_no_file_to_read(wrong, tmp_path):
    paths = list(odd_files(tmp_path))
    cases = [[*words, path] for path in paths for words in READERS[path.suffix]]
    cases.remove(["demo", "--text", tmp_path / "huge.json"])  # of which only the beginning is read
    assert wrong(cases) == []


SHELL = {  # no byte more may be written to a file: like a full disk, and needs no device
    "full": "ulimit -f 0; exec > out",
    "closed": "exec >&-",
    "both closed": "exec >&- 2>&-",
    "both full": "ulimit -f 0; exec > out 2> err",
}


@pytest.mark.parametrize("streams", SHELL)
@pytest.mark.parametrize("words", [("plan", *SMALL), ("draw", *SMALL, "--json"), ("-h",)])
def test_standard_output_that_takes_nothing(tmp_path, streams, words):
    script = f'{SHELL[streams]}; exec "$0" -m megatron_adaptra "$@"'
    command = ["bash", "-c", script, sys.executable, *words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == (0 if "both" in streams else 1)
    assert all(line.startswith("adaptra: error: standard output") for line in lines)


@pytest.mark.long
@pytest.mark.parametrize(
    "words", [("plan",), ("compare",), ("simulate",), ("draw",), ("draw", "--format", "svg")]
)
def test_a_terminal_that_knows_ascii_only(words):
    env = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "megatron_adaptra", *words, *FLAGS, "--policy", "1f1b"]
    if words == ("compare",):
        command = [*command[:-2], "--budgets", "4,inf"]
    done = subprocess.run(command, capture_output=True, env=env, timeout=300)
    assert done.returncode == 0
    assert all(line.startswith(b"adaptra: planning") for line in done.stderr.splitlines())
    assert done.stdout.isascii()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "abc"), ("RANK", "-1"), ("RANK", "7"), ("RANK", ""), ("RANK", "٤"),
        ("WORLD_SIZE", "0"), ("WORLD_SIZE", "1e3"), ("MASTER_PORT", "99999"), ("MASTER_PORT", "x"),
        ("MASTER_PORT", "-5"), ("MASTER_ADDR", ""), ("MASTER_ADDR", "a b"),
        ("MASTER_ADDR", "nowhere.invalid"), ("MASTER_ADDR", "a" * 300), ("MASTER_ADDR", ".."),
    ],
)  # fmt: skip
def test_variables_of_a_rank(wrong, monkeypatch, tmp_path, name, value):
    of_rank = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for key, each in {**of_rank, name: value}.items():
        monkeypatch.setenv(key, each)
    assert wrong([["demo", "--rank-from-env"]]) == []
    (tmp_path / "script.py").write_text("raise SystemExit(7)\n")
    if value not in ("nowhere.invalid", ".."):  # which a cluster may come to know
        assert wrong([["run", "script.py"]]) == []


@pytest.mark.parametrize("text", ["x = (", "\0", "é".encode("latin-1"), "(" * 9000])
def test_a_script_that_is_not_python(wrong, tmp_path, text):
    (tmp_path / "script.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert wrong([["run", "script.py"]]) == []


def test_a_file_of_another_system_is_read(tmp_path):
    """A byte-order mark and other ends of lines change nothing."""
    text = "stages: 2\r\nmicrobatches: 4\r\nforward_ms: 1\r\nbackward_ms: 2\r\n"
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["plan", "--profile", str(path)]) == 0
