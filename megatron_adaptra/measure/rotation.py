"""Lateness that moves: another rank, or another replica, is the slow one in each iteration."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Set
from itertools import pairwise

ROTATING = 16  # iterations in which it shows that lateness moves from one to another, ...
_OFTEN = 10  # ... if some one is late in so many, ...
_ONE, MOVES = 0.6, 0.4  # ... none in more than that share of them, and it moves in that share
_CALM = 2  # late iterations of ROTATING, from which on it does not move any more


class Rotation:
    """A rotation finds out whether lateness moves from one to another: then `rotating` is True.

    `moves`: the least share of late iterations in which none is late that was so in the one before.
    """

    def __init__(self, moves: float = MOVES) -> None:
        self.rotating = False
        self._moves = moves
        self._late_in: deque[Set[int]] = deque(maxlen=ROTATING)
        self._noted = False

    def update(self, late: Set[int]) -> None:
        """Take the numbers of the ranks or replicas that are `late` in an iteration."""
        self._late_in.append(late)
        rows = [row for row in self._late_in if row]
        if len(rows) <= _CALM:
            self.rotating = False
        elif len(rows) >= _OFTEN:
            most = max(Counter(one for row in rows for one in row).values())
            moves = sum(not a & b for a, b in pairwise(rows))
            rotates = most <= _ONE * len(rows) and moves >= self._moves * len(rows)
            self.rotating = self.rotating or rotates

    def to_note(self) -> bool:
        """Return whether rotating has to be noted: True only the first time."""
        if not self.rotating or self._noted:
            return False
        self._noted = True
        return True
