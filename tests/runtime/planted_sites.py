"""Functions that fail, at each of some sites of what adapts a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def raising(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planted")


def nonsense(*args: Any, **kwargs: Any) -> Any:
    return "planted"


FAULTS = (raising, nonsense)


def by_site(sites: Iterable[str], run: Callable[[str, Callable[..., Any]], T]) -> dict[str, T]:
    """What `run(site, fault)` returns, by both."""
    return {f"{site} {what.__name__}": run(site, what) for site in sites for what in FAULTS}
