"""The plugin of the slow network, called from Python as NCCL calls it, again and again."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import TypeVar

HANDLE_BYTES = 128
POLL_SECONDS = 1e-4
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "s": ctypes.c_size_t}
# Members of net_abi.h's Net, and what a function takes.
_MEMBERS = {
    "name": "", "init": "pp", "devices": "p", "properties": "ip", "listen": "ipp",
    "connect": "ipppp", "accept": "ppp", "register_memory": "ppsip", "register_dmabuf": "",
    "deregister_memory": "pp", "send": "ppsippp", "receive": "pipppppp", "flush": "pipppp",
    "test": "ppp", "close_sending": "p", "close_receiving": "p", "close_listener": "p",
    "device_memory": "", "received_on_device": "", "make_device": "",
}  # fmt: skip
Found = TypeVar("Found")


class _Net(ctypes.Structure):
    _fields_ = tuple(
        (
            name,
            ctypes.CFUNCTYPE(ctypes.c_int, *(_TYPES[letter] for letter in takes))
            if takes
            else ctypes.c_void_p,
        )
        for name, takes in _MEMBERS.items()
    )


class NetError(Exception):
    """An error of the plugin carries its number, and the function that returned it."""


def polled(ask: Callable[[], Found | None], seconds: float) -> Found:
    """Ask until it answers, for so long."""
    deadline = time.monotonic() + seconds
    while (answer := ask()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer in {seconds:g} s")
        time.sleep(POLL_SECONDS)
    return answer


class Driver:
    """A driver makes the plugin's calls; ends and requests are addresses.

    The process has the variables of `SlowNetwork.environment`.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(os.environ["NCCL_NET_PLUGIN"])
        self._net = _Net.in_dll(library, "ncclNetPlugin_v10")
        self._call("init", None, None)

    def _call(self, name: str, *arguments: object) -> None:
        if result := getattr(self._net, name)(*arguments):
            raise NetError(result, name)

    def _made(self, name: str, *arguments: object, after: tuple[object, ...] = ()) -> int | None:
        """Return what the call has put at the pointer behind its arguments; None: not yet."""
        made = ctypes.c_void_p()
        self._call(name, *arguments, ctypes.byref(made), *after)
        return made.value

    def listen(self) -> tuple[bytes, int]:
        """Return the handle that `connect` takes, and a listener."""
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        listener = self._made("listen", 0, handle)
        assert listener is not None
        return handle.raw, listener

    def connect(self, handle: bytes) -> int | None:
        """Return a sending end; None: not yet."""
        text = ctypes.create_string_buffer(handle, HANDLE_BYTES)
        return self._made("connect", 0, None, text, after=(None,))

    def accept(self, listener: int) -> int | None:
        """Return a receiving end; None: not yet."""
        return self._made("accept", listener, after=(None,))

    def send(self, end: int, at: int, size: int, tag: int) -> int | None:
        """Return a request; None: the message cannot leave yet."""
        return self._made("send", end, at, size, tag, None, None)

    def receive(self, end: int, at: int, size: int, tag: int) -> int | None:
        """Return a request; None: there are too many."""
        into, sizes, tags = ctypes.c_void_p(at), ctypes.c_size_t(size), ctypes.c_int(tag)
        pointers = (ctypes.byref(one) for one in (into, sizes, tags))
        return self._made("receive", end, 1, *pointers, None, None)

    def test(self, request: int) -> int | None:
        """Return the bytes of a request that is over; None: it is not."""
        done, size = ctypes.c_int(), ctypes.c_int()
        self._call("test", request, ctypes.byref(done), ctypes.byref(size))
        return size.value if done.value else None

    def close(self, kind: str, one: int) -> None:
        """Close a `sending` or `receiving` end, or a `listener`."""
        self._call(f"close_{kind}", one)
