"""The watchdog, which names the peer that a rank waited for when it must end, and ends it.

A rank that dies takes its neighbours' connections with it, these exit, and so on: the first to
notice writes down who was lost, so that every other rank names the culprit and not its neighbour.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.base.log import GOES_ON, log_line
from megatron_adaptra.execute.failure_log import FailureLog
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.routes import Routes

_CREDENTIALS = struct.Struct("3i")  # process, user and group of the writer
_active: list[ExitOnSignal] = []
_mask = threading.local()  # of the thread that forks
# Modules whose frames are skipped on the way to what a rank really does.
_NO_PLACE = ("megatron_adaptra.", "torch.distributed.c10d_logger", "threading")


class Watchdog:
    """A watchdog keeps what the main thread of `worker` waits for, among so many `replicas`.

    `ranks`: global ones, by worker; in a single replica a worker is a stage. `late`: seconds of a
    wait for a message, until `say_late` is called.

    `waits_for`: the op, the worker waited for, and since when, on the monotonic clock; set before
    every wait of the schedule, and None once the wait has succeeded. `done`: the messages that the
    iteration has sent and awaited here, in order. `calls`: of whatever shows that the rank goes on.
    `forward`: the number of the one under way; -1 where that is not known, None outside of one.
    """

    def __init__(
        self,
        worker: int,
        ranks: Sequence[int],
        failure_log: FailureLog | None = None,
        replicas: int = 1,
        late: float = math.inf,
    ) -> None:
        self.worker, self.ranks = worker, tuple(ranks)
        self._routes = Routes(len(self.ranks) // replicas, replicas=replicas)
        self.failure_log = failure_log or FailureLog()
        self.late = late
        self.phase = "start-up"  # what the rank does when it waits for no message
        self.iteration = -1  # the one under way, or the last one
        self.done: list[Op] = []
        self.calls = 0
        self.forward: int | None = None
        self.waits_for: tuple[Op, int, float] | None = None

    def name(self, worker: int) -> str:
        """Name a `worker` in errors: `stage 2 (rank 2)`; with replicas `worker 1.2 (rank 5)`."""
        return f"{self._routes.name(worker)} (rank {self.ranks[worker]})"

    def begins(self, iteration: int, phase: str = "") -> None:
        """Note that this rank begins a `phase` of an `iteration`, which has done nothing yet.

        Without a `phase`, the iteration keeps the one that it has been given. Megatron's log, and
        so all lines for people, counts iterations from one.
        """
        words = f"iteration {iteration + 1}"
        if phase or not self.phase.startswith(words):
            self.phase = phase or words
        self.iteration, self.done, self.forward = iteration, [], None
        self.calls += 1

    @property
    def under_way(self) -> str:
        """The op that has begun here, as far as is known: `F3`; else empty."""
        last = self.done[-1] if self.done else None
        if self.forward is not None:
            known = last is not None and last.kind is Kind.F
            return str(last) if known else f"F{self.forward}" if self.forward >= 0 else ""
        if last is None or last.kind in (Kind.SEND_F, Kind.SEND_B):
            return ""
        # The last stage goes on with the backward of what it has run forwards.
        return str(last._replace(kind=Kind.B) if last.kind is Kind.F else last)

    def lost(self, op: Op, peer: int, error: PeerLost) -> PeerLost:
        """Return the error for a failed wait for worker `peer`; log it for all ranks.

        The ranks between this one and the culprit get half the time of that wait to report theirs.
        """
        reason = str(error).partition(": ")[2] or str(error)
        return PeerLost(self.describe(f": {reason}", peer))

    def say_late(self, seconds: float) -> None:
        """Log what this rank waits for, and that it does so for some `seconds` more at most."""
        words = f"{GOES_ON} if it comes within {seconds:g} s"
        log_line(f"{self.name(self.worker)} {self._doing()}; {words}")

    def describe(self, reason: str = "", peer: int | None = None, place: str = "") -> str:
        """Describe what this rank was doing and the `reason` of its end; log it for all ranks.

        `peer`: the worker to ask why it does not answer, or None. `place`: where the main thread
        is, which counts unless it waits for a message.
        """
        if self.waits_for is None:
            reason = place + reason
        own = f"{self.name(self.worker)} {self._doing()}{reason}"
        missing = self.failure_log.missing()
        text = own
        for what, ranks in missing.items():
            text += f"; {what}: {', '.join(f'rank {rank}' for rank in ranks)}"
        if peer is not None and self.waits_for is not None and not missing:
            seconds = min(waits.CHAIN, (time.monotonic() - self.waits_for[2]) / 2)
            rank, other = self.ranks[self.worker], self.ranks[peer]
            text = self.failure_log.end_of_waits(rank, other, own, seconds)
        # The rank that noticed first saw the culprit, the rest may see each other go.
        first = self.failure_log.read()
        if not first:
            self.failure_log.write(text)
            first = text
        return first if first.startswith(own) else f"{own}; first noticed: {first}"

    def _doing(self) -> str:
        if self.waits_for is None:
            return f"was in {self.phase}"
        op, peer, since = self.waits_for
        return f"waited {time.monotonic() - since:.1f} s for {self.message(op, peer)}"

    def message(self, op: Op, peer: int) -> str:
        """Name the message that `op` needs, or sends, and the worker `peer` at its other end."""
        way = "to" if op.kind in (Kind.SEND_F, Kind.SEND_B) else "from"
        return f"{op} {way} {self.name(peer)}"

    def end_on_signal(self, signum: int = signal.SIGTERM) -> Callable[[], None]:
        """Log what was waited for, and exit, on signal `signum`, even while blocked in a library.

        A handler of other code keeps the signal. Returns a function that puts things back.
        """
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signum) is not signal.SIG_DFL:
            return lambda: None

        def message() -> str:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            return self.describe(place=_place(traceback.walk_stack(frame)))

        return ExitOnSignal(signum, message).undo

    def failure_message(self, error: BaseException) -> str:
        """Describe an `error` that ends training as a peer is gone; else return an empty string."""
        if isinstance(error, PeerLost):
            return str(error)
        text = str(error).lower()  # gloo's word for a peer that died during a collective
        if isinstance(error, RuntimeError) and ("peer" in text or "timed out" in text):
            place = _place(reversed([*traceback.walk_tb(error.__traceback__)]))
            return self.describe(f": {error}", place=place)
        return ""


def _place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Describe where code is, for a reader who looks for the rank that the others wait for.

    `frames`: with their lines, the innermost first. In a collective of torch's, add its caller.
    """
    collective = ""
    for frame, line in frames:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == "torch.distributed.distributed_c10d":
            collective = f"torch's {function}, called by "
        elif not module.startswith(_NO_PLACE):
            return f", in {collective}{function} ({Path(frame.f_code.co_filename).name}:{line})"
    return ""


class ExitOnSignal:
    """On the signal `signum` logs what `message()` returns and exits with status 128 + `signum`.

    It does so even while the main thread is blocked in a library: Python runs signal handlers
    between bytecodes only, but its wake-up descriptor works always. A forked child inherits both,
    and is no rank: there the signal ends the child alone, without a line.

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
