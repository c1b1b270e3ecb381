"""The value of one kind that all ranks run in an iteration, as they have voted."""

from __future__ import annotations

from typing import Any, TypeVar

from megatron_adaptra.agree.bundle import Value, ValueKind
from megatron_adaptra.agree.controller import Controller
from megatron_adaptra.agree.guard import Guard
from megatron_adaptra.base.errors import Disagreement, PeerLost

V = TypeVar("V", bound=Value)


def agreed_value(
    guard: Guard, controller: Controller, iteration: int, kind: ValueKind[V], before: V
) -> V:
    """Return the value agreed on for an `iteration`; `before` where that fails, as `guard` notes.

    Training goes on after such a failure. `kind`: of the value, in the bundle of `controller`.
    Raises Disagreement, PeerLost: see Controller.
    """
    try:
        value: Any = controller.begin(iteration)[kind]
        if isinstance(value, type(before)):
            return value
        guard.fail(controller.begin, f"it returns {value!r}")
    except (Disagreement, PeerLost):
        raise
    except Exception as error:
        guard.fail(controller.begin, error)
    return before
