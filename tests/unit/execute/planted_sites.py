"""Functions that fail, at each of some sites of what adapts a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import pytest

from megatron_adaptra.agree.controller import Controller

T = TypeVar("T")


def raising(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planted")


def nonsense(*args: Any, **kwargs: Any) -> Any:
    return "planted"


FAULTS = (raising, nonsense)


def by_site(sites: Iterable[str], run: Callable[[str, Callable[..., Any]], T]) -> dict[str, T]:
    """What `run(site, fault)` returns, by both."""
    return {f"{site} {what.__name__}": run(site, what) for site in sites for what in FAULTS}


def with_fault(
    sites: Mapping[str, tuple[type, str]], where: int, site: str, what: Callable[..., Any],
    train: Callable[[Callable[[int, Any], None]], T],
) -> T:  # fmt: skip
    """What `train(fail)` returns; it calls `fail` with its rank and what adapts there.

    `sites`: classes, and names of their methods. The `site` of rank `where` does `what` instead;
    `begin`, which all ranks vote in, on all of them.
    """
    owner, name = sites[site]
    with pytest.MonkeyPatch.context() as patch:

        def fail(rank: int, adaptive: Any) -> None:
            if rank == where or site == "begin":
                target = type(adaptive._controller) if owner is Controller else owner
                patch.setattr(target, name, what)

        return train(fail)
