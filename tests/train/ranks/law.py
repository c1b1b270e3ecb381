"""Faults at every call of what adapts a training; which calls there are is found by looking.

The rule. CORE is what the training itself is made of: its failure is the training's own, as that of
Megatron's communicator would be. Everything else of the package adapts. A site is

- a call on the training thread from CORE into what adapts, or
- on a thread of what adapts (the first function of ours on it is no CORE), every public function
  that another module calls, but for that of CORE's which decides, with the other ranks, what is in
  force.

At a site a function raises, hangs until it is released, or returns nonsense. On the training thread
nothing is made to hang: what runs there must not be able to, which `waits` looks for instead.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

PACKAGE = "megatron_adaptra."
CORE = {
    "ir": "what a schedule and a program are",
    "transport": "carries the training's messages",
    "config": "the user's settings",
    "base.units": "their numbers",
    "emulate": "makes messages and ops slow, where the user asks for it",
    "base.errors": "names of what ends a training",
    "base.processes": "ends children with their parents",
    "base.package": "where this copy of the package is, and what builds its engine",
    "base.exits": "keeps a list of what is closed when the process ends",
    "base.waits": "durations",
    "agree.guard": "the line itself",
    "execute.guarded_probe": "the line, around what measures",
    "agree.agreement": "decides together with the other ranks which schedule is in force",
    "agree.share_vote": "decides together with them whether replicas run by other counts",
    "agree.bundle": "what is in force",
    "execute.mailbox": "sends and takes the training's messages",
    "execute.executor": "runs the ops",
    "execute.small": "carries values that the training computes with",
    "execute.planned.connected": "carries them by plan",
    "execute.planned.exchange": "the same",
    "execute.planned.layout": "the same",
    "execute.planned.reports": "the same",
    "execute.watchdog": "ends a training whose peers are lost, or that a signal asks to end",
    "device.base": "a clock, to which share_times has no guard",
    "execute.process_location": "who sees whose processes, before training",
    "adapter": "what Megatron calls, and what calls Megatron",
}
# Parts of the adapter that are not needed to run an op.
BESIDE = (
    "adapter.pipeline.memory",
    "adapter.entry.checkpoint", "adapter.entry.training_log",
)  # fmt: skip
# The last holds a message of the training back, where the user asks for it.
DECIDES = ("agree.agreement", "agree.share_vote", "emulate.links")
KINDS = ("raise", "garbage", "hang")
PATIENCE = 300.0  # seconds
GARBAGE = (object(), "garbage", -1)
# C functions that wait for something, by the start of their names.
WAITING = (
    "posix.", "_io.", "time.sleep", "_socket.", "select.", "_thread.lock.acquire",
    "_thread.RLock.acquire", "_queue.SimpleQueue.get", "_thread.start", "_bootstrap",
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """`caller`, `callee`: "module:qualified name"; the caller is "" on threads of what adapts."""

    caller: str
    callee: str

    def __str__(self) -> str:
        return f"{self.caller or 'a thread'} -> {self.callee}".replace(PACKAGE, "")


def is_ours(module: str) -> bool:
    return module.startswith(PACKAGE)


def is_core(module: str) -> bool:
    name = module.removeprefix(PACKAGE)
    return not _in(name, BESIDE) and _in(name, tuple(CORE))


def _in(name: str, parts: tuple[str, ...]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _title(frame: FrameType) -> str:
    return f"{_module(frame)}:{frame.f_code.co_qualname}"


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames of ours from here outwards."""
    while frame is not None:
        if is_ours(_module(frame)):
            yield frame
        frame = frame.f_back


def adapts(frame: FrameType) -> bool:
    """Whether this thread is one of what adapts: the guard's is, though its module is CORE."""
    if threading.current_thread() is threading.main_thread():
        return False
    outermost = [*_callers(frame)][-1:]
    return bool(outermost) and (
        not is_core(_module(outermost[0])) or _module(outermost[0]).endswith(".guard")
    )


class Discovery:
    """While it is on, notes all sites that are called, and how often."""

    def __init__(self) -> None:
        self.calls: Counter[Site] = Counter()
        self.waits: set[str] = set()  # on the training thread, in what adapts

    def __enter__(self) -> Discovery:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, what: Any) -> None:
        module = _module(frame)
        if not is_ours(module):
            return
        main = threading.current_thread() is threading.main_thread()
        if event == "c_call" and main and not is_core(module):
            name = f"{what.__module__ or type(what.__self__).__module__}.{what.__qualname__}"
            # What the kernel counts is read from memory, which waits for nothing.
            if name.startswith(WAITING) and not module.endswith("measure.core_wait"):
                self.waits.add(f"{_title(frame)} calls {name}")
        if event != "call" or "<" in frame.f_code.co_qualname:
            return  # what has no name of its own runs as a part of what has
        if main:
            self._on_the_training_thread(frame)
        elif adapts(frame) and not _in(module.removeprefix(PACKAGE), (*DECIDES, "agree.guard")):
            caller, name = next(_callers(frame.f_back), None), frame.f_code.co_name
            public = not name.startswith("_") or name == "__init__"
            if public and (caller is None or _module(caller) != module):
                self.calls[Site("", _title(frame))] += 1

    def _on_the_training_thread(self, frame: FrameType) -> None:
        caller = next(_callers(frame.f_back), None)
        if not is_core(_module(frame)) and (caller is None or is_core(_module(caller))):
            self.calls[Site(_title(caller) if caller else "", _title(frame))] += 1


class Fault:
    """At a `site` its function fails in the way of `kind`, from its call number `first` on."""

    def __init__(self, site: Site, kind: str, first: int = 0) -> None:
        self.site, self.kind, self.first = site, kind, first
        self.calls = self.hits = 0
        self._release, self._hanging = threading.Event(), set[threading.Thread]()

    def __enter__(self) -> Fault:
        self._function = _function(self.site.callee)
        self._before = _Before.of(self._function)
        _replace(self._function, self._call)
        return self

    def __exit__(self, *_: object) -> None:
        self._before.restore(self._function)
        self._release.set()
        for thread in self._hanging:
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} does not end after {self.site}"

    def _call(self, args: Any, kwargs: Any) -> Any:
        if not self._here(sys._getframe(2)):
            return self._before.function(*args, **kwargs)
        self.calls += 1
        if self.calls <= self.first:
            return self._before.function(*args, **kwargs)
        self.hits += 1
        if self.kind == "raise":
            raise RuntimeError(f"injected into {self.site}")
        if self.kind == "hang":
            self._hanging.add(threading.current_thread())
            self._release.wait(PATIENCE)
            raise SystemExit  # ends its thread
        return None if self.site.callee.endswith("__init__") else GARBAGE[self.hits % 3]

    def _here(self, frame: FrameType) -> bool:
        """`frame`: of the caller."""
        if not self.site.caller:
            return adapts(frame)
        caller = next(_callers(frame), None)
        on_main = threading.current_thread() is threading.main_thread()
        return on_main and caller is not None and _title(caller) == self.site.caller


@dataclass
class _Before:
    """A function as it was, and what calls it."""

    code: CodeType
    defaults: Any
    kwdefaults: Any
    function: FunctionType

    @classmethod
    def of(cls, function: FunctionType) -> _Before:
        copy = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__,
            function.__closure__,
        )  # fmt: skip
        copy.__kwdefaults__ = function.__kwdefaults__
        return cls(function.__code__, function.__defaults__, function.__kwdefaults__, copy)

    def restore(self, function: FunctionType) -> None:
        function.__code__ = self.code
        function.__defaults__, function.__kwdefaults__ = self.defaults, self.kwdefaults


def _replace(function: FunctionType, call: Callable[[Any, Any], Any]) -> None:
    """Its code, not its name: all who hold the function call `call` from now on."""
    cells = function.__code__.co_freevars
    made: dict[str, Any] = {}
    text = "\n".join(
        [
            "def outer():",
            *(f"    {name} = None" for name in cells),
            "    def stand_in(*args, **kwargs):",
            *(f"        {name}" for name in cells),
            "        return _law_call(args, kwargs)",
            "    return stand_in",
        ]
    )
    exec(text, made)
    function.__globals__["_law_call"] = call
    function.__defaults__ = function.__kwdefaults__ = None
    function.__code__ = made["outer"]().__code__.replace(co_name=function.__name__)


def _function(title: str) -> FunctionType:
    module, _, names = title.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = vars(found)[name]
    for attribute in ("fget", "func", "__func__"):  # a property, a cached one, a class method
        found = getattr(found, attribute, None) or found
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    assert isinstance(found, FunctionType), title
    return found
