"""What connections take of a process: counted before, and no more than was counted."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import socket

import pytest
import torch
from patience import PATIENCE
from transport.ranks import Processes, RankFixture

from megatron_adaptra.execute.small.hierarchical import Links, descriptors_of
from megatron_adaptra.transport.connect import new_devices
from megatron_adaptra.transport.descriptors import (
    DEVICE,
    LINKS,
    SPARE,
    descriptors_left,
    make_room,
    room,
    too_few,
)
from megatron_adaptra.transport.gloo import GlooTransport, open_links
from megatron_adaptra.transport.wire import GlooWire

RANKS = 6
STAGES = (0, 0, 1, 1, 1, 2)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def listening() -> set[str]:
    """Local addresses on which this process waits for connections."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            inodes.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
    found = set()
    for kind in ("tcp", "tcp6"):
        with open(f"/proc/net/{kind}") as table:
            rows = [line.split() for line in table][1:]
        found |= {row[1] for row in rows if row[3] == "0A" and int(row[9]) in inodes}
    return found


def opens_few(rank_fixture: RankFixture) -> tuple[list[int], int, int]:
    """What a star, and all-gathers beside it, take of a rank whose soft limit is used up."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    taken, before, ports = descriptors(), threads(), listening()
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 2, hard))
    wire = GlooWire()
    devices = wire.devices
    star = [(0, member) for member in range(1, RANKS)]
    connections = open_links(list(range(RANKS)), star, "star", "member", devices)
    counts = [descriptors() - taken]
    group = functools.partial(wire.group, timeout=PATIENCE)
    links = Links(group, rank_fixture.rank, STAGES, [str(r) for r in range(RANKS)], PATIENCE)
    counts += [descriptors() - taken - counts[0], threads() - before, len(listening() - ports)]
    transport = GlooTransport(*connections)
    for peer in range(1, RANKS) if rank_fixture.rank == 0 else [0]:
        buffer = torch.empty(1)
        works = [
            transport.irecv(buffer, peer, 7),
            transport.isend(torch.full((1,), float(rank_fixture.rank)), peer, 7),
        ]
        for work in works:
            work.wait(PATIENCE)
        assert buffer.item() == peer
    gathered = links.open(8).run(torch.tensor([rank_fixture.rank], dtype=torch.uint8))
    assert [value.tolist() for value in gathered] == [[rank] for rank in range(RANKS)]
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    rank_fixture.meet()
    transport.close()
    links.close()
    wire.close()
    del connections, links, transport, devices, works, work
    return counts, raised - taken, threads() - before + descriptors() - taken


def test_connections_share_a_port_and_a_thread_and_take_a_descriptor_each() -> None:
    with Processes(opens_few, ranks=RANKS) as processes:
        found = [processes.result(rank) for rank in range(RANKS)]
    for rank, (counts, raised, left) in enumerate(found):
        star, links, made, ports = counts
        assert star <= DEVICE + (RANKS - 1 if rank == 0 else 1)
        assert links <= descriptors_of(STAGES) - DEVICE
        assert (made, ports) == (1, 1)
        assert raised <= star + descriptors_of(STAGES) + SPARE, "no higher than is needed"
        assert left <= 0, "more is open than before"


def test_a_thousand_members_fit_or_an_error_names_the_limit() -> None:
    """Four stages of 250; of a limit stock Megatron has taken 100."""
    stages = [rank * 4 // 1000 for rank in range(1000)]
    least = 999 + LINKS + DEVICE
    for most, fits in ((1024 - 100 - SPARE, False), (least - 1, False), (least, True)):
        left = descriptors_left([0] * 1000, [most] * 1000)
        assert (min(left) >= 0) is fits
        words = too_few(left)
        assert (words == "") is fits
        assert fits or ("rank 0 " in words and "ulimit -Hn" in words)
    left = descriptors_left([0] * 1000, [4096 - 100 - SPARE] * 1000)
    assert descriptors_of(stages) <= min(left) // 4, "their small collectives, too"
    replicas = descriptors_left([rank % 10 for rank in range(1000)], [1024 - 100 - SPARE] * 1000)
    assert too_few(replicas) == ""


def test_the_limit_is_raised_to_what_is_needed_and_never_above_the_hard_one() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"a process may open {hard} files")
    child = os.fork()  # a process cannot raise its hard limit again
    if child == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))
        taken, left, limits = descriptors(), room(), []
        for count in (512 - taken - SPARE, 600 - taken - SPARE, left, left + 1):
            make_room(count)
            limits.append(resource.getrlimit(resource.RLIMIT_NOFILE))
        right = [(512, 1024), (600, 1024), (1024, 1024), (1024, 1024)]
        os._exit((left, limits) != (1024 - taken - SPARE, right))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_only_the_named_interface_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, set[str]] = {}
    for _, name in socket.if_nameindex():
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        before = listening()
        try:
            devices = new_devices()
        except RuntimeError:
            continue  # it has no address
        found[name] = {address.partition(":")[0] for address in listening() - before}
        del devices
    assert "lo" in found
    for name, addresses in found.items():
        assert len(addresses) == 1
        assert addresses.isdisjoint({"0" * 8, "0" * 32}), "any address"
        assert all(addresses != other for key, other in found.items() if key != name)
