"""Reduces values in the order in which a backend does, so that results agree to the last bit.

Sums of floats depend on their order, and so do maxima with NaN, or with zeros of both signs, among
them. Which order a backend takes for tensors of a size is found by trying (`orders_of`), element by
element: a ring reduces each part of a tensor along another path.

Candidates are the ways once round a ring: from any member, up or down, each next value standing
right or left of the result. Of `size` members they are numbered `first + size * (down + 2 * left)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count, islice

import torch
from torch.distributed import ReduceOp

MOST_TRIALS = 64  # a handful is enough
FEWEST_TRIALS = 4  # by chance, an order that no candidate has may look like one for a while
_SEED = 20
Native = Callable[[torch.Tensor], None]  # reduces in place, over the group
_Pair = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def orders(size: int) -> int:
    """Return the number of candidates of `size` members. Two members can only swap."""
    return 4 * size if size > 2 else 2


def path(which: torch.Tensor, size: int) -> torch.Tensor:
    """Return a column per candidate in `which`: the `size` members, in the order of folding."""
    step = 1 - 2 * (which // size % 2)
    return (which + torch.arange(size)[:, None] * step) % size


def candidates(op: ReduceOp, values: torch.Tensor) -> torch.Tensor:
    """Return a row per candidate: its reduction of the members' `values`, a row per member.

    Raises KeyError for an operation that is not in KNOWN.
    """
    pair, size = _PAIRS[str(op)], len(values)
    # All that start somewhere else are folded at once: their next values stand next to each other.
    twice = torch.cat([values, values])
    up = [twice[n : n + size] for n in range(size)]
    down = [twice[size - n : 2 * size - n] for n in range(size)]
    ways = [(rows, left) for left in (False, True) for rows in (up, down)]
    return torch.cat([_fold(pair, rows, left) for rows, left in ways[: orders(size) // size]])


def _fold(pair: _Pair, rows: Sequence[torch.Tensor], left: bool) -> torch.Tensor:
    total = rows[0]
    for row in rows[1:]:
        total = pair(row, total) if left else pair(total, row)
    return total


_PAIRS: dict[str, _Pair] = {
    str(ReduceOp.SUM): torch.add,
    # As std::max and std::min have it: a NaN stays if it is first.
    str(ReduceOp.MAX): lambda a, b: torch.where(a < b, b, a),
    str(ReduceOp.MIN): lambda a, b: torch.where(b < a, b, a),
}
KNOWN = frozenset(_PAIRS)


class Orders:
    """A set of orders keeps each element's candidate: `which`, int16, flat, of `size` members."""

    def __init__(self, size: int, which: torch.Tensor) -> None:
        self.which, used = which, which.unique()
        used = used if len(used) == 1 else which
        self._path, self._left = path(used.long(), size), used >= 2 * size

    def digest(self) -> bytes:
        """Return a digest, equal on two members exactly if they have found the same orders."""
        return hashlib.sha256(self.which.numpy().tobytes()).digest()

    def reduce(self, op: ReduceOp, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Reduce the members' `values`, flat and in the members' order, as the backend does."""
        pair, rows = _PAIRS[str(op)], values
        if self._path.shape[1] == 1:  # no copies of what may be much
            rows = [values[member] for member in self._path[:, 0].tolist()]
        else:
            rows = torch.stack(list(values)).gather(0, self._path).unbind()
        if not self._left.any():
            return _fold(pair, rows, False)
        total = _fold(pair, rows, True)
        return (
            total if self._left.all() else torch.where(self._left, total, _fold(pair, rows, False))
        )


def orders_of(
    native: Native, op: ReduceOp, like: torch.Tensor, me: int, size: int
) -> Orders | None:
    """Find the orders by reducing test values natively; None if no candidate explains them.

    Collective: all members call it at the same time, and see the same results. It goes on until
    the candidates that are left agree whatever the values. `native`: reduces in place over the
    group. `like`: a tensor of the shape and dtype. `me`: this one's index of `size` members.
    """
    kinds = kinds_of(op, like.dtype, size)[:, None]
    fewest = min(FEWEST_TRIALS, len(kinds.unique()))
    fits = torch.ones(len(kinds), like.numel(), dtype=torch.bool)
    tests = islice(trials(op, like.dtype, size, like.numel()), MOST_TRIALS)
    for number, rows in enumerate(tests, 1):
        mine = rows[me].clone().view(like.shape).to(like.device)
        native(mine)
        fits &= _equal(candidates(op, rows), mine.cpu().view(-1))
        if not bool(fits.any(dim=0).all()):
            return None
        first = fits.to(torch.uint8).argmax(dim=0)
        if number >= fewest and bool((~fits | (kinds == kinds[first].T)).all()):
            return Orders(size, first.to(torch.int16))
    return None


@cache
def kinds_of(op: ReduceOp, dtype: torch.dtype, size: int) -> torch.Tensor:
    """Return a number per candidate of `size` members, equal for those that always agree."""
    numbers = torch.arange(orders(size))
    if not dtype.is_floating_point:
        return torch.zeros_like(numbers)
    if str(op) != str(ReduceOp.SUM):
        return numbers
    # The first two may change places; four members show the way round.
    heads = path(numbers, size)[:4].T.tolist()
    kinds: dict[tuple[object, ...], int] = {}
    keys = [(frozenset(head[:2]), *head[2:]) for head in heads]
    return torch.tensor([kinds.setdefault(key, len(kinds)) for key in keys])


def trials(op: ReduceOp, dtype: torch.dtype, size: int, width: int) -> Iterator[torch.Tensor]:
    """Yield test values without end, `size` rows of `width`; their result depends on the order."""
    generator, shape = torch.Generator().manual_seed(_SEED), (size, width)
    for number in count():
        if not dtype.is_floating_point:
            yield torch.randint(0, 50, shape, generator=generator).to(dtype)
        elif str(op) == str(ReduceOp.SUM):
            # Two large values cancel out, and swallow what is added before the second of them.
            rows = torch.randn(shape, generator=generator, dtype=torch.float64)
            first = torch.randint(size, (1, width), generator=generator)
            second = (first + torch.randint(1, size, (1, width), generator=generator)) % size
            large = torch.full((1, width), 8 / torch.finfo(dtype).eps, dtype=torch.float64)
            yield rows.scatter(0, first, large).scatter(0, second, -large).to(dtype)
        else:
            rows = _extremes(*divmod(number, 4), size)
            yield (-rows if str(op) == str(ReduceOp.MIN) else rows).to(dtype).repeat(1, width)


def _extremes(turn: int, part: int, size: int) -> torch.Tensor:
    """Return a column whose maximum depends on the order; a few turns of four parts show all."""
    members = torch.arange(size)[:, None]
    place = (members - 2 * turn) % size
    if part < 2:
        # Where values stand left, a maximum begins anew after a NaN: from one on they rise round
        # the ring, and then fall. Any kind of float holds so many powers.
        rows = 2.0 ** (place / 64.0) * (1 - 2 * part)
        return torch.where(place == 0, torch.nan, rows)
    if part == 2:  # the first member's NaN stays, or the last one's; by the bits of its number
        bit = turn % (size - 1).bit_length()
        return torch.where((members >> bit) % 2 == 1, torch.nan, 0.0)
    # Of equal values the first stays, or the last: which zero, if -1 is between them?
    return torch.tensor([-1.0, 0.0, -0.0])[place % 3]


def _equal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compare elements to the last bit; all NaNs are equal."""
    if not a.is_floating_point():
        return a == b
    return ((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())
