"""An all-gather on two levels, between members of which several are of one stage.

Only one member of each stage, its leader, sends over the slow links. Members send to their leader,
leaders send each other the payloads of their stages, and their members those of all: still one
delay of the slowest link, and no more messages over it than there are pairs of stages.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch

from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import PeerLost
from megatron_adaptra.base.exits import wait_at_exit
from megatron_adaptra.execute.small.all_gather import AllGather, FlatAllGather
from megatron_adaptra.transport.connect import Pairs
from megatron_adaptra.transport.descriptors import DEVICE, make_room
from megatron_adaptra.transport.wire import Connect

_SIZE = 8  # bytes that say how many a payload has


class Links:
    """Connections between members, of whom number i is of stage `stages[i]`.

    Where every stage has one member they are direct. Made by all members together.

    Args:
        connect: makes a group of some members, which are given by number, under a name; it raises
            for one that does not come.
        me: this member's number.
        stages: the stage of each member, by number.
        names: of the members, by number, for errors.
        timeout: seconds that an all-gather waits for a member at least.

    `parts`: the numbers of each stage's members, the leader first. `groups`: c10d backends on the
    CPU: of all members where they are direct; else from the members of this stage to their leader,
    from the leader to them, and, on a leader alone, between all leaders.
    """

    def __init__(
        self,
        connect: Connect,
        me: int,
        stages: Sequence[int],
        names: Sequence[str],
        timeout: float,
    ) -> None:
        self.me, self.names, self.timeout = me, tuple(names), timeout
        self._opened: list[AllGather] = []
        parts = _parts(stages)
        self.parts = list(parts.values())
        make_room(descriptors_of(stages))

        def star(way: str, members: Sequence[int]) -> Any:
            """Between the first of `members` and each other one."""
            number = members.index(me)
            ends = range(1, len(members)) if number == 0 else [number]
            made = {e: connect(f"{way} {members[e]}", (members[0], members[e])) for e in ends}
            return Pairs(number, made if number == 0 else {0: made[number]})

        if len(parts) == len(stages):
            self.groups = [connect("all", range(len(stages)))]
        else:
            # Two in a stage: gloo closes a connection when a wait for its other end times out.
            mine, leaders = parts[stages[me]], [part[0] for part in self.parts]
            self.groups = [star(way, mine) for way in ("up", "down")]
            self.groups += [connect("across", leaders)] if me in leaders else []

    def open(self, nbytes: int) -> AllGather:
        """One more AllGather, of at most `nbytes` from each. All members open the same."""
        channel = len(self._opened)
        opened: AllGather
        if len(self.parts) == len(self.names):
            opened = FlatAllGather(self.groups[0], self.names, nbytes, self.timeout, channel)
        else:
            opened = HierarchicalAllGather(self, nbytes, channel)
        self._opened.append(opened)
        return opened

    def close(self) -> None:
        """End the connections, once what was sent is taken: others may still wait for it."""
        for opened in self._opened:
            opened.close()
        self._opened, self.groups = [], []


def descriptors_of(stages: Sequence[int]) -> int:
    """The most that Links takes of a member, with `stages` by member."""
    parts = _parts(stages)
    within = 2 * (max(map(len, parts.values())) - 1) if len(parts) < len(stages) else 0
    return DEVICE + within + len(parts) - 1


def _parts(stages: Sequence[int]) -> dict[int, list[int]]:
    """The members of each stage."""
    parts: dict[int, list[int]] = {}
    for member, stage in enumerate(stages):
        parts.setdefault(stage, []).append(member)
    return parts


class HierarchicalAllGather(AllGather):
    """The two-level all-gather; Links opens it.

    Args:
        links: of this member.
        nbytes: of one member's longest payload.
        channel: keeps several all-gathers over the same links apart.

    A leader waits `links.timeout` seconds for each of its members. It waits `waits.CHAIN` longer
    for each other leader, and a member twice that for the result, so that those who wait for one
    that gives up get its error, which names the missing member, before they do.

    A leader's part is done by a thread from `start` on, for others may wait before it does: nobody
    waits in `start`. The timeout begins there, too.
    """

    def __init__(self, links: Links, nbytes: int, channel: int) -> None:
        self.me, self._parts, names, timeout = links.me, links.parts, links.names, links.timeout
        parts, mine = links.parts, next(part for part in links.parts if links.me in part)
        self._leads = self.me == mine[0]
        up, down, *across = links.groups
        ours, each = [names[member] for member in mine], nbytes + _SIZE
        nobody, leader, rest = range(0), range(1), range(1, len(mine))
        up_ends, down_ends = (leader, nobody), (nobody, leader)  # targets and sources
        if self._leads:
            up_ends, down_ends = (nobody, rest), (rest, nobody)
            leaders, most = [names[part[0]] for part in parts], max(map(len, parts))
            self._across = FlatAllGather(
                across[0], leaders, each * most, timeout + waits.CHAIN, channel
            )
        self._up = FlatAllGather(up, ours, nbytes, timeout, channel, *up_ends)
        self._down = FlatAllGather(
            down, ours, each * len(names), timeout + 2 * waits.CHAIN, channel, *down_ends
        )

    def start(self, payload: torch.Tensor) -> None:
        """Send `payload`, which must not change until `wait` returns."""
        self._leave()
        if not self._leads:
            self._up.start(payload)
            return
        gathered: Future[torch.Tensor] = Future()
        self._gathered = gathered

        def lead() -> None:
            try:
                gathered.set_result(self._lead(payload))
            except BaseException as error:
                gathered.set_exception(error)

        # A daemon: one that still waits must not keep a process that has failed from ending.
        thread = threading.Thread(target=lead, name="adaptra-all-gather", daemon=True)
        wait_at_exit(thread)
        thread.start()

    def wait(self) -> list[torch.Tensor]:
        """Raise PeerLost, which names the missing member on all others."""
        self._in_flight = False
        everything = self._gathered.result() if self._leads else self._down.wait()[0]
        values: dict[int, torch.Tensor] = {}
        at = 0
        for part in self._parts:
            sizes = struct.unpack_from(f"<{len(part)}q", everything.numpy(), at)
            at += _SIZE * len(part)
            end = at + sum(sizes)
            values.update(zip(part, everything[at:end].split(sizes), strict=True))
            at = end
        return [values[member].clone() for member in range(len(values))]

    def close(self) -> None:
        for one in (self._up, self._down, *([self._across] if self._leads else [])):
            one.close()

    def _lead(self, payload: torch.Tensor) -> torch.Tensor:
        """The values of all members, a stage after another."""
        try:
            ours = self._up.wait()
            ours[0] = payload
            sizes = bytearray(struct.pack(f"<{len(ours)}q", *(value.numel() for value in ours)))
            packed = torch.cat([torch.frombuffer(sizes, dtype=torch.uint8), *ours])
            everything = torch.cat(self._across.run(packed))
        except PeerLost as loss:
            self._across.send_error(loss)
            self._down.send_error(loss)
            raise
        self._down.start(everything)
        return everything
