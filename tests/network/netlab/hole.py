"""A link that passes what is small and loses what is large, as where an MTU is not what it says."""

from __future__ import annotations

import ctypes
import socket
import struct

LARGEST = 400  # bytes of a packet: a handshake and heartbeats are less
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER
# The kernel's packet filter: load the length; is it more? drop; else take all of it.
_PROGRAM = struct.pack("HBBI", 0x80, 0, 0, 0) + struct.pack("HBBI", 0x25, 1, 0, LARGEST)
_PROGRAM += struct.pack("HBBI", 0x06, 0, 0, 0xFFFFFFFF) + struct.pack("HBBI", 0x06, 0, 0, 0)


def dig(one: socket.socket) -> None:
    """From now on `one`, and what a listener accepts, gets small packets alone."""
    program = ctypes.create_string_buffer(_PROGRAM, len(_PROGRAM))
    about = struct.pack("HL", len(_PROGRAM) // 8, ctypes.addressof(program))
    one.setsockopt(socket.SOL_SOCKET, _ATTACH, about)


def fill(one: socket.socket) -> None:
    """Let all packets through to `one`."""
    one.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
