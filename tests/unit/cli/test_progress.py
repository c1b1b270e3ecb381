"""What takes long says so on standard error, and how far it is."""

import os
import pty
import re
import subprocess
import sys
from contextlib import contextmanager, redirect_stderr

from commands import FLAGS

from megatron_adaptra.cli import output
from megatron_adaptra.cli.output import progress

COMMAND = [sys.executable, "-m", "megatron_adaptra"]


@contextmanager
def read_end():
    """Standard error as a pipe, to wait for a line of it."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as lines, os.fdopen(writer, "w", buffering=1) as stream:
        with redirect_stderr(stream):
            yield lines


def test_lines_name_what_is_done_and_how_far(monkeypatch):
    monkeypatch.setattr(output, "QUIET", 0.01)
    monkeypatch.setattr(output, "BETWEEN", 0.01)
    with read_end() as lines, progress("planning", lines=True) as at:
        assert re.fullmatch(r"adaptra: planning \(\d+ s so far\)\n", lines.readline())
        at("2 of 3, policy warmup")
        while "2 of 3" not in (line := lines.readline()):
            assert line.startswith("adaptra: planning (")
        assert re.fullmatch(r"adaptra: planning: 2 of 3, policy warmup \(\d+ s so far\)\n", line)


def test_nothing_is_printed_of_what_is_done_soon(monkeypatch):
    monkeypatch.setattr(output, "QUIET", 3600.0)
    with read_end() as lines:
        with progress("planning", lines=True) as at:
            at("1 of 1")
        sys.stderr.write("end\n")
        assert lines.readline() == "end\n"


def test_a_terminal_shows_how_far_it_is():
    """compare names each plan; standard output holds the JSON alone."""
    leader, follower = pty.openpty()
    command = [*COMMAND, "compare", *FLAGS, "--budgets", "4,8,inf", "--json"]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, env=env) as child:
        os.close(follower)
        shown = b""
        while True:
            try:
                data = os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
            shown += data
        assert child.stdout.read().startswith(b'{"conditions"')
        assert child.wait(timeout=300) == 0
    os.close(leader)
    assert re.search(rb"planning: \d+ of 25 plans, policy [a-z0-9-]+", shown)
