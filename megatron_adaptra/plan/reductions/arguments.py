"""The arguments of builders of collective plans: their limits, and short forms of ops."""

from __future__ import annotations

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import Action, CollectiveOp


def whole(name: str, value: object, least: int) -> int:
    """Return `value` if it is a whole number of at least `least`; else raise BadInput of `name`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadInput(name, value, f"it has to be a whole number of at least {least}")
    return value


def part(piece: int, *targets: int, length: int = 1) -> CollectiveOp:
    """Send what is held of `length` pieces from `piece` on to `targets`, to be added."""
    return CollectiveOp(Action.PART, piece, targets, length)


def add(piece: int, *ranks: int, length: int = 1) -> CollectiveOp:
    """Add what `ranks`, of whom this is one, hold of `length` pieces from `piece` on."""
    return CollectiveOp(Action.ADD, piece, ranks, length)


def total(piece: int, *targets: int, length: int = 1) -> CollectiveOp:
    """Send the sums of `length` pieces from `piece` on to `targets`."""
    return CollectiveOp(Action.SUM, piece, targets, length)


def take(piece: int, source: int, length: int = 1) -> CollectiveOp:
    """Receive the sums of `length` pieces from `piece` on from `source`."""
    return CollectiveOp(Action.TAKE, piece, (source,), length)
