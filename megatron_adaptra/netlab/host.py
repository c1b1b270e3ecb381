"""A host of the laboratory: a process in a network namespace of its own, with one TUN device.

Nothing has a name in the system: namespaces and devices live as long as the processes in them,
and the command runs under an init of its own process namespace, so that the kernel ends all that it
started. Whoever is killed, nothing is left behind.

    laboratory -- keeper (network namespace) -- init (process namespace) -- command
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_adaptra.errors import AdaptraError
from megatron_adaptra.netlab.relay import MTU, address
from megatron_adaptra.runtime.watchdog import die_with_parent

_NEWNS, _NEWPID, _NEWNET = 0x20000, 0x20000000, 0x40000000
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x0001 | 0x1000
_SET_FLAGS, _SET_ADDRESS, _SET_MASK, _SET_MTU, _SET_QUEUE = 0x8914, 0x8916, 0x891C, 0x8922, 0x8943
_UP_AND_RUNNING = 0x1 | 0x40
_PRIVATE, _RECURSIVE = 0x40000, 0x4000
INTERFACE = "eth0"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Host:
    """Seen from the laboratory. `output`: what the command prints, to be read from here."""

    index: int
    pid: int
    device: int
    control: socket.socket
    output: int
    status: int | None = None  # of the command, once it has ended; 128 + signal if it was killed

    def tell(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone, which its status will tell
            self.control.send(json.dumps(message).encode())

    def hear(self) -> dict[str, Any] | None:
        """The answer to what was told; None if the host is gone."""
        answer = self.control.recv(1 << 20)
        return json.loads(answer) if answer else None

    def end(self, signum: int) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def wait(self) -> int:
        if self.status is None:
            self.status = _status(os.waitpid(self.pid, 0)[1])
        return self.status

    def close(self) -> None:
        self.control.close()
        os.close(self.device)
        os.close(self.output)


Task = Callable[[Mapping[str, Any]], dict[str, Any]]


def start(index: int, tasks: Callable[[int], Mapping[str, Task]]) -> Host:
    """Make a host. `tasks(index)`, called on it, says what it can be told besides `run`.

    Raises AdaptraError if the kernel refuses a namespace or a device.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.close(read)
        _keep(index, theirs, write, tasks)
    theirs.close()
    os.close(write)
    word, devices, _, _ = socket.recv_fds(ours, 4096, 1)
    if not devices:
        os.waitpid(pid, 0)
        raise AdaptraError(f"host {index} of the laboratory: {word.decode() or 'it has ended'}")
    return Host(index, pid, devices[0], ours, read)


def _keep(
    index: int, control: socket.socket, output: int, tasks: Callable[[int], Mapping[str, Task]]
) -> NoReturn:
    """The keeper's whole life: it holds the namespace and does what it is told."""
    status = 1
    try:
        die_with_parent()
        os.setsid()  # a Ctrl-C is for the laboratory, which passes it on
        _call("unshare", _NEWNET | _NEWNS)
        socket.send_fds(control, [b"up"], [_device(address(index))])
        known = tasks(index)
        while message := control.recv(1 << 20):
            order = json.loads(message)
            if order["task"] == "run":
                status = _command(order["command"], order["environment"], output, control)
                break
            control.send(json.dumps(known[order["task"]](order)).encode())
    except OSError as error:
        control.send(f"{error}".encode())
    finally:
        os._exit(status)


def _device(own: str) -> int:
    """A TUN device that is up, with this address; the descriptor moves its packets."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = INTERFACE.encode()
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22s", name, _TUN_WITHOUT_HEADER, b""))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:

        def configure(what: int, value: bytes, device: bytes = name) -> None:
            fcntl.ioctl(any_socket, what, struct.pack("16s24s", device, value))

        def internet(text: str) -> bytes:
            return struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(text))

        configure(_SET_ADDRESS, internet(own))
        configure(_SET_MASK, internet("255.255.255.0"))
        configure(_SET_MTU, struct.pack("i", MTU))
        configure(_SET_QUEUE, struct.pack("i", 5000))
        for device in (name, b"lo"):
            configure(_SET_FLAGS, struct.pack("h", _UP_AND_RUNNING), device)
    return fd


def _command(
    command: Sequence[str], environment: Mapping[str, str], output: int, control: socket.socket
) -> int:
    """Run the command under an init; its exit status."""
    _call("unshare", _NEWPID)
    init = os.fork()
    if init == 0:
        control.close()
        die_with_parent()
        _init(command, environment, output)
    os.close(output)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(init, signal.SIGTERM))
    return _status(os.waitpid(init, 0)[1])


def _init(command: Sequence[str], environment: Mapping[str, str], output: int) -> NoReturn:
    """The first process of its namespace: adopts orphans, and takes all with it when it ends."""
    _call("mount", b"none", b"/", None, _PRIVATE | _RECURSIVE, None)
    _call("mount", b"proc", b"/proc", b"proc", 0, None)
    os.dup2(output, 1)
    os.dup2(output, 2)
    child = os.fork()
    if child == 0:
        try:
            os.execvpe(command[0], list(command), dict(environment))
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    while True:
        ended, status = os.wait()
        if ended == child:
            os._exit(_status(status))


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
