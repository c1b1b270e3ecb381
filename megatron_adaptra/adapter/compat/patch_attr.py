"""Something else in place of an attribute of Megatron's, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def put(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of one object or module; returns the undoing, which leaves a later
    replacement alone."""
    own = vars(owner)
    before, was_there = own.get(name), name in own

    def back() -> None:
        if vars(owner).get(name) is value:
            setattr(owner, name, before) if was_there else delattr(owner, name)

    setattr(owner, name, value)
    return back
