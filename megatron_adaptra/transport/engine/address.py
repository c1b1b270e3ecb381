"""At which address this process listens, so that the other hosts reach it and nobody else does.

And whether the interface that has it works: what fails here is no fault of a peer.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_ADDRESS, _FLAGS = slice(20, 24), slice(16, 18)  # of the answer, an ifreq
_UP, _RUNNING = 0x1, 0x40


def local_address() -> str:
    """That of GLOO_SOCKET_IFNAME's first interface, else the one that faces MASTER_ADDR.

    Raises OSError where there is none.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if names:
            request = struct.pack("256s", names[0].encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError as error:
                raise OSError(
                    f"GLOO_SOCKET_IFNAME: interface {names[0]!r} has no IPv4 address"
                ) from error
            return socket.inet_ntoa(answer[_ADDRESS])
        master = os.environ.get("MASTER_ADDR") or socket.gethostname()
        probe.connect((master, 9))  # sends nothing: the kernel picks the address
        return str(probe.getsockname()[0])


def fault_here(host: str) -> str:
    """Why the interface with the address `host` carries nothing; empty if it may."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                address = fcntl.ioctl(probe, _SIOCGIFADDR, request)[_ADDRESS]
                flags = int.from_bytes(fcntl.ioctl(probe, _SIOCGIFFLAGS, request)[_FLAGS], "little")
            except OSError:  # it has no address, or has just gone
                continue
            if socket.inet_ntoa(address) == host and not (flags & _UP and flags & _RUNNING):
                return f"interface {name} {'has no carrier' if flags & _UP else 'is down'}"
    return ""
