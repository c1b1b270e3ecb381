"""A host of the laboratory: a process that keeps a network namespace, and runs a command in it.

Nothing has a name in the system: namespaces and what is in them live as long as the processes that
use them, and the command runs under an init of its own process namespace, so that the kernel ends
all that it started. Whichever process is killed, nothing is left behind.

    laboratory -- keeper (network namespace) -- init (process namespace) -- command
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from megatron_adaptra.base.errors import AdaptraError
from megatron_adaptra.base.processes import die_with_parent
from megatron_adaptra.netlab import namespace
from megatron_adaptra.netlab.namespace import NEW_MOUNTS, NEW_NETWORK, NEW_PROCESSES, call
from megatron_adaptra.netlab.user import caller

_PRIVATE, _RECURSIVE = 0x40000, 0x4000
_SHARED = b"/dev/shm"
_UP = b"up\n"
_START = 30  # seconds that a host may take to make its namespace
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)


@dataclass
class Host:
    """Seen from the laboratory. `output`: what the command prints, to be read from here."""

    index: int
    pid: int
    control: socket.socket
    answers: BinaryIO  # a line each, like the tasks
    output: int
    status: int | None = None  # of the command, once it has ended; 128 + signal if it was killed

    def send(self, **message: Any) -> None:
        """Give the host a task: `task`, and what that takes.

        Raises AdaptraError if it does not take it in 30 seconds.
        """
        try:
            self.control.sendall(json.dumps(message).encode() + b"\n")
        except TimeoutError:
            raise AdaptraError(f"host {self.index} of the laboratory takes no task") from None
        except OSError:  # it has ended, which its status will say
            return

    def receive(self) -> dict[str, Any] | None:
        """The answer to a task; None if the host has ended."""
        answer = self.answers.readline()
        return json.loads(answer) if answer else None

    def end(self, signum: int) -> None:
        """Send it the signal `signum`; nothing if it has ended."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def wait(self) -> int:
        """The exit status of its command, once the host has been ended or has ended."""
        if self.status is None:
            self.status = _exit_status(os.waitpid(self.pid, 0)[1])
        return self.status

    def close(self) -> None:
        """Let go of its descriptors."""
        self.answers.close()
        self.control.close()
        os.close(self.output)


Task = Callable[[Mapping[str, Any]], dict[str, Any]]


def start(index: int, tasks: Callable[[int], Mapping[str, Task]]) -> Host:
    """Make host `index`. `tasks(index)`, called on it, says what it can do besides `run`.

    It is called when the first task comes, and by then the host has to have its network. Raises
    AdaptraError if the kernel refuses a namespace.
    """
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    laboratory = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.close(read)
        _hold(laboratory, index, theirs, write, tasks)
    theirs.close()
    os.close(write)
    ours.settimeout(_START)
    answers = ours.makefile("rb")
    try:
        answer = answers.readline()
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        answer = b"no network namespace after %d s" % _START
    host = Host(index, pid, ours, answers, read)
    if answer != _UP:
        os.waitpid(pid, 0)
        host.close()
        reason = answer.decode().strip() or "it has ended"
        raise AdaptraError(f"host {index} of the laboratory: {reason}")
    return host


def _hold(
    laboratory: int,
    index: int,
    control: socket.socket,
    output: int,
    tasks: Callable[[int], Mapping[str, Task]],
) -> NoReturn:
    """The keeper's whole life: it holds the namespace and does its tasks."""
    status = 1
    try:
        die_with_parent()
        if os.getppid() != laboratory:  # which has died before that
            os._exit(1)
        os.setsid()  # a Ctrl-C is for the laboratory, which passes it on
        call("unshare", NEW_NETWORK | NEW_MOUNTS)
        namespace.bring_up("lo")
        control.sendall(_UP)
        known: Mapping[str, Task] = {}
        for message in control.makefile("rb"):
            order = json.loads(message)
            if order["task"] == "run":
                status = _command(order["command"], order["environment"], output, control)
                break
            known = known or tasks(index)
            control.sendall(json.dumps(known[order["task"]](order)).encode() + b"\n")
    except OSError as error:
        control.sendall(f"{error}\n".encode())
    finally:
        os._exit(status)


def _command(
    command: Sequence[str], environment: Mapping[str, str], output: int, control: socket.socket
) -> int:
    """Run the command under an init; its exit status."""
    call("unshare", NEW_PROCESSES)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    alive, ours = os.pipe()
    init = os.fork()
    if init == 0:
        os.close(control.fileno())
        os.close(ours)
        die_with_parent()
        if select.select([alive], [], [], 0)[0]:  # the keeper has died before that
            os._exit(1)
        _init(command, environment, output)
    os.close(output)
    return _status_of(init)


def _init(command: Sequence[str], environment: Mapping[str, str], output: int) -> NoReturn:
    """The first process of its namespace: adopts orphans, and takes all with it when it ends."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        call("mount", b"none", b"/", None, _PRIVATE | _RECURSIVE, None)
        call("mount", b"proc", b"/proc", b"proc", 0, None)
        if os.path.isdir(_SHARED):  # hosts share no memory; what is left in it goes with them
            call("mount", b"tmpfs", _SHARED, b"tmpfs", 0, None)
    except OSError as error:
        os.write(2, f"a host of the laboratory: {error}\n".encode())
        os._exit(126)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        user = caller()
        try:
            own = user.become() if user is not None else {}
            os.execvpe(command[0], list(command), {**environment, **own})
        except OSError as error:
            who = f", as the user {user.name or user.uid} who called sudo" if user else ""
            os.write(2, f"{command[0]}: {error.strerror}{who}\n".encode())
        os._exit(127)
    os._exit(_status_of(child))


def _status_of(child: int) -> int:
    """Pass SIGTERM on to the child, reap orphans, and return the child's status when it has ended.

    Signals are blocked and taken one by one: a handler of Python's would run only after the wait
    that a signal may come just before.
    """
    while True:
        if signal.sigwait(_SIGNALS) == signal.SIGTERM:
            os.kill(child, signal.SIGTERM)
        pid = -1
        while pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return _exit_status(status)


def _exit_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
