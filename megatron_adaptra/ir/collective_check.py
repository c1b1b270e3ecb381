"""Proof that a collective plan reaches its goal and cannot hang, by exact simulation.

What a rank holds of a piece is simulated as the set of ranks whose parts are in it, and as the
order in which they were added. Lines never look at the time, so that what an op receives does not
depend on it (Kahn 1974): one run, in any order of events, proves all. It is made with rendezvous
sends and receives that are posted as late as possible, which wait for most; a plan that passes
under them does so under eager sends, and with receives posted ahead.

Messages and values are numbers here: plans for hundreds of ranks have hundreds of thousands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective_op import Action, CollectiveOp, Goal

Lines = Sequence[Sequence[CollectiveOp]]
_PART, _SUM, _ADD, _TAKE = Action.PART, Action.SUM, Action.ADD, Action.TAKE


def check_collective(order: Lines, pieces: int, goal: Goal, owners: Sequence[int]) -> None:
    """Raise BadInput unless every rank ends with what the `goal` demands of all `pieces`.

    `order[i]` is the line of rank i; `owners[j]` the rank whose shard piece j is in, where there
    are shards. Proven: each op is possible, each message has one send and one receive and a tag of
    its own, each part is added exactly once, no partial sum is taken for a sum, all ranks have the
    same bits at the end (what is held has the buffer's dtype; one op rounds once), and no rank
    waits for ever, whether a send waits for its receive or not. A reduce-scatter sums no shard on
    another rank than its own; an all-gather adds nothing.
    """
    _check_shape(order, pieces, goal)
    messages = _Messages(order, pieces)
    if stuck := _Run(order, messages, goal, owners, rendezvous=True).stuck():
        eager = _Run(order, messages, goal, owners, rendezvous=False).stuck()
        rank, op, waits = stuck
        sends = "eager and rendezvous" if eager else "rendezvous"
        _fail(rank, op, f"hangs under {sends} sends: {waits}")


def _check_shape(order: Lines, pieces: int, goal: Goal) -> None:
    numbers = range(len(order))
    for rank, line in enumerate(order):
        for op in line:
            action, piece, ranks, length = op
            if not (piece >= 0 and 1 <= length <= pieces - piece):
                _fail(rank, op, f"pieces are 0 to {pieces - 1}")
            for one in ranks:
                if one not in numbers:
                    _fail(rank, op, f"ranks are 0 to {len(order) - 1}")
            if len(ranks) > 1 and len(set(ranks)) < len(ranks):
                _fail(rank, op, "it names one rank twice")
            if goal is Goal.ALL_GATHER and action in (_PART, _ADD):
                _fail(rank, op, "an all-gather adds nothing: S sends, R receives")
            if action is _ADD:
                if rank not in ranks or len(ranks) < 2:
                    _fail(rank, op, f"it has to add what rank {rank} holds and what it receives")
            elif rank in ranks:
                _fail(rank, op, "a rank sends nothing to itself")
            elif action is _TAKE and len(ranks) != 1:
                _fail(rank, op, "the sum comes from one rank")


class _Messages:
    """The messages of all ops, as numbers: `of[rank][i]` are those of op i of that rank's line.

    Raises BadInput unless each is sent once and received once, with the same pieces.
    """

    def __init__(self, order: Lines, pieces: int) -> None:
        self.ranks, self.tags = len(order), 2 * pieces
        self.of: list[list[tuple[int, ...]]] = []
        sent: dict[int, int] = {}  # message -> how many pieces it has
        received: dict[int, int] = {}
        count = 0
        for rank, line in enumerate(order):
            mine: list[tuple[int, ...]] = []
            for op in line:
                action, piece, ranks, length = op
                if action is _PART or action is _SUM:
                    first, step, book = rank * self.ranks * self.tags, self.tags, sent
                else:
                    first, step, book = rank * self.tags, self.ranks * self.tags, received
                first += 2 * piece + (action is _SUM or action is _TAKE)
                if len(ranks) == 1:  # most have one, and no more time than need be
                    numbers: tuple[int, ...] = (first + step * ranks[0],)
                else:
                    numbers = tuple([first + step * one for one in ranks if one != rank])
                for number in numbers:
                    book[number] = length
                count += len(numbers)
                mine.append(numbers)
            self.of.append(mine)
        if sent != received or count != 2 * len(sent):
            self._explain(order)

    def ends(self, number: int) -> tuple[int, int]:
        """The source and the target of a message."""
        source, rest = divmod(number, self.ranks * self.tags)
        return source, rest // self.tags

    def _explain(self, order: Lines) -> None:
        """Raise BadInput for the first message that has no partner, or more than one."""
        sent: dict[int, tuple[int, CollectiveOp]] = {}
        received: dict[int, tuple[int, CollectiveOp]] = {}
        for rank, line in enumerate(order):
            for op, numbers in zip(line, self.of[rank], strict=True):
                book, what = (sent, "sends") if op.action.sends else (received, "receives")
                for number in numbers:
                    if number in book:
                        _fail(rank, op, f"it {what} what {book[number][1]} {what}, a second time")
                    book[number] = rank, op
        for number, (rank, op) in sent.items():
            target = self.ends(number)[1]
            if number not in received:
                _fail(rank, op, f"rank {target} does not receive it")
            if (other := received[number][1]).length != op.length:
                _fail(rank, op, f"rank {target} receives other pieces, {other}")
        for number, (rank, op) in received.items():
            if number not in sent:
                _fail(rank, op, f"rank {self.ends(number)[0]} does not send it")
        raise AssertionError("messages pair up, after all")


class _Run:
    """One run of all lines, as far as it goes; raises BadInput where values are wrong.

    A value is a number that stands for an order of additions: equal numbers mean equal bits.
    `parts[value]` has a bit for each rank whose part is in it. In an all-gather a shard counts as
    the sum on its own rank, and as nothing on all others.
    """

    def __init__(
        self,
        order: Lines,
        messages: _Messages,
        goal: Goal,
        owners: Sequence[int],
        rendezvous: bool,
    ) -> None:
        ranks, pieces = messages.ranks, messages.tags // 2
        self.order, self.messages, self.rendezvous = order, messages, rendezvous
        self.goal, self.owners = goal, owners
        self.all = (1 << ranks) - 1
        self.parts = [1 << rank for rank in range(ranks)]
        self.sums: dict[tuple[int, ...], int] = {}  # values, as they were added -> the new value
        self.held = [[rank] * pieces for rank in range(ranks)]
        if goal is Goal.ALL_GATHER:
            self.parts = [0, self.all]
            self.held = [[int(owner == rank) for owner in owners] for rank in range(ranks)]
        self.flying: dict[int, list[int]] = {}  # sent, not yet taken: the values
        self.posted: set[int] = set()
        self.unposted: list[dict[int, list[int]]] = [{} for _ in order]  # piece -> its sends
        # A message that has to be sent, or posted (~message), and the rank that waits for it.
        self.waiting: dict[int, int] = {}
        self.at = [0] * ranks
        self.there = [0] * ranks  # of the messages of the op that a rank stands at
        self.ready = deque(range(ranks))
        while self.ready:
            self.advance(self.ready.popleft())
        if not self.stuck():
            self.check_ends(pieces)

    def stuck(self) -> tuple[int, CollectiveOp, str] | None:
        """A rank that cannot go on, the op it stands at and what it waits for, if there is one."""
        left = [r for r, line in enumerate(self.order) if self.at[r] < len(line)]
        if not left:
            return None
        rank = min(left, key=lambda r: (self.at[r], r))
        op = self.order[rank][self.at[rank]]
        waits = next(message for message, waiter in self.waiting.items() if waiter == rank)
        if waits < 0:
            target = self.messages.ends(~waits)[1]
            return rank, op, f"rank {target} does not get to the receive of what was sent before"
        return rank, op, f"rank {self.messages.ends(waits)[0]} does not get to its send"

    def advance(self, rank: int) -> None:
        """Run the line of `rank` up to the first op that has to wait."""
        line, messages, i = self.order[rank], self.messages.of[rank], self.at[rank]
        while i < len(line):
            op = line[i]
            if op.action is _PART or op.action is _SUM:
                self.send(rank, op, messages[i])
            elif not self.receive(rank, op, messages[i]):
                break
            i += 1
        self.at[rank] = i

    def send(self, rank: int, op: CollectiveOp, messages: Sequence[int]) -> None:
        action, first, _, length = op
        values = self.held[rank][first : first + length]
        for i, value in enumerate(values):
            if (self.parts[value] == self.all) is (action is _SUM):
                continue
            if action is _SUM and self.goal is Goal.ALL_GATHER:
                _fail(rank, op, "it does not have it yet", first + i)
            if action is _SUM:
                missing = _names(self.all & ~self.parts[value])
                _fail(rank, op, f"it is not the sum yet, without the part of {missing}", first + i)
            _fail(rank, op, "it is the sum already, which is sent by S", first + i)
        for message in messages:
            self.flying[message] = values
            if message in self.waiting:
                self.ready.append(self.waiting.pop(message))
        if self.rendezvous and (late := [one for one in messages if one not in self.posted]):
            for piece in range(first, first + length):
                self.unposted[rank].setdefault(piece, []).extend(late)

    def receive(self, rank: int, op: CollectiveOp, messages: Sequence[int]) -> bool:
        """Run the receive `op` of `rank` and return True, or False where it has to wait."""
        action, first, ranks, length = op
        there, waiting = self.there[rank], self.waiting
        if not there:
            self.posted.update(messages)
            for message in messages:
                if ~message in waiting:
                    self.ready.append(waiting.pop(~message))
        while there < len(messages):
            if messages[there] not in self.flying:
                waiting[messages[there]], self.there[rank] = rank, there
                return False
            there += 1
        if unposted := self.unposted[rank]:
            for piece in range(first, first + length):
                for message in unposted.get(piece, ()):
                    if message not in self.posted:  # it is being sent, and must not change
                        waiting[~message], self.there[rank] = rank, there
                        return False
                unposted.pop(piece, None)
        self.there[rank] = 0
        mine, values = self.held[rank], [self.flying.pop(message) for message in messages]
        if action is _ADD:
            values.insert(ranks.index(rank), mine[first : first + length])
            for i, terms in enumerate(zip(*values, strict=True)):
                mine[first + i] = self.added(rank, op, first + i, terms)
            return True
        for i, value in enumerate(values[0]):
            if self.parts[mine[first + i]] == self.all:
                _fail(rank, op, "it has the sum already", first + i)
            mine[first + i] = value
        return True

    def added(self, rank: int, op: CollectiveOp, piece: int, terms: Sequence[int]) -> int:
        """The value of the sum of `terms`, from left to right."""
        parts = 0
        for value in terms:
            if twice := parts & self.parts[value]:
                _fail(rank, op, f"it adds the part of {_names(twice)} twice", piece)
            parts |= self.parts[value]
        # a + b and b + a have the same bits.
        key = (*sorted(terms[:2]), *terms[2:])
        value = self.sums.setdefault(key, len(self.parts))
        if value == len(self.parts):
            self.parts.append(parts)
        return value

    def check_ends(self, pieces: int) -> None:
        for piece in range(pieces):
            for rank, mine in enumerate(self.held):
                if wrong := self.wrong_end(piece, rank, mine[piece]):
                    raise BadInput("collective plan", f"piece {piece} of rank {rank}", wrong)

    def wrong_end(self, piece: int, rank: int, value: int) -> str:
        """Return why what `rank` holds of a `piece` at the end misses the goal, or empty text."""
        missing = self.all & ~self.parts[value]
        if self.goal is Goal.REDUCE_SCATTER and rank != (owner := self.owners[piece]):
            return "" if missing else f"it has the sum of the shard of rank {owner}"
        if missing and self.goal is Goal.ALL_GATHER:
            return f"it ends without the shard of rank {self.owners[piece]}"
        if missing:
            return f"it ends without the part of {_names(missing)}"
        if self.goal is Goal.ALL_REDUCE and value != self.held[0][piece]:
            return "its parts were added in another order than on rank 0: other bits"
        return ""


def _fail(rank: int, op: CollectiveOp, why: str, piece: int | None = None) -> NoReturn:
    where = f"{op} of rank {rank}, piece {op.piece if piece is None else piece}"
    raise BadInput("collective plan", where, why)


def _names(parts: int) -> str:
    ranks = [str(rank) for rank in range(parts.bit_length()) if parts >> rank & 1]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
