"""A network for NCCL whose links are slow: the plugin of slow_net.cpp, its links, what has passed.

Its hosts are the names that NCCL_HOSTID gives to processes of this machine. Without torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fakes.cuda.building import cache, compiler

SOURCE = Path(__file__).with_name("slow_net.cpp")
FLAGS = ["-std=c++17", "-O2", "-g1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
FLAGS += ["-fvisibility=hidden", f"-I{SOURCE.parent}"]
MOST_HOSTS, NAME_BYTES = 16, 48
KEPT = 20  # builds of other versions, in the cache
NAME = "AdaptraSlow"  # NCCL's log has it


def build(text: str | None = None) -> Path:
    """The plugin, compiled once for each state of its sources; of another `text`, if given."""
    text = SOURCE.read_text() if text is None else text
    command = [*compiler().split(), *FLAGS]
    reads = text + SOURCE.with_name("net_abi.h").read_text() + repr(command)
    made = cache() / f"libadaptra_slow_net-{hashlib.sha256(reads.encode()).hexdigest()[:24]}.so"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=cache()) as folder:
            source, part = Path(folder) / "slow_net.cpp", Path(folder) / "part"
            source.write_text(text)
            subprocess.run([*command, str(source), "-o", str(part)], check=True, timeout=600)
            part.rename(made)
    made.touch()
    for old in sorted(cache().glob("libadaptra_slow_net-*"), key=_changed)[:-KEPT]:
        old.unlink(missing_ok=True)
    return made


def _changed(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


class Passed(NamedTuple):
    """A message that has come: times are nanoseconds of CLOCK_MONOTONIC, at either end.

    `asked`: NCCL wanted it sent; `sent`: it left; `arrived`: its last byte was there; `delivered`:
    it was where NCCL wanted it.
    """

    source: str
    target: str
    bytes: int
    tag: int
    asked: int
    sent: int
    arrived: int
    delivered: int


_PASSED = struct.Struct("=IIQqqqqq")


class _Link(ctypes.Structure):
    _fields_ = (("delay", ctypes.c_double), ("rate", ctypes.c_double), ("idle", ctypes.c_int64))


class _Links(ctypes.Structure):
    _fields_ = (
        ("hosts", ctypes.c_uint32),
        ("credit_first", ctypes.c_uint32),
        ("names", (ctypes.c_char * NAME_BYTES) * MOST_HOSTS),
        ("link", (_Link * MOST_HOSTS) * MOST_HOSTS),
    )


class SlowNetwork:
    """A network keeps its links in a folder's file, which may be changed while messages pass.

    With `hosts` it is a new one, else that of the folder, which another process has made.
    """

    def __init__(self, folder: Path, hosts: Sequence[str] = ()) -> None:
        self.folder = folder
        if hosts:
            (folder / "links").write_bytes(bytes(ctypes.sizeof(_Links)))
        with (folder / "links").open("r+b") as file:
            self._links = _Links.from_buffer(mmap.mmap(file.fileno(), 0))
        for number, name in enumerate(hosts):
            self._links.names[number].value = name.encode()
        if hosts:
            self._links.hosts = len(hosts)

    @property
    def hosts(self) -> list[str]:
        """Their names."""
        return [bytes(name.value).decode() for name in self._links.names[: self._links.hosts]]

    def credit_first(self, on: bool) -> None:
        """Nothing is sent before its receive's credit has come, as with InfiniBand; else eager."""
        self._links.credit_first = on

    def slow(self, source: str, target: str, delay: float, rate: float = 0.0) -> None:
        """What leaves from now on takes `delay` seconds, at `rate` bytes per second; 0: at any."""
        link = self._links.link[self.hosts.index(source)][self.hosts.index(target)]
        link.delay, link.rate = delay, rate

    def environment(self, host: str) -> dict[str, str]:
        """Variables of a process of that host; the plugin is built."""
        return {
            "ADAPTRA_SLOW_NET": str(self.folder), "NCCL_HOSTID": host,
            "NCCL_NET_PLUGIN": str(build()), "NCCL_NET": NAME,
        }  # fmt: skip

    def passed(self) -> list[Passed]:
        """Messages that have come so far, in order of when they were delivered."""
        names, found = self.hosts, []
        for path in self.folder.glob("passed-*"):
            data = path.read_bytes()
            for source, target, *rest in _PASSED.iter_unpack(data[: len(data) // 56 * 56]):
                found.append(Passed(names[source], names[target], *rest))
        return sorted(found, key=lambda message: message.delivered)
