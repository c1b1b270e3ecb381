"""Logging never ends or delays a process, whatever a stream or disk does; it loses lines."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transport.ranks import until

from megatron_adaptra.base.log import LogFile

# More than any pipe takes, while the first file that it opens may have descriptor 2.
SPEAKER = """
import os, tempfile
from megatron_adaptra.base.log import log_line
with tempfile.TemporaryFile() as other:
    log_line(200_000 * "x")
    for _ in range(9):
        log_line("not in UTF-8: \\udc80")
    print(os.fstat(other.fileno()).st_size, "bytes in another file")
"""


def speak(stderr: int | None, close: bool = False) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPEAKER], stdout=subprocess.PIPE, stderr=stderr, text=True,
        timeout=120, check=False, preexec_fn=(lambda: os.close(2)) if close else None,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "0 bytes in another file\n")


def test_a_closed_standard_error() -> None:
    speak(None, close=True)


def test_a_full_disk_under_standard_error() -> None:
    with open("/dev/full", "wb") as full:
        speak(full.fileno())


@pytest.mark.long
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("reader", ["gone", "stopped"])
def test_a_reader_of_standard_error_that_is(reader: str, blocking: bool) -> None:
    read, write = os.pipe()
    try:
        os.set_blocking(write, blocking)
        if reader == "gone":
            os.close(read)
        speak(write)
        if reader == "stopped":
            assert os.read(read, 1 << 20).startswith(b"adaptra: xxx")
    finally:
        os.close(write)
        if reader == "stopped":
            os.close(read)


def test_a_long_line_comes_whole() -> None:
    say = 'from megatron_adaptra.base.log import log_line; log_line(50_000 * "x")'
    done = subprocess.run([sys.executable, "-c", say], capture_output=True, timeout=120)
    assert done.stderr == b"adaptra: " + 50_000 * b"x" + b"\n"


def test_a_file_stays_the_same_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = LogFile(Path("log"), "lines")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    log.write("a line")
    log.close()
    assert (tmp_path / "log").read_text() == "a line\n"


def test_after_half_a_line_the_next_one_is_whole(tmp_path: Path) -> None:
    """A disk that fills up inside a line, and has room again when the job is started again."""
    path = tmp_path / "log"
    line = json.dumps(60 * "x")
    job = (
        "import pathlib, resource; from megatron_adaptra.base.log import LogFile; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); "
        f"log = LogFile(pathlib.Path({str(path)!r}), 'lines'); "
        f"[log.write({line!r}) for _ in range(4)]; log.close()"
    )
    done = subprocess.run([sys.executable, "-c", job], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert done.stderr == f"adaptra: lines cannot be logged in {str(path)!r}: File too large\n"
    log = LogFile(path, "lines")
    log.write(line)
    log.close()
    first, half, last = path.read_text().splitlines()
    assert first == last == line
    assert line.startswith(half)


def test_jobs_that_share_a_file_leave_each_others_lines_whole(tmp_path: Path) -> None:
    """The half of a line that another job is writing is not taken for one of a full disk."""
    path = tmp_path / "log"
    with open(path, "ab", buffering=0) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b"a line in ")
        log = LogFile(path, "lines")
        log.write("a line")
        until(lambda: awaited(path) or path.stat().st_size > 10, "a process writes, or waits")
        other.write(b"two parts\n")
        fcntl.flock(other, fcntl.LOCK_UN)
    log.close()
    assert path.read_text() == "a line in two parts\na line\n"


def awaited(path: Path) -> bool:
    """Whether a process waits for a lock of this file."""
    inode = f":{path.stat().st_ino} "
    locks = Path("/proc/locks").read_text().splitlines()
    return any("-> FLOCK" in line and inode in line for line in locks)
