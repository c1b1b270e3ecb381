"""Proof that a collective plan is an all-reduce and cannot hang, by exact simulation.

What a rank holds of a piece is simulated as the set of ranks whose parts are in it, and as the
order in which they were added. Lines never look at the time, so that what an op receives does not
depend on it (Kahn 1974): one run, in any order of events, proves all. It is made with rendezvous
sends and receives that are posted as late as possible, which wait for most; a plan that passes
under them does so under eager sends, and with receives posted ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.collective_op import Action, CollectiveOp

Lines = Sequence[Sequence[CollectiveOp]]
_Message = tuple[int, int, int]  # source, target, tag


class _Value(NamedTuple):
    """Whose parts are in it, as bits; a number that values added in the same way share."""

    parts: int
    bits: int


def check_collective(order: Lines, pieces: int) -> None:
    """Raises BadInput unless every rank ends with the sum of all ranks, of all `pieces`.

    `order[i]` is the line of rank i. Proven: each op is possible, each message has one send and
    one receive and a tag of its own, each part is added exactly once, no partial sum is taken for
    a sum, all ranks have the same bits at the end (what is held has the buffer's dtype; one op
    rounds once), and no rank waits for ever, whether a send waits for its receive or not.
    """
    _check_shape(order, pieces)
    _check_messages(order)
    if stuck := _Run(order, pieces, rendezvous=True).stuck():
        sends = "eager and rendezvous" if _Run(order, pieces, rendezvous=False).stuck() else ""
        rank, waits = stuck
        _fail(rank, waits[0], f"hangs under {sends or 'rendezvous'} sends: {waits[1]}")


def _check_shape(order: Lines, pieces: int) -> None:
    ranks = len(order)
    for rank, line in enumerate(order):
        for op in line:
            if not (op.piece >= 0 and 1 <= op.length <= pieces - op.piece):
                _fail(rank, op, f"pieces are 0 to {pieces - 1}")
            if not all(0 <= one < ranks for one in op.ranks):
                _fail(rank, op, f"ranks are 0 to {ranks - 1}")
            if len(set(op.ranks)) < len(op.ranks):
                _fail(rank, op, "it names one rank twice")
            if op.action is Action.ADD:
                if rank not in op.ranks or len(op.ranks) < 2:
                    _fail(rank, op, f"it has to add what rank {rank} holds and what it receives")
            elif rank in op.ranks:
                _fail(rank, op, "a rank sends nothing to itself")
            elif op.action is Action.TAKE and len(op.ranks) != 1:
                _fail(rank, op, "the sum comes from one rank")


def _check_messages(order: Lines) -> None:
    """Sends and receives pair up, and no two messages have one source, target and tag."""
    sent: dict[_Message, tuple[int, CollectiveOp]] = {}
    received: dict[_Message, tuple[int, CollectiveOp]] = {}
    for rank, line in enumerate(order):
        for op in line:
            if op.action.sends:
                book, pairs = sent, [(rank, target, op.tag) for target in op.ranks]
            else:
                book, pairs = received, [(s, rank, op.tag) for s in op.sources(rank)]
            for message in pairs:
                if message in book:
                    what = "sends" if op.action.sends else "receives"
                    _fail(rank, op, f"it {what} what {book[message][1]} {what}, a second time")
                book[message] = rank, op
    for message, (rank, op) in sent.items():
        if message not in received:
            _fail(rank, op, f"rank {message[1]} does not receive it")
        if (other := received[message][1]).length != op.length:
            _fail(rank, op, f"rank {message[1]} receives other pieces, {other}")
    for message, (rank, op) in received.items():
        if message not in sent:
            _fail(rank, op, f"rank {message[0]} does not send it")


class _Run:
    """One run of all lines, as far as it goes; raises BadInput where values are wrong."""

    def __init__(self, order: Lines, pieces: int, rendezvous: bool) -> None:
        ranks = len(order)
        self.order, self.rendezvous, self.all = order, rendezvous, (1 << ranks) - 1
        self.sums: dict[tuple[int, ...], int] = {}  # how values were added -> their number
        self.held = [[_Value(1 << rank, rank)] * pieces for rank in range(ranks)]
        self.flying: dict[_Message, list[_Value]] = {}  # sent, not yet taken
        self.posted: set[_Message] = set()
        self.unposted: dict[tuple[int, int], list[_Message]] = {}  # rank, piece -> its sends
        self.waiting: dict[_Message, int] = {}  # what has to be sent or posted -> who waits
        self.at = [0] * ranks
        self.ready = deque(range(ranks))
        while self.ready:
            self.advance(self.ready.popleft())
        if not self.stuck():
            self.check_ends(pieces)

    def stuck(self) -> tuple[int, tuple[CollectiveOp, str]] | None:
        """A rank that cannot go on, the op it stands at and what it waits for, if there is one."""
        left = [r for r, line in enumerate(self.order) if self.at[r] < len(line)]
        if not left:
            return None
        rank = min(left, key=lambda r: (self.at[r], r))
        op = self.order[rank][self.at[rank]]
        source, target, _ = next(m for m, waiter in self.waiting.items() if waiter == rank)
        if source == rank:
            return rank, (op, f"rank {target} does not get to the receive of what was sent before")
        return rank, (op, f"rank {source} does not get to its send")

    def advance(self, rank: int) -> None:
        line = self.order[rank]
        while self.at[rank] < len(line):
            op = line[self.at[rank]]
            if op.action.sends:
                self.send(rank, op)
            elif not self.receive(rank, op):
                return
            self.at[rank] += 1

    def send(self, rank: int, op: CollectiveOp) -> None:
        values = self.held[rank][op.piece : op.piece + op.length]
        for piece, value in zip(op.pieces, values, strict=True):
            if op.action is Action.SUM and value.parts != self.all:
                missing = _names(self.all & ~value.parts)
                _fail(rank, op, f"it is not the sum yet, without the part of {missing}", piece)
            if op.action is Action.PART and value.parts == self.all:
                _fail(rank, op, "it is the sum already, which is sent by S", piece)
        for target in op.ranks:
            message = rank, target, op.tag
            self.flying[message] = values
            if self.rendezvous and message not in self.posted:
                for piece in op.pieces:
                    self.unposted.setdefault((rank, piece), []).append(message)
            self.wake(message)

    def receive(self, rank: int, op: CollectiveOp) -> bool:
        """Whether all was there that it needs."""
        sources = op.sources(rank)
        for source in sources:
            message = source, rank, op.tag
            if message not in self.posted:
                self.posted.add(message)
                self.wake((source, rank, ~op.tag))
        for source in sources:
            if (source, rank, op.tag) not in self.flying:
                self.waiting[source, rank, op.tag] = rank
                return False
        for piece in op.pieces if self.unposted else ():
            for _, target, tag in self.unposted.get((rank, piece), ()):
                if (rank, target, tag) not in self.posted:  # it is being sent, and must not change
                    self.waiting[rank, target, ~tag] = rank
                    return False
            self.unposted.pop((rank, piece), None)
        mine, values = self.held[rank], [self.flying.pop((s, rank, op.tag)) for s in sources]
        for i, piece in enumerate(op.pieces):
            if op.action is Action.ADD:
                received = iter(values)
                terms = [mine[piece] if one == rank else next(received)[i] for one in op.ranks]
                mine[piece] = self.added(rank, op, piece, terms)
            elif mine[piece].parts == self.all:
                _fail(rank, op, "it has the sum already", piece)
            else:
                mine[piece] = values[0][i]
        return True

    def added(self, rank: int, op: CollectiveOp, piece: int, terms: Sequence[_Value]) -> _Value:
        parts = 0
        for value in terms:
            if twice := parts & value.parts:
                _fail(rank, op, f"it adds the part of {_names(twice)} twice", piece)
            parts |= value.parts
        key = [value.bits for value in terms]
        key[:2] = sorted(key[:2])  # a + b and b + a have the same bits
        return _Value(parts, self.sums.setdefault(tuple(key), len(self.order) + len(self.sums)))

    def wake(self, message: _Message) -> None:
        rank = self.waiting.pop(message, None)
        if rank is not None:
            self.ready.append(rank)

    def check_ends(self, pieces: int) -> None:
        for piece in range(pieces):
            for rank, mine in enumerate(self.held):
                if missing := self.all & ~mine[piece].parts:
                    raise BadInput(
                        "collective plan",
                        f"piece {piece} of rank {rank}",
                        f"it ends without the part of {_names(missing)}",
                    )
                if mine[piece].bits != self.held[0][piece].bits:
                    raise BadInput(
                        "collective plan",
                        f"piece {piece} of rank {rank}",
                        "its parts were added in another order than on rank 0: other bits",
                    )


def _fail(rank: int, op: CollectiveOp, why: str, piece: int | None = None) -> NoReturn:
    where = f"{op} of rank {rank}, piece {op.piece if piece is None else piece}"
    raise BadInput("collective plan", where, why)


def _names(parts: int) -> str:
    ranks = [str(rank) for rank in range(parts.bit_length()) if parts >> rank & 1]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
