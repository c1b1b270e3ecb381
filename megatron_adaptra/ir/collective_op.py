"""One step of a rank's part in a collective, and its text form."""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from megatron_adaptra.base.errors import BadInput


class Goal(str, Enum):
    """A goal defines what ranks end with. Shard r is the r-th of as many equal parts as ranks."""

    ALL_REDUCE = "all-reduce"  # every rank ends with the sum of all ranks' buffers
    REDUCE_SCATTER = "reduce-scatter"  # rank r ends with the sum of shard r, of no other one
    ALL_GATHER = "all-gather"  # every rank ends with shard r as rank r has it


class Action(str, Enum):
    """An action sends or receives pieces of a rank's buffer."""

    PART = "P"  # send what it holds: its own part, or a partial sum
    SUM = "S"  # send the sum of all ranks; in an all-gather, what the shard's rank has
    ADD = "A"  # receive parts, and add them to what it holds
    TAKE = "R"  # receive the sum, in place of what it holds

    __hash__ = str.__hash__

    @property
    def sends(self) -> bool:
        """True where the action sends; False where it receives."""
        return self in (Action.PART, Action.SUM)


_SIGN = {Action.PART: (">", ","), Action.SUM: (">", ","), Action.ADD: ("=", "+")}
_SIGN[Action.TAKE] = ("<", ",")
_TEXT = re.compile(r"([PSAR])([0-9]{1,9})(?:-([0-9]{1,9}))?([>=<])([0-9]{1,9}(?:[,+][0-9]{1,9})*)")


class CollectiveOp(NamedTuple):
    """A collective op sends or receives `length` pieces of a rank's buffer, from number `piece` on.

    The meaning of `ranks` depends on the action:

    `P3>1,2`: send what this rank holds of piece 3 to rank 1, then to rank 2, to be added there.
    `S3>1,2`: the same with the sum. `A3=0+1+2`: on rank 1, `x0 + x1`, then `+ x2`, where x1 is
    what this rank holds and the others are received; this rank stands in it exactly once.
    `R3<2`: receive the sum from rank 2. `P4-7>1`: pieces 4 to 7, in one message.
    """

    action: Action
    piece: int
    ranks: tuple[int, ...]
    length: int = 1

    def __str__(self) -> str:
        sign, between = _SIGN[self.action]
        to = f"-{self.piece + self.length - 1}" if self.length > 1 else ""
        return f"{self.action.value}{self.piece}{to}{sign}{between.join(map(str, self.ranks))}"

    @property
    def pieces(self) -> range:
        """The numbers of its pieces."""
        return range(self.piece, self.piece + self.length)

    @property
    def tag(self) -> int:
        """The number of its messages: 2 * its first piece for parts, one more for the sum.

        Between two ranks, in one direction, no other message of the plan has it.
        """
        return 2 * self.piece + (self.action in (Action.SUM, Action.TAKE))

    def sources(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that `rank` receives from, in the order of addition; none for a send."""
        if self.action.sends:
            return ()
        return tuple(one for one in self.ranks if one != rank)

    @staticmethod
    def parse(text: str) -> CollectiveOp:
        """The op that `text` stands for; raises BadInput for any other text."""
        return _parsed(text)


@lru_cache(maxsize=1 << 14)
def _parsed(text: str) -> CollectiveOp:
    match = _TEXT.fullmatch(text)
    if match:
        letter, piece, last, _, ranks = match.groups()
        numbers = tuple(int(one) for one in re.split("[,+]", ranks))
        length = 1 + int(last or piece) - int(piece)
        op = CollectiveOp(Action(letter), int(piece), numbers, length)
        if str(op) == text:
            return op
    allowed = "such as P3>1,2 (send a part of piece 3), S3>1 (send its sum), A3=0+1, R3<2"
    raise BadInput("op of a collective", text, allowed)
