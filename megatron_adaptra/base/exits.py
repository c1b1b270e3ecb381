"""The end of the process: what is still open then is closed, and threads of ours are waited for.

A thread that comes back from C++ while the interpreter ends is ended there by force. C++ takes that
for a crash, so that a training which went well ends with SIGABRT (CPython issue 87135).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

_PATIENCE = 5.0  # seconds, for all threads together

# By owner and thread, the process: a forked child has them, too, and leaves them alone.
_Owners = weakref.WeakKeyDictionary[Any, tuple[int, Callable[[Any], None]]]
_first: _Owners = weakref.WeakKeyDictionary()
_owners: _Owners = weakref.WeakKeyDictionary()
_threads: weakref.WeakKeyDictionary[threading.Thread, int] = weakref.WeakKeyDictionary()


def before_exit(owner: Any, call: Callable[[Any], None]) -> None:
    """Call `call(owner)` when the process ends, before anything is closed, if `owner` exists."""
    _first[owner] = os.getpid(), call


def at_exit(owner: Any, end: Callable[[Any], None]) -> None:
    """Call `end(owner)` when the process ends, in the order of these calls, if `owner` exists."""
    _owners[owner] = os.getpid(), end


def wait_at_exit(thread: threading.Thread) -> None:
    """Wait for `thread` when the process ends, some seconds at most."""
    _threads[thread] = os.getpid()


@atexit.register
def _end_process() -> None:
    me = os.getpid()
    for owner, (process, end) in [*_first.items(), *_owners.items()]:
        if process == me:
            with contextlib.suppress(Exception):
                end(owner)
    deadline = time.monotonic() + _PATIENCE
    for thread, process in list(_threads.items()):
        if process == me and thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
