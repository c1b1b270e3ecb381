"""A guard between a training and its adaptation: a failure there ends the adaptation alone.

Measuring, planning, control and reports run on one thread per rank. The training thread hands work
over and does not wait for it; what it has to call itself, to take stamps, waits for nothing. An
exception, a hang or a nonsensical value there costs the adaptation, for good, and is logged once.
The plan in force stays, as on all other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from megatron_adaptra.agree.bundle import Bundle, ValueKind
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import Disagreement, PeerLost
from megatron_adaptra.base.log import GOES_ON, log_line

MOST = 10_000  # pieces that may wait; a healthy rank has a few
_LONGEST = 300  # characters of an error that are logged

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")


class Guard:
    """A guard runs the functions that adapt this rank's training. `who`: this rank, in the log.

    `off`: something has failed, and nothing more is done. Any thread may call it.
    """

    def __init__(self, who: str = "this rank") -> None:
        self.off = False
        self._who = who
        self._failures = itertools.count()
        self._queue: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None]
        self._queue = queue.SimpleQueue()
        self._doing: tuple[Callable[..., Any], float] | None = None  # since when
        self._hangs = False
        self._thread = threading.Thread(target=self._work, name="adaptra-guard", daemon=True)
        self._starting = threading.Lock()

    # On the training thread. Methods with `seconds` wait that long at most; others do not wait.

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the result of `function(*args)`, called now; None once something has failed."""
        if not self.off:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.fail(function, error)
        return None

    def method(
        self, target: S | None, method: Callable[Concatenate[S, P], T]
    ) -> Callable[P, T | None]:
        """Return a `method` of `target`, guarded as by `call`; without a target it does nothing.

        It costs one frame alone, as ops are measured through it.
        """

        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            if not self.off and target is not None:
                try:
                    return method(target, *args, **kwargs)
                except Exception as error:
                    self.fail(method, error)
            return None

        return guarded

    def agreed(
        self, begin: Callable[[int], Bundle], iteration: int, before: Bundle, kind: ValueKind[Any]
    ) -> Bundle:
        """Return the bundle to run from `iteration` on, which `begin` returns: see Controller.

        It is the one `before` where that fails, or has no such value of a `kind`, and training goes
        on. Also when `off`, as ranks vote on. Raises Disagreement, PeerLost.
        """
        try:
            bundle: Any = begin(iteration)
            if isinstance(bundle, Bundle) and isinstance(bundle[kind], type(before[kind])):
                return bundle
            self.fail(begin, f"it returns {bundle!r}")
        except (Disagreement, PeerLost):
            raise
        except Exception as error:
            self.fail(begin, error)
        return before

    def later(self, function: Callable[..., Any], *args: Any) -> None:
        """Have `function(*args)` called on the background thread, unless something has failed."""
        if self.off:
            return
        doing = self._doing
        if doing is not None and time.monotonic() - doing[1] > waits.WORK:
            self.fail(doing[0], self._hanging())
        elif self._queue.qsize() >= MOST:
            self.fail(function, f"{MOST} pieces of work wait before it")
        else:
            try:
                self._put(function, args)
            except RuntimeError as error:  # there can be no more threads
                self.fail(function, error)

    def result(self, seconds: float, function: Callable[..., T], *args: Any) -> T:
        """Return the result of `function(*args)` on the background thread, also when `off`.

        Raises the function's error, and TimeoutError if the thread does not finish it in so many
        `seconds`, or once has not finished another.
        """
        if self._hangs:
            raise TimeoutError(self._hanging())
        future = self._submit(function, *args)
        if wait([future], seconds).not_done:
            self._hangs = True
            self.fail(function, self._hanging())
            raise TimeoutError(self._hanging())
        return future.result()

    def attempt(self, seconds: float, function: Callable[..., Any], *args: Any) -> None:
        """Wait so many `seconds` for `function` as `result` does; an error ends the adaptation."""
        try:
            self.result(seconds, function, *args)
        except Exception as error:
            self.fail(function, error)

    def flush(self, seconds: float) -> None:
        """Wait until what was handed over is done, but no longer than so many `seconds`."""
        if not self._hangs:
            wait([self._submit(lambda: None)], seconds)

    def close(self, seconds: float) -> None:
        """End the thread when it has done its work; wait so many `seconds` for that."""
        self._queue.put(None)
        if self._thread.ident is not None and not self._hangs:
            self._thread.join(seconds)
            if self._thread.is_alive():
                self.fail(self.close, self._hanging())

    # On any thread.

    def fail(self, what: Callable[..., Any], error: BaseException | str) -> None:
        """End the adaptation, because of an `error` in `what`. The first one is logged."""
        self.off = True
        if next(self._failures):
            return
        reason = (error if isinstance(error, str) else repr(error))[:_LONGEST]
        text = f"{self._who} adapts no more, {GOES_ON} as planned: {_name(what)}: {reason}"
        with contextlib.suppress(Exception):  # not here: standard error may be full
            threading.Thread(target=log_line, args=(text,), daemon=True).start()

    def _submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Have `function(*args)` called on the background thread; return its future result."""
        future = Future[T]()

        def run() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        run.__qualname__ = _name(function)
        self._put(run, ())
        return future

    def _put(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self._thread.ident is None:
            with self._starting:
                if self._thread.ident is None:
                    self._thread.start()
        self._queue.put((function, args))

    # On the background thread.

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            function, args = item
            self._doing = function, time.monotonic()
            try:
                function(*args)
            except BaseException as error:
                self.fail(function, error)
            self._doing = None

    def _hanging(self) -> str:
        return f"it does not come back{self._where()}"

    def _where(self) -> str:
        """Describe where the background thread is: the innermost line of this package."""
        frame: Any = sys._current_frames().get(self._thread.ident or 0)
        here = Path(__file__).parents[1]
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if here in path.parents and path != Path(__file__):
                return f", it is in {path.relative_to(here)}, line {frame.f_lineno}"
            frame = frame.f_back
        return ""


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))
