"""On a signal log a line and exit, even while the main thread is blocked in a library.

Python runs signal handlers between bytecodes only; its wake-up descriptor works always. A forked
child inherits both, but is no rank: there the signal ends the child alone, without a line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable

from megatron_adaptra.base.log import log_line

_CREDENTIALS = struct.Struct("3i")  # process, user and group of the writer
_active: list[ExitOnSignal] = []
_mask = threading.local()  # of the thread that forks


class ExitOnSignal:
    """On the signal `signum` logs what `message()` returns and exits with status 128 + `signum`.

    Made on the main thread of a process in which that signal has its default action. A handler that
    other code sets later keeps the signal.
    """

    def __init__(self, signum: int, message: Callable[[], str]) -> None:
        self.signum, self._message = signum, message
        self._ending = threading.Lock()
        self._reader, self._writer = socket.socketpair()
        # The kernel names the process that wrote: C code may fork without calling the hooks below.
        self._reader.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._writer.setblocking(False)
        fd = self._writer.fileno()
        self._others = signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
        signal.signal(signum, self._handle)
        self._thread = threading.Thread(target=self._watch, name="adaptra-watchdog", daemon=True)
        self._thread.start()
        _active.append(self)

    def undo(self) -> None:
        """Put back what was there; a second call does nothing. For the main thread."""
        if self in _active:
            _active.remove(self)
            self._give_back()
            self._writer.shutdown(socket.SHUT_RDWR)  # ends all copies of it, too
            self._thread.join()
            self._close()

    def leave_child(self) -> None:
        """Give the signal its default action again, in a forked child."""
        self._give_back()
        self._close()

    def _give_back(self) -> None:
        if signal.getsignal(self.signum) == self._handle:
            signal.signal(self.signum, signal.SIG_DFL)
        current = signal.set_wakeup_fd(-1)
        ours = current == self._writer.fileno()
        with contextlib.suppress(ValueError, OSError):  # its owner may have closed it
            signal.set_wakeup_fd(self._others if ours else current, warn_on_full_buffer=False)

    def _close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _handle(self, *_: object) -> None:
        """Log a line and exit. Python calls this where other code has taken the descriptor."""
        if self._ending.acquire(blocking=False):
            log_line(f"ended by signal {self.signum}: {self._message()}")
            os._exit(128 + self.signum)

    def _watch(self) -> None:
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        while True:
            caught, control, *_ = self._reader.recvmsg(64, space)
            if not caught:
                return
            writer = _CREDENTIALS.unpack(control[0][2])[0]
            taken = signal.getsignal(self.signum) != self._handle
            if self.signum in caught and writer == os.getpid() and not taken:
                self._handle()


def _before_fork() -> None:
    """Block signals, so that one for the child waits until it has its default action."""
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {one.signum for one in _active})


def _after_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _after_in_child() -> None:
    for one in _active:
        one.leave_child()
    _active.clear()
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
