"""Whatever a user gives: exit status 2 and one line, no traceback, no hang.

What files hold is changed at random in tests/unit/test_fuzz.py.
"""

import contextlib
import io
import json
import os
import shlex
import socket
import subprocess
import sys

import pytest
from commands import FLAGS, JOB, SMALL, over

from megatron_adaptra.cli.main import main

JOBS = ("plan", "compare", "simulate", "draw")
LONG = "9" * 6000
# What is no number, of a flag that takes one; and what no number of a job is.
WORDS = [
    "", " ", "x", "-", "--", "1,,2", ",", "1_000", "٤", "0x10", "1e", "٣.٥", "½", "１２",
    "nan", "-nan", "-inf", "-1", "-1e-300", "1e400", LONG, "1e" + LONG, "1\n2", "1\r", "\x1b[31m",
    "\udcff", "1\0", "[1]", "{}", "null", "true", "'1'", "1;2", "1 2", "$HOME", "%s", "1/2",
]  # fmt: skip
NUMBERS = [
    "--forward-ms", "--backward-ms", "--set=link_delay_ms", "--set=link_jitter",
    "--set=link_bandwidth", "--set=port_bandwidth", "--message-bytes", "--activation-budget",
    "--set=optimizer_ms", "--set=return_delay_ms",
]  # fmt: skip
# After a command and a flag, each of some words; LONG stands for the long one.
JOB_WORDS = {
    "plan --stages": "0 -0 1.0 1e3 inf 100000000 999999999999999999999 +-1",
    "plan --microbatches": "0 1.0 inf 100000000 999999999999999999999",
    "plan --chunks": "0 1.0 100000000",
    "plan --policy": "'' x LONG \udcff ../x 1F1B",
    "plan --sends": "'' x eager,rendezvous",
    "plan --time-limit": "0 -1 nan inf 1e400 x '' ٤",
    "plan --profile": "'' /nowhere /dev/zero /dev/tty0 /proc/self/mem LONG \udcff a\0b . "
    "/dev/stdin /proc/self/pagemap",
    "plan --name": "x '' \0",
    "plan --replicas": "'' 0 -1 1e9 LONG 2.0 ٢",
    "plan --replicas 2 --slow": ": :: 1.2: 0.1:1e400x 0.1:LONGx LONG:2x x:dead LONG:dead "
    "1.LONG:dead '1.2\n:dead' \udcff -1.0:dead 0x1.0:dead 1.1--0.2:1ms 1.1-0.2:LONG 1.1-0.2:1ms+ "
    ">:1ms 0.1:inf 0.1:nanB/s 0.1:LONGB/s 0.1:1e400B/s 1: 0:1e400x 0:LONGx 0.1:2 2-3:1ms@5..1 "
    "2-3:1ms,jitter 2-3:1ms,x=1 2-3:1ms,loss=1% /nowhere.yaml all:x 0:1ms",
    "plan --set": "'' x stages =1 stages= split= split=2 slow=x \udcff=1 LONG=1 forward_ms=LONG",
    "plan --replicas 2 --counts": "'' x LONG 1 12,12.0 LONG,1 ٢,٢",
    "plan --replicas 2 --set": "worker_budget=0.1:-inf worker_budget=0.1:LONG "
    "worker_budget=0.1:1e400B 'worker_budget=0.1:1\r'",
    "simulate --schedule": "'' /nowhere /dev/zero /dev/null . LONG",
    "simulate --samples": "5 -1 1.5",
    "simulate --set link_jitter=0.1 --samples": "100000000",
    "simulate --seed": "x ''",
    "compare --budgets": "'' 1, 0 nan " + ",".join(map(str, range(1, 200))),
    "draw --width": "100000000 -1 0 x",
    "draw --format": "gif '' png svg,html ,",
    "draw --out": "'' /dev/null/x.svg x.gif LONG.svg",
}
OTHER_WORDS = {
    "demo --stages": "1 100000000 x",
    "demo --microbatches": "0 1000000000",
    "demo --replicas": "-1 100000",
    "demo --hidden-size": "6 1000000000",
    "demo --seq-length": "1 10000000000",
    "demo --iterations": "1 1000000000000",
    "demo --seed": "-1 LONG",
    "demo --num-layers": "3",
    "demo --dropout": "nan 1 -0.1 x",
    "demo --text": "/nowhere '' LONG /dev/zero /dev/null",
    "demo --slow": "2 0-3:1ms ٢-٣:1ms LONG-1:1ms , 2-3:40 2-3:1e300s 2-3:-1ms 2-3: 2-3:LONGms "
    "2-3:nan 2-3:1ms@..... 2-3:1ms@5..1 2-3:1ms,loss=1% /nowhere.yaml 2-3:1ms,bandwidth=1e-300B/s "
    "0.1-1.2:1ms LONG.1-0.2:1ms 1.1:2x 0.1:2x@5..1 0.1:2x@5s..9s 0.1:0.5x 0.1:LONGx 0.1:2x, "
    "0.0-0.2:1ms 0.1:dead 1:2x 1:2ms 0.1:2MB/s 2-3:1ms@90.. 2-3:1ms@1.5..3",
    "demo --chunks": "-1",
    "demo --chunks 5 --microbatches": "7",
    "demo --policy zb-h1 --engine": "native",
    "demo --activation-budget": "0 nan LONG",
    "demo --config": "/nowhere /dev/zero .",
    "demo --timeout": "nan 1 1e308 inf",
    "netlab": "run go",
    "netlab measure": "/nowhere.yaml x /dev/zero.yaml",
    "netlab measure --hosts": "x 100000000 -1 1",
    "netlab measure --link": "0-1 LONG-1:1ms '' 0-1:1ms,loss=100% 0-0:1ms 0-1:1ms@..... "
    "0-99999999:1ms",
    "netlab measure --timeout": "x",
    "run": "x /nowhere.py LONG.py . /dev/zero",
    "": "plam '' - -- \udcff --no-such 'plan x'",
}


def flag_cases():
    """Command lines; of a flag that comes twice the last value is taken."""
    for i, word in enumerate(WORDS):
        yield [JOBS[i % 4], *FLAGS, f"{NUMBERS[i % 9]}={word}"]
        yield [JOBS[i % 3], *FLAGS, f"--microbatches={word}"]
    for flag in NUMBERS:
        yield ["plan", *FLAGS, f"{flag}=1e308"]
        yield ["simulate", *FLAGS, f"{flag}=1e-308"]
        yield ["draw", *FLAGS, f"{flag}=1e308", "--json"]
    for table, flags in ((JOB_WORDS, FLAGS), (OTHER_WORDS, ())):
        for words, values in table.items():
            command, *more = words.split() or [""]
            for value in shlex.split(values):
                last = value.replace("LONG", LONG)
                if command in ("run", ""):
                    yield [*filter(None, (command, *more)), *(last.split(" "))]
                else:
                    yield [command, *flags, *more, last]
    yield from ([], ["demo", "--rank-from-env"], ["run", "", "x.py"])


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


def test_words(wrong):
    assert wrong(flag_cases()) == []


def odd_files(folder):
    """What is no file that can be read, each with a name that ends in .yaml and one in .json."""
    (folder / "file").write_text(json.dumps(JOB))
    for end in (".yaml", ".json"):
        os.mkfifo(folder / f"fifo{end}")
        (folder / f"folder{end}").mkdir()
        (folder / f"loop{end}").symlink_to(f"loop{end}")
        (folder / f"zero{end}").symlink_to("/dev/zero")
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(folder / f"socket{end}"))
        with open(folder / f"huge{end}", "wb") as file:
            file.truncate(2**40)  # takes no room
        for kind in ("fifo", "folder", "loop", "zero", "socket", "huge", "file/x"):
            yield folder / f"{kind}{end}"


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
def test_standard_output_that_takes_nothing(tmp_path, streams):
    script = f'{SHELL[streams]}; exec "$0" -m megatron_adaptra "$@"'
    for words in (("draw", *SMALL, "--json"), ("-h",)):
        command = ["bash", "-c", script, sys.executable, *words]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=300, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        lines = done.stderr.splitlines()
        assert len(lines) == (0 if "both" in streams else 1)
        assert all(line.startswith("adaptra: error: standard output") for line in lines)


@pytest.mark.long
@pytest.mark.parametrize("words", [("plan", "--policy", "1f1b"), ("compare", "--budgets", "4")])
def test_a_terminal_that_knows_ascii_only(words):
    env = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "megatron_adaptra", *words, *FLAGS]
    done = subprocess.run(command, capture_output=True, env=env, timeout=300)
    assert done.returncode == 0
    assert all(line.startswith(b"adaptra: planning") for line in done.stderr.splitlines())
    assert done.stdout.isascii()


VARIABLES = {
    "RANK": ["abc", "-1", "7", "", "٤"],
    "WORLD_SIZE": ["0", "1e3"],
    "MASTER_PORT": ["99999", "x", "-5"],
    "MASTER_ADDR": ["", "a b", "a" * 300, "nowhere.invalid", ".."],
}


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_of_a_rank(wrong, monkeypatch, tmp_path, name):
    of_rank = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    (tmp_path / "script.py").write_text("raise SystemExit(7)\n")
    for value in VARIABLES[name]:
        for key, each in {**of_rank, name: value}.items():
            monkeypatch.setenv(key, each)
        assert wrong([["demo", "--rank-from-env"]]) == []
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
