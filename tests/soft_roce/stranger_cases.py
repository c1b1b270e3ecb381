"""A peer that was written from docs/wire-protocol.md, and one that breaks it."""

from __future__ import annotations

from typing import Any

from soft_roce.cases import case
from soft_roce.verbs_pair import Pair, RankFixture, content, over, results, until

BIG = 300_000  # bytes: three pieces


def _first_record(fixture: RankFixture) -> str:
    until(lambda: bool(fixture.endpoint.records.last), "the path fails")
    return fixture.endpoint.records.last[0].why


def _host(fixture: RankFixture) -> str:
    work, memory = fixture.receive(7, BIG)
    over(work)
    assert memory[:BIG] == content(1, BIG)
    over(fixture.send(8, content(2, BIG)))
    small = [fixture.send(9, content(n, 100)) for n in range(500)]  # more than there are slots
    for one in small:
        over(one)
    counts = fixture.engine.counts(fixture.peer)
    assert counts.twice == 1, counts.twice
    return _first_record(fixture)


def _stranger(rendezvous: Any, _: Any) -> str:
    from soft_roce.verbs_peer import ALIVE, DATA, HAVE, LONGEST, Stranger, frame

    me = Stranger(rendezvous, 1, 0, "rail0b")
    data = content(1, BIG)
    for offset in reversed(range(0, BIG, LONGEST)):  # in any order
        piece = data[offset : offset + LONGEST]
        me.write(frame(DATA, 1, piece, total=BIG, offset=offset, tag=7))
    me.until(lambda: me.haves(1) == 1, "it has the message")
    me.write(frame(DATA, 1, data[:LONGEST], total=BIG, tag=7))  # again: it is dropped
    me.until(lambda: me.haves(1) == 2, "it says so again")
    me.until(lambda: me.message(8) is not None, "its message")
    assert me.message(8) == content(2, BIG)
    numbers = {one[4] for one in me.arrived if one[1] == DATA}
    me.write(*(frame(HAVE, number, total=1) for number in numbers))
    me.write(frame(ALIVE, 0), wants=True)
    slots = me.granted + len(me.used_there)
    me.until(lambda: me.more() == slots, "as many slots again")
    for _ in range(2 * slots):
        me.until(lambda: me.granted > 0, "a slot")
        me.write(frame(ALIVE, 0))
    confirmed = set(numbers)

    def small() -> bool:
        new = {one[4] for one in me.arrived if one[1] == DATA} - confirmed
        for few in (sorted(new)[n : n + 16] for n in range(0, len(new), 16)):
            me.until(lambda: me.granted > 0, "a slot")
            me.write(*(frame(HAVE, number, total=1) for number in few))
        confirmed.update(new)
        return len(confirmed) == len(numbers) + 500

    me.until(small, "all small messages")
    me.write(frame(DATA, 2, b"x", total=1, tag=7, magic=0x1234))
    me.connection.settimeout(60)
    return me.connection.recv(200).decode()


@case
def a_peer_written_from_the_page_of_the_wire_is_accepted() -> str:
    with Pair(_host, rails=1, fallback=False, stranger=_stranger) as pair:
        here, there = results(pair)
    assert here == there == "no frame begins here", (here, there)
    return here


def _connected_first_record(fixture: RankFixture) -> str:
    fixture.report("connected")
    return _first_record(fixture)


def _more_than_a_slot(me: Any, wire: Any) -> None:
    data = wire.frame(wire.DATA, 1, bytes(wire.LONGEST), total=wire.LONGEST, tag=7)
    me.write(*[wire.frame(wire.ALIVE, 0)] * 16, data)  # each is as it should be; one is too many


def _slots_unasked(me: Any, wire: Any) -> None:
    more = {"total": 16, "offset": me.slots.buf, "tag": me.slots.rkey}
    me.write(wire.frame(wire.MORE, 0, **more))


def _no_such_slot(me: Any, wire: Any) -> None:
    number, address, key = me.free_there[0]
    me.free_there[0] = number + me.granted, address, key  # the next one, had more been granted
    me.write(wire.frame(wire.ALIVE, 0))


def _too_many_back(me: Any, _: Any) -> None:
    me.free += 1000
    me.write()


def _cut(me: Any, wire: Any) -> None:
    me.write(wire.frame(wire.DATA, 1, bytes(100), total=100, tag=7)[:-1])


BREAKS = {  # against the protocol, and the reason that the other side has in its record
    _more_than_a_slot: "a write of more than a slot",
    _slots_unasked: "slots that were not asked for",
    _no_such_slot: "a write to a slot that there is not",
    _too_many_back: "more slots came back than were used",
    _cut: "a frame that is cut",
}


def _breaks(rendezvous: Any, pipe: Any) -> str:
    from soft_roce import verbs_peer

    me = verbs_peer.Stranger(rendezvous, 1, 0, "rail0b")
    breaks = list(BREAKS)[pipe.recv()]  # before it, the other rank may still look for a path
    breaks(me, verbs_peer)
    me.connection.settimeout(60)
    return me.connection.recv(200).decode()


@case
def each_break_of_the_protocol_ends_the_path_and_has_its_reason() -> None:
    for number, why in enumerate(BREAKS.values()):
        with Pair(_connected_first_record, rails=1, fallback=False, stranger=_breaks) as pair:
            assert pair.report(0) == "connected"
            pair.send(1, number)
            assert set(results(pair)) == {why}
