"""Laboratories of these tests, and what one of them could leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from processes import living

COMMAND = [sys.executable, "-m", "megatron_adaptra", "netlab"]
# Before a script: a connection to host 0, which may listen later.
CONNECTED = """
import os, socket, threading, time
def connected():
    deadline = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection((os.environ["MASTER_ADDR"], 5000), timeout=120)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
"""


def lab(*words: str, timeout: float = 500, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=timeout, check=False, **options
    )


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, preexec_fn=_default_hangups,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _default_hangups() -> None:
    """A laboratory asks by SIGHUP whether nohup started it; these tests may run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def wait_for(process: subprocess.Popen[str], text: str, times: int) -> None:
    """Until so many lines of what it prints have that in them."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        times -= text in line
        if times == 0:
            return
    raise AssertionError(f"{text!r} did not come: {''.join(lines)}")


def namespaces() -> set[str]:
    """Network namespaces that other processes are in, or hold open."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            found |= {name for _, name in namespaces_of(entry)}
    return found


def namespaces_of(process: Path) -> Iterator[tuple[Path, str]]:
    """Links to them below a folder of /proc, and their names."""
    with contextlib.suppress(OSError):
        for link in (process / "ns/net", *(process / "fd").iterdir()):
            with contextlib.suppress(OSError):
                if (name := os.readlink(link)).startswith("net:"):
                    yield link, name


def listed(folder: str) -> set[str]:
    return set(os.listdir(folder))


class Remains:
    """What a laboratory with this mark on its command line leaves behind. Made before it starts."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.segment = f"adaptra-{os.getpid()}-{abs(hash(mark))}"  # for the test to make
        self._inside: set[str] = set()
        self._held: list[int] = []
        self._devices = listed("/sys/class/net")

    def see(self, hosts: int) -> dict[int, str]:
        """Note the namespaces of the laboratory, which is up; its processes, see `living`."""
        processes = living(self.mark)
        own = os.readlink("/proc/self/ns/net")
        for pid in processes:
            for link, name in namespaces_of(Path(f"/proc/{pid}")):
                if name != own and name not in self._inside:
                    # While it is held its number is no other's: laboratories of others come and go.
                    self._held.append(os.open(link, os.O_RDONLY))
                    self._inside.add(name)
        assert len(self._inside) >= hosts
        return processes

    def assert_none(self) -> None:
        assert self._inside, "see() has not been called"
        deadline = time.monotonic() + 120
        while any(self._left().values()) and time.monotonic() < deadline:
            time.sleep(0.05)  # the kernel ends orphans, which is no event for us
        left = self._left()
        for held in self._held:
            os.close(held)
        assert not any(left.values()), left

    def _left(self) -> dict[str, object]:
        return {
            "processes": living(self.mark),
            "namespaces": namespaces() & self._inside,
            "devices": listed("/sys/class/net") - self._devices,
            "shared memory": {name for name in listed("/dev/shm") if self.segment in name},
        }
