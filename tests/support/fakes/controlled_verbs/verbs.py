"""RDMA ports for a test: a process with the devices of libibverbs.cpp, which the test sets up."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

from fakes.over_library import ROOT, compiled, run_over

HERE = Path(__file__).parent
ENGINE = ROOT / "csrc" / "rdma_offload"
DEVICES = ("made_up0", "made_up1")
INFINIBAND, ETHERNET = 1, 2
GRH_REQUIRED = 1


@dataclass(frozen=True)
class Change:
    """What a queue pair was changed to; values that `which` does not name mean nothing."""

    state: int
    which: int
    partition: int
    timeout: int
    retries: int
    level: int
    dlid: int
    is_global: int
    gid_index: int
    hops: int
    traffic_class: int
    gid: bytes


class Fabric:
    """Two devices with one port each, numbered 0 and 1."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def port(
        self, device: int, link: int = ETHERNET, flags: int = 0, keys: int = 1, lid: int = 0
    ) -> None:
        """What its port is: Ethernet or InfiniBand; how many partition keys it has."""
        self.library.test_port(device, link, flags, keys, lid)

    def gid(self, device: int, index: int, address: str, version: int = 2) -> bytes:
        """Put an address, as one of IPv6 is written, at `index`; "::" takes it away.

        `version`: of RoCE.
        """
        raw = IPv6Address(address).packed
        self.library.test_gid(device, index, raw, version)
        return raw

    def refuse(self, error: int) -> None:
        """No queue pair finds a way from now on."""
        self.library.test_refuse(error)

    def registrations(self, count: int) -> None:
        """Memory can be registered so many times from now on."""
        self.library.test_registrations(count)

    def link(self, delay: float, megabytes: int = 0) -> None:
        """What moves takes `delay` seconds each way, and has so many MB/s (0: any number)."""
        self.library.test_link(round(delay * 1e6), megabytes)

    def under_way(self) -> int:
        """The most bytes that one queue pair had under way so far."""
        self.library.test_under_way.restype = ctypes.c_uint64
        return int(self.library.test_under_way())

    def moved(self) -> int:
        """Bytes that have arrived so far, over all queue pairs."""
        self.library.test_moved.restype = ctypes.c_uint64
        return int(self.library.test_moved())

    def changes(self) -> list[Change]:
        """All of queue pairs so far, in order."""
        found = []
        for number in range(self.library.test_changes()):
            values, gid = (ctypes.c_int * 11)(), (ctypes.c_ubyte * 16)()
            self.library.test_change(number, values, gid)
            found.append(Change(*values, gid=bytes(gid)))
        return found


def run(body: Callable[..., Any], *args: Any) -> Any:
    """What `body(fabric, *args)` returned in a process of its own; raises what it raised."""
    versions = HERE / "symbols.map"
    reads = (versions, ENGINE / "verbs" / "verbs_abi.h", HERE / "moving.h")
    flags = f"-I{ENGINE}", f"-Wl,--version-script={versions}"
    file = compiled(HERE / "libibverbs.cpp", "libibverbs.so.1", *flags, reads=reads)
    return run_over(file, Fabric, body, args)
