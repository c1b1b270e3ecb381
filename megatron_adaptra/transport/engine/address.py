"""At which address this process listens, so that the other hosts reach it and nobody else does."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

_SIOCGIFADDR = 0x8915
_ADDRESS = slice(20, 24)  # of the answer, an ifreq


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
