"""Chains of ranks that wait for each other, from what each has written: who is at their end."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from megatron_adaptra.ir.op import Kind, Op

_SHOWN = 3  # ranks at the end of chains
SILENT = "has reported no wait: it is stopped, dead, cut off or still at work"


@dataclass(frozen=True)
class Waiting:
    """A note describes what one rank does while nothing moves; all ranks can read it.

    `who`: `stage 1 (rank 1) on host`. `iteration`: the one under way. `does`: `waits for F3 from
    stage 0 (rank 0)`. `waits`: global ranks of which it needs one or all; none where it needs no
    other rank, None where that is not known. `together`: they are in one collective. `op`: of the
    message that it waits for, else empty. `done`: messages sent and awaited in the iteration.
    `under_way`: the op that it has begun, if that is known.
    """

    who: str
    iteration: int
    does: str
    waits: tuple[int, ...] | None
    together: bool = False
    op: str = ""
    done: tuple[str, ...] = ()
    under_way: str = ""

    def dump(self) -> str:
        """Return the text that `load` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Waiting:
        """Return the note in `text`. Raises ValueError, TypeError or KeyError for another text."""
        data = json.loads(text)
        waits = None if data["waits"] is None else tuple(map(int, data["waits"]))
        return cls(**{**data, "waits": waits, "done": tuple(data["done"])})


Notes = Mapping[int, Waiting]


@dataclass(frozen=True)
class Ends:
    """An answer holds, of chains that begin at one rank, the ranks at their ends.

    `ranks`: they need no other rank, or have no note. `reached`: all on the way. `unknown`: one of
    these needs a rank that is not known.
    """

    ranks: tuple[int, ...]
    reached: frozenset[int]
    unknown: bool


def ends(start: int, notes: Notes) -> Ends:
    """Follow the waits of `notes`, by rank, from rank `start`."""
    reached, todo, found, unknown = {start}, [start], [], False
    for rank in todo:
        waits = notes[rank].waits if rank in notes else ()
        unknown |= waits is None
        if waits == ():
            found.append(rank)
        new = [peer for peer in waits or () if peer not in reached]
        reached.update(new)
        todo += new
    return Ends(tuple(found), frozenset(reached), unknown)


def describe_ends(
    start: int, notes: Notes, world: Collection[int], name: Callable[[int], str]
) -> str:
    """Describe who keeps the job waiting, as seen from rank `start`, and the first missing op.

    `name`: of a rank without a note. Where chains end nowhere and a wait is unknown, all ranks of
    the `world` are looked at.
    """
    at = ends(start, notes)
    last = at.ranks
    if not last and at.unknown:
        last = tuple(rank for rank in world if rank not in notes or notes[rank].waits == ())

    def called(rank: int) -> str:
        return notes[rank].who if rank in notes else name(rank)

    if last:
        whom = [
            f"{called(rank)}, which {notes[rank].does if rank in notes else SILENT}"
            for rank in last[:_SHOWN]
        ]
        more = f" and {len(last) - _SHOWN} more" if len(last) > _SHOWN else ""
        text = f"the job waits for {'; and for '.join(whom)}{more}"
        first = next(filter(None, (_missing(rank, notes, called) for rank in last)), "")
        return text + (f"; first missing op: {first}" if first else "")
    if lost := _lost_message(notes, at.reached):
        waiter, sender = lost
        op = notes[waiter].op
        return (
            f"the job waits for the message {op} from {called(sender)}, which has sent it, to "
            f"{called(waiter)}: it has not arrived; first missing op: {op} of {called(waiter)}"
        )
    if all(notes[rank].together for rank in at.reached if rank in notes):
        return (
            f"all {len(at.reached)} ranks are in that collective: none is missing, its messages "
            f"do not arrive; first missing op: this collective"
        )
    return "no rank is missing: those that wait do so for each other, or for their GPUs"


def _missing(rank: int, notes: Notes, called: Callable[[int], str]) -> str:
    """Return the op of `rank` at the end of a chain that the others need first."""
    if rank in notes and notes[rank].under_way:
        return f"{notes[rank].under_way} of {called(rank)}"
    needing = [note for note in notes.values() if note.waits is not None and rank in note.waits]
    ops = sorted((note.op for note in needing if note.op), key=_order)
    if ops:
        return f"{ops[0].removeprefix('S')} of {called(rank)}"
    together = next((note for note in needing if note.together), None)
    if together:
        return f"the part of {called(rank)} in what others are in"
    return f"what {called(rank)} is in" if rank in notes else ""


def _order(op: str) -> tuple[bool, int]:
    return op.startswith("S"), Op.parse(op).microbatch


def _lost_message(notes: Notes, ranks: Iterable[int]) -> tuple[int, int] | None:
    """Return a rank that waits for a message, and its peer, which has sent it; None without one."""
    for rank in ranks:
        note = notes.get(rank)
        if note is None or not note.op or not note.waits or note.op.startswith("S"):
            continue
        op = Op.parse(note.op)
        sent = op._replace(kind=Kind.SEND_F if op.kind is Kind.F else Kind.SEND_B)
        (peer, *_) = note.waits
        if peer in notes and str(sent) in notes[peer].done:
            return rank, peer
    return None


def needed(start: int, notes: Notes, world: Sequence[int]) -> list[int]:
    """Return the ranks that are not in `notes`, and that `describe_ends` would ask for.

    `start`, `world`: as there.
    """
    at = ends(start, notes)
    found = [rank for rank in at.ranks if rank not in notes]
    if not at.ranks and at.unknown:
        found = [rank for rank in world if rank not in notes]
    return found
