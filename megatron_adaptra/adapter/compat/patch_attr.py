"""The one place that sets attributes of Megatron's and torch's, and takes them back."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


def find(target: str) -> tuple[Any, str]:
    """The object that holds `target`, "module:name" or "module:Class.name", and the name.

    Imports the module. Raises ImportError or AttributeError if there is no such thing; what a class
    inherits is not its own.
    """
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    if name not in vars(owner):
        raise AttributeError(f"{module} has no {path} of its own")
    return owner, name


def patch_attr(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set attribute `name` of a module, a class or one object, `owner`; returns the undoing.

    The undoing leaves alone what other code has put on top. `value` is a plain function where a
    static method was.
    """
    own = vars(owner)
    before, was_there = own.get(name), name in own
    if isinstance(before, staticmethod):
        value = staticmethod(value)

    def undo() -> None:
        if vars(owner).get(name) is value:
            setattr(owner, name, before) if was_there else delattr(owner, name)

    setattr(owner, name, value)
    return undo


def switched(ours: Callable[..., Any], native: Callable[..., Any]) -> tuple[Any, Any]:
    """A function that calls `ours`, and what makes it call `native` from then on.

    After its undoing a patch may still be called: by who had put something on top of it, or had
    kept it by another name.
    """
    on = True

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if on else native)(*args, **kwargs)

    def off() -> None:
        nonlocal on
        on = False

    return call, off
