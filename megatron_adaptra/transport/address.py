"""At which address this process listens, so that the other hosts reach it and nobody else does.

And whether the interface that has it works: what fails here is no fault of a peer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_ADDRESS, _FLAGS = slice(20, 24), slice(16, 18)  # of the answer, an ifreq
_UP, _RUNNING = 0x1, 0x40


def local_address(gpu: bool = False) -> str:
    """That of GLOO_SOCKET_IFNAME's first interface, else the one that faces MASTER_ADDR.

    For messages of a `gpu` NCCL_SOCKET_IFNAME comes second. Raises OSError where there is none.
    """
    names = named_for_gloo()
    words = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if gpu and words and not names and (wanted := _with_address(words)):
        return wanted
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if names:
            if found := address_of(names[0]):
                return found
            raise OSError(f"GLOO_SOCKET_IFNAME: interface {names[0]!r} has no IPv4 address")
        master = os.environ.get("MASTER_ADDR") or socket.gethostname()
        probe.connect((master, 9))  # sends nothing: the kernel picks the address
        return str(probe.getsockname()[0])


def named_for_gloo() -> list[str]:
    """The interfaces that GLOO_SOCKET_IFNAME names."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def address_of(interface: str) -> str:
    """The IPv4 address of an `interface`; empty if it has none, or does not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        with contextlib.suppress(OSError):
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[_ADDRESS])
    return ""


def chosen_by_nccl(words: str, names: Sequence[str]) -> list[str]:
    """Which of the interfaces `names` NCCL takes, in their order, if NCCL_SOCKET_IFNAME is `words`.

    Beginnings of names; after "=" whole ones, after "^" those to leave out, after "^=" both.
    """
    without, words = words.startswith("^"), words.removeprefix("^")
    exact, words = words.startswith("="), words.removeprefix("=")
    wanted = [word for word in words.split(",") if word]

    def named(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in wanted)

    return [name for name in names if named(name) != without]


def _with_address(words: str) -> str:
    """The address of the first such interface that has one; empty for none."""
    names = chosen_by_nccl(words, [name for _, name in socket.if_nameindex()])
    return next(filter(None, map(address_of, names)), "")


def fault_here(host: str) -> str:
    """Why the interface with the address `host` carries nothing; empty if it may."""
    for name, flags in _interfaces_with(host):
        if not (flags & _UP and flags & _RUNNING):
            return f"interface {name} {'has no carrier' if flags & _UP else 'is down'}"
    return ""


def interface_of(host: str) -> str:
    """The name of the interface with the address `host`, or that address where none has it."""
    return next((name for name, _ in _interfaces_with(host)), host)


def _interfaces_with(host: str) -> Iterator[tuple[str, int]]:
    """The names of those that have the address `host`, and their flags."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            if address_of(name) != host:
                continue
            request = struct.pack("256s", name.encode())
            try:
                flags = int.from_bytes(fcntl.ioctl(probe, _SIOCGIFFLAGS, request)[_FLAGS], "little")
            except OSError:  # it has just gone
                continue
            yield name, flags
