"""Reduces values in the order in which a backend does, so that results agree to the last bit.

Sums of floats depend on their order, and so do maxima with NaN among them. Which order a backend
takes for tensors of a size is found by trying (`orders_of`), element by element: a ring reduces
each part of a tensor along another path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

import torch
from torch.distributed import ReduceOp

MOST_TRIALS = 64  # a handful is enough
_SEED = 20
Native = Callable[[torch.Tensor], None]  # reduces in place, over the group


@dataclass(frozen=True)
class Order:
    """Members in the order of their folding; whether the next one stands left of the result."""

    members: tuple[int, ...]
    left: bool = False

    def fold(self, op: ReduceOp, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Raises KeyError for an operation that is not in KNOWN."""
        pair = _FOLDS[str(op)]
        total = values[self.members[0]]
        for member in self.members[1:]:
            value = values[member]
            total = pair(value, total) if self.left else pair(total, value)
        return total


def orders(size: int) -> list[Order]:
    """Candidates: once round a ring, from any member, either way."""
    around = list(range(size))
    rings = [tuple(around[i:] + around[:i]) for i in range(size)]
    ways = dict.fromkeys(way for ring in rings for way in (ring[::-1], ring))
    return [Order(way, left) for left in (False, True) for way in ways]


def _larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(a < b, b, a)  # as std::max has it: a NaN stays if it is first


def _smaller(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(b < a, b, a)


_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    str(ReduceOp.SUM): torch.add,
    str(ReduceOp.MAX): _larger,
    str(ReduceOp.MIN): _smaller,
}
KNOWN = frozenset(_FOLDS)


class Orders:
    """Which candidate each element of a tensor follows."""

    def __init__(self, size: int, which: torch.Tensor) -> None:
        self._orders, self.which = orders(size), which

    def digest(self) -> bytes:
        """Equal on two members exactly if they have found the same."""
        return hashlib.sha256(self.which.numpy().tobytes()).digest()

    def reduce(self, op: ReduceOp, values: Sequence[torch.Tensor]) -> torch.Tensor:
        used = self.which.unique().tolist()
        if len(used) == 1:
            return self._orders[used[0]].fold(op, values)
        total = torch.empty_like(values[0])
        for index in used:
            mine = self.which == index
            total[mine] = self._orders[index].fold(op, [v[mine] for v in values])
        return total


def orders_of(
    native: Native, op: ReduceOp, like: torch.Tensor, me: int, size: int
) -> Orders | None:
    """Find out by reducing test values natively; None if no candidate explains the results.

    Collective: all members call it at the same time, and see the same results. It goes on until
    the candidates that are left agree whatever the values. `like`: a tensor of the shape and kind.
    """
    candidates = orders(size)
    kinds = torch.tensor(kinds_of(op, like.dtype, size))[:, None]
    fits = torch.ones(len(candidates), like.numel(), dtype=torch.bool)
    for rows in islice(trials(op, like.dtype, size, like.numel()), MOST_TRIALS):
        values = list(rows)
        mine = values[me].clone().view(like.shape).to(like.device)
        native(mine)
        result = mine.cpu().view(-1)
        for index, order in enumerate(candidates):
            fits[index] &= _equal(order.fold(op, values), result)
        if not bool(fits.any(dim=0).all()):
            return None
        first = fits.to(torch.uint8).argmax(dim=0)
        if bool((~fits | (kinds == kinds[first].T)).all()):
            return Orders(size, first)
    return None


@cache
def kinds_of(op: ReduceOp, dtype: torch.dtype, size: int) -> list[int]:
    """Of each candidate a number, equal for two exactly if they always have equal results."""
    rows = [list(row) for row in islice(trials(op, dtype, size, 256), 2 * size)]
    results: list[list[torch.Tensor]] = []
    kinds = []
    for order in orders(size):
        mine = [order.fold(op, values) for values in rows]
        same = (
            i
            for i, others in enumerate(results)
            if all(bool(_equal(a, b).all()) for a, b in zip(mine, others, strict=True))
        )
        kinds.append(next(same, len(results)))
        if kinds[-1] == len(results):
            results.append(mine)
    return kinds


def trials(op: ReduceOp, dtype: torch.dtype, size: int, count: int) -> Iterator[torch.Tensor]:
    """Test values without end, one row per member, whose result tells of the order.

    Of a sum: two members' large values cancel out, and swallow what is added before the second of
    them. Of a maximum: one member's value is NaN.
    """
    generator, shape = torch.Generator().manual_seed(_SEED), (size, count)
    while True:
        if not dtype.is_floating_point:
            yield torch.randint(0, 50, shape, generator=generator).to(dtype)
            continue
        rows = torch.randn(shape, generator=generator, dtype=torch.float64)
        first, second = torch.rand(shape, generator=generator).argsort(dim=0)[:2]
        if str(op) == str(ReduceOp.SUM):
            large = torch.full((1, count), 8 / torch.finfo(dtype).eps, dtype=torch.float64)
            rows = rows.scatter(0, first[None], large).scatter(0, second[None], -large)
        else:
            rows = rows.scatter(0, first[None], torch.nan)
        yield rows.to(dtype)


def _equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not a.is_floating_point():
        return a == b
    return (a == b) | (a.isnan() & b.isnan())
