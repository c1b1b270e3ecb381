"""Network namespaces by descriptor: none has a name, so none outlives the processes that use it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

from megatron_adaptra.netlab.network import WAITING

NEW_MOUNTS, NEW_PROCESSES, NEW_NETWORK = 0x20000, 0x20000000, 0x40000000
_SET_FLAGS, _SET_ADDRESS, _SET_MASK, _SET_MTU, _SET_QUEUE = 0x8914, 0x8916, 0x891C, 0x8922, 0x8943
_UP_AND_RUNNING = 0x1 | 0x40
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """Call the function `name` of the C library, which Python (3.10) lacks. Raises OSError."""
    if getattr(_libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def of(pid: int | None = None) -> int:
    """A descriptor that keeps the network namespace of process `pid`; None: of this thread."""
    where = "thread-self" if pid is None else str(pid)
    return os.open(f"/proc/{where}/ns/net", os.O_RDONLY)


def new() -> int:
    """A descriptor of a namespace that nothing else is in."""
    home = of()
    try:
        call("unshare", NEW_NETWORK)
        made = of()
        call("setns", home, NEW_NETWORK)
        return made
    finally:
        os.close(home)


@contextlib.contextmanager
def entered(namespace: int) -> Iterator[None]:
    """This thread, and what it starts, are in `namespace`, a descriptor, for a while."""
    home = of()
    try:
        call("setns", namespace, NEW_NETWORK)
        try:
            yield
        finally:
            call("setns", home, NEW_NETWORK)
    finally:
        os.close(home)


def bring_up(device: str, own: str = "", mtu: int = 0) -> None:
    """Set up `device` of this thread's namespace: `lo`, or a host's, whose address is `own`.

    `mtu`: bytes of the largest packet of a host's device.
    """

    def configure(what: int, value: bytes) -> None:
        fcntl.ioctl(any_socket, what, struct.pack("16s24s", device.encode(), value))

    def internet(text: str) -> bytes:
        return struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(text))

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        if own:
            configure(_SET_ADDRESS, internet(own))
            configure(_SET_MASK, internet("255.255.255.0"))
            configure(_SET_MTU, struct.pack("i", mtu))
            configure(_SET_QUEUE, struct.pack("i", WAITING))
        configure(_SET_FLAGS, struct.pack("h", _UP_AND_RUNNING))
