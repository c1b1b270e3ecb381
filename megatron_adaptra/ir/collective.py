"""Collective plans: which rank sends, adds and receives what; plain data that builders return.

The goal is an all-reduce, or one of its halves, a reduce-scatter or an all-gather of equal shards.
The buffer is cut into pieces. Each rank has a line of ops, and runs it in order:

- A send (`P`, `S`) takes what the rank holds of the piece at that moment, and is asynchronous: the
  line goes on. To several targets, it goes in their order. What is being sent must not change
  before it has left, so that an op that changes a piece waits for the earlier sends of that piece
  (or a copy was sent).
- An op of several pieces, `P4-7>1`, is one message: they lie side by side in the buffer.
- A receive (`A`, `R`) waits until its messages are there. It may be posted at any earlier moment,
  from the start of the collective on, into memory of its own: no receive depends on any op of its
  own rank. Only the addition, and what is written to the buffer, waits in line. An `A` adds from
  left to right, in whatever order its messages come, and rounds once, to the buffer's dtype.
- At its end a line waits until all it has sent has left.

Messages are identified by source, target and tag (`CollectiveOp.tag`: the first piece, and whether
it is a sum), which the check proves unique; so are the bits at the end, equal on all ranks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.user_files import parse_json
from megatron_adaptra.ir.collective_check import check_collective
from megatron_adaptra.ir.collective_op import Action, CollectiveOp, Goal

__all__ = ["Action", "CollectiveLine", "CollectiveOp", "CollectivePlan", "Goal"]

CollectiveLine = tuple[CollectiveOp, ...]
_HEAD = ("name", "weights", "why")  # all but the ops, and a goal other than an all-reduce


@dataclass(frozen=True)
class CollectivePlan:
    """`order[i]` is what rank i does, in order; `weights[j]` how large piece j is, of their sum.

    `name`: of the builder; `why`: one sentence for people; `goal`: what it is for. Whenever one is
    made or read, it is checked (`ir/collective_check.py`): raises BadInput that names rank, op and
    piece.
    """

    order: tuple[CollectiveLine, ...]
    weights: tuple[int, ...]
    name: str = ""
    why: str = ""
    goal: Goal = Goal.ALL_REDUCE

    def __post_init__(self) -> None:
        for key in ("name", "why"):
            if not isinstance(getattr(self, key), str):
                raise BadInput(f"collective plan's {key}", getattr(self, key), "it has to be text")
        if not self.order:
            raise BadInput("collective plan's ranks", 0, "at least 1")
        if not self.weights:
            raise BadInput("collective plan's weights", [], "one per piece, and at least 1 piece")
        for weight in self.weights:
            if not isinstance(weight, int) or isinstance(weight, bool) or not 0 < weight < 1 << 62:
                raise BadInput("collective plan's weight", weight, "a whole number of at least 1")
        check_collective(self.order, self.pieces, self.goal, self.owners)

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return len(self.order)

    @property
    def pieces(self) -> int:
        """Into how many pieces the buffer is cut."""
        return len(self.weights)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """By piece, the rank whose shard it is in; empty for an all-reduce, which has no shards.

        Raises BadInput for a piece that is in two shards.
        """
        if self.goal is Goal.ALL_REDUCE:
            return ()
        whole, ends = sum(self.weights), list(accumulate(self.weights))
        owners = []
        for piece, (end, weight) in enumerate(zip(ends, self.weights, strict=True)):
            owner = (end - weight) * self.ranks // whole
            if end * self.ranks > (owner + 1) * whole:
                allowed = f"each of {self.ranks} equal shards has pieces of its own"
                raise BadInput("collective plan's weights", f"piece {piece}", allowed)
            owners.append(owner)
        return tuple(owners)

    @property
    def tags(self) -> int:
        """Tags of messages are 0 to `tags` - 1."""
        return 2 * self.pieces

    def bounds(self, elements: int) -> tuple[int, ...]:
        """Where the pieces of a buffer of so many `elements` begin, and where the last one ends.

        Piece j is `[bounds[j], bounds[j + 1])`, its share of the weights, rounded to whole
        elements. It may be empty: then it has no messages.
        """
        whole = sum(self.weights)
        ends = accumulate(self.weights, initial=0)
        return tuple((2 * elements * end + whole) // (2 * whole) for end in ends)

    def text(self) -> str:
        """One head line, then one line per rank; `parse` reads it back exactly."""
        head = {"name": self.name, "weights": list(self.weights), "why": self.why}
        if self.goal is not Goal.ALL_REDUCE:
            head["goal"] = self.goal.value
        rows = [f"collective {json.dumps(head, sort_keys=True)}"]
        rows += [f"{i}: {' '.join(map(str, line))}".rstrip() for i, line in enumerate(self.order)]
        return "\n".join(rows) + "\n"

    @classmethod
    def parse(cls, text: str, ranks: int | None = None) -> CollectivePlan:
        """The plan of a `text` that `text()` has written, for so many `ranks`, or any number.

        Raises BadInput for any other text, and for a plan that is not proven.
        """
        first, *rows = text.splitlines() or [""]
        word, _, head = first.partition(" ")
        if word != "collective":
            raise BadInput("collective plan", first, "the first line starts with 'collective'")
        if ranks is not None and len(rows) != ranks:
            raise BadInput("collective plan", f"for {len(rows)} ranks", f"there are {ranks}")
        try:
            values: Any = parse_json(head)
        except ValueError:
            values = None
        if (
            not isinstance(values, dict)
            or values.keys() - {"goal"} != set(_HEAD)
            or not isinstance(values["weights"], list)
        ):
            allowed = f"the first line ends with a JSON object of {', '.join(_HEAD)}"
            raise BadInput("collective plan", first, allowed)
        goals = [goal.value for goal in Goal]
        if (goal := values.get("goal", Goal.ALL_REDUCE.value)) not in goals:
            raise BadInput("collective plan's goal", goal, f"one of {', '.join(goals)}")
        order = []
        for i, row in enumerate(rows):
            rank, colon, ops = row.partition(":")
            if rank != str(i) or not colon:
                raise BadInput("collective plan", row, f"line {i + 2} starts with '{i}:'")
            order.append(tuple(CollectiveOp.parse(one) for one in ops.split()))
        name, why = values["name"], values["why"]
        return cls(tuple(order), tuple(values["weights"]), name, why, Goal(goal))

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()

    def digest(self) -> str:
        """SHA-256 of the text form: equal digests mean equal plans."""
        return self._digest
