"""Two queue pairs that connect with each other, over the devices of verbs.py."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from ipaddress import IPv6Address
from pathlib import Path
from typing import TypeAlias
from unittest.mock import patch

from fakes.controlled_cuda.gpu import until
from fakes.controlled_verbs.verbs import DEVICES, Change, Fabric
from patience import PATIENCE

from benchmarks.folder_rendezvous import FolderRendezvous
from megatron_adaptra.transport.engine import bindings, events
from megatron_adaptra.transport.engine.bindings import new_engine, ports
from megatron_adaptra.transport.engine.dial import open_rail
from megatron_adaptra.transport.engine.endpoint import CONNECTIONS, Endpoint
from megatron_adaptra.transport.engine.rails import Rail, chosen

INIT, RECEIVES, SENDS = 1, 2, 3  # states
IPV4 = "::ffff:10.0.0.{}"
# Of a port: addresses with the version of RoCE that they are for, by index. Their last byte is put
# for {}: 1 for the first port, 2 for the second one.
Gids: TypeAlias = dict[int, tuple[str, int]]
Environ: TypeAlias = Mapping[str, str]


class Pair:
    """An engine with a queue pair of each of the two devices, one for each of two peers.

    `environ`: of both ends; `other`: of the second one, where it has another one.
    """

    def __init__(self, environ: Mapping[str, str], other: Mapping[str, str] | None = None) -> None:
        self.engine = new_engine(1 << 20, 1 << 20, 5.0)
        self.rails = []
        for rank, variables in enumerate((environ, environ if other is None else other)):
            self.engine.add_peer(rank, f"rank {rank}")
            with patch.dict(os.environ, variables):
                named = {"NCCL_IB_HCA": "=" + DEVICES[rank]}
                self.rails += chosen(ports(), os.environ | named)[:1]

    def opened(self, rank: int) -> bindings.VerbsPath:
        return open_rail(self.engine, rank, self.rails[rank])

    def connected(self) -> None:
        here, there = self.opened(0), self.opened(1)
        here.connect(there.card())
        there.connect(here.card())

    def refused(self) -> list[str]:
        """Why no end connects with the other one: the words of the first, and of the second."""
        here, there = self.opened(0), self.opened(1)
        return [_why_not(here, there), _why_not(there, here)]

    def close(self) -> None:
        self.engine.close("the test is over")


def _why_not(one: bindings.VerbsPath, other: bindings.VerbsPath) -> str:
    try:
        one.connect(other.card())
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it has connected")


def changed(
    fabric: Fabric, environ: Mapping[str, str], other: Mapping[str, str] | None = None
) -> list[Change]:
    """By a connection: of the one end to receive and to send, then of the other one."""
    before = len(fabric.changes())
    pair = Pair(environ, other)
    pair.connected()
    found = fabric.changes()[before:]
    pair.close()
    states = [change.state for change in found]
    assert states == [INIT, INIT, RECEIVES, SENDS, RECEIVES, SENDS]
    return found


def put(fabric: Fabric, *of_ports: Gids) -> None:
    """Have ports of Ethernet with these addresses, besides those that they have."""
    for device, gids in enumerate(of_ports):
        fabric.port(device)
        for index, (address, version) in gids.items():
            fabric.gid(device, index, address.format(device + 1), version)


def indices(
    fabric: Fabric, gids: tuple[Gids, Gids], environs: tuple[Environ, Environ]
) -> list[int]:
    """Of the two addresses that a connection is between; each end names the other end's own."""
    put(fabric, *gids)
    ends = [change for change in changed(fabric, *environs) if change.state == RECEIVES]
    for n, end in enumerate(ends):
        address, _ = gids[1 - n][ends[1 - n].gid_index]
        assert end.gid == IPv6Address(address.format(2 - n)).packed
    return [end.gid_index for end in ends]


def refusals(
    fabric: Fabric, gids: tuple[Gids, Gids], environs: tuple[Environ, Environ]
) -> list[str]:
    """The words of both ends, neither of which asks its device for a way."""
    put(fabric, *gids)
    pair = Pair(*environs)
    words = pair.refused()
    assert all(change.state < RECEIVES for change in fabric.changes())
    pair.close()
    return words


@contextmanager
def two_ranks(rails: Sequence[Rail], opens: bool) -> Iterator[tuple[list[Endpoint], list[str]]]:
    """Endpoints, each with one of the `rails`, and what is logged; whether these connect is known.

    `opens`: they do.
    """
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder, patch.object(events, "log_line", lines.append):
        rendezvous = FolderRendezvous(Path(folder))
        ends = [
            Endpoint(rank, "127.0.0.1", str(rank), rendezvous, PATIENCE, ports=[rails[rank]])
            for rank in (0, 1)
        ]
        ends[1].connect([0])
        ends[0].connect([1])
        ends[1].open_rails(0)  # the higher rank dials
        for rank, end in enumerate(ends):
            counts = partial(end.engine.counts, 1 - rank)
            until(lambda of=counts: of().paths == CONNECTIONS + opens, "all paths are there")
        yield ends, lines
        if not opens:
            until(lambda: bool(lines), "it is logged")
        for end in ends:
            end.close()
