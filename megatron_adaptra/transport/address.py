"""The address at which this process listens, so that other hosts reach it and nobody else does.

A fault of the interface with that address is found here, too, so that no peer is blamed for it.
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
    """Return the address of GLOO_SOCKET_IFNAME's first interface, else that facing MASTER_ADDR.

    NCCL_SOCKET_IFNAME comes second for messages of a `gpu`. Raises OSError where there is none.
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
    """Return the interfaces of `names`, in order, that NCCL takes if NCCL_SOCKET_IFNAME is `words`.

    `words` are how names begin; after "=" whole names, after "^" those to leave out, "^=" both.
    """
    without, words = words.startswith("^"), words.removeprefix("^")
    exact, words = words.startswith("="), words.removeprefix("=")
    wanted = [word for word in words.split(",") if word]

    def named(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in wanted)

    return [name for name in names if named(name) != without]


def _with_address(words: str) -> str:
    """Return the address of the first interface that `words` choose and that has one, or empty."""
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
