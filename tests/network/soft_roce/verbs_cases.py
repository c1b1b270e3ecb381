"""Messages over rails that are there, fail and come back: `CASES`, by name.

Each raises what is wrong, and returns what may interest a reader. `Size.full`: as much as the
engine's failure suite asks for, 200 messages and a minute without a rail; else a part of that.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patience import decided
from soft_roce.verbs_pair import (
    ENDS,
    MIB,
    MTU,
    PATHS,
    PATIENCE,
    RAILS,
    Pair,
    RankFixture,
    content,
    link,
    lose,
    mended,
    over,
    packets,
    results,
)


class Size:
    full = False


CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


@case
def ports_are_found_with_a_reason_for_their_address() -> None:
    from megatron_adaptra.transport.engine.bindings import ports

    found = {port.device: port for port in ports()}
    assert sorted(found) == ["rail0a", "rail0b", "rail1a", "rail1b"]
    for n, (_, port) in enumerate(sorted(found.items())):
        assert (port.active, port.link, port.why) == (True, "Ethernet", "RoCE v2, IPv4"), port
        assert port.gid[-4:] == bytes([10, n // 2, 0, 1 + n % 2])


@case
def pyverbs_sees_the_same_ports_and_their_counters() -> str:
    sys.path.append("/usr/lib/python3/dist-packages")
    import pyverbs.device  # noqa: F401  without it the case is skipped
    from soft_roce.verbs_devices import device_ports

    from megatron_adaptra.transport.engine.bindings import ports

    ours = {port.device: port for port in ports()}
    theirs = {port.device: port for port in device_ports()}
    assert sorted(ours) == sorted(theirs)
    for name, port in theirs.items():
        assert (port.port, port.state, port.link, port.mtu) == (1, "active", "Ethernet", MTU)
        gid, kind = port.gids[ours[name].gid_index]
        assert (bytes.fromhex(gid.replace(":", "")), kind) == (ours[name].gid, "RoCE v2")
    with Pair(_streams, PATHS, 20, MIB) as pair:
        for rank in range(2):
            pair.send(rank, "go on")
        assert [pair.report(rank) for rank in range(2)] == ["half", "half"]
        assert [wrong for wrong, _ in results(pair)] == [[], []]
    for port in device_ports():
        risen = port.counters["sent_pkts"] - theirs[port.device].counters["sent_pkts"]
        assert risen > 0, port
    return str(device_ports()[0])


HIDDEN = """
mount --bind /dev/null "$(ldconfig -p | sed -n 's/.*libibverbs.so.1 .*=> //p')"
exec "$0" -c '
from megatron_adaptra.transport.engine import _native, bindings
assert not bindings.missing() and not bindings.ports()
print(_native.verbs_missing())
'
"""


@case
def without_libibverbs_the_engine_is_there_and_has_no_rails() -> str:
    command = ["unshare", "--mount", "bash", "-ec", HIDDEN, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "libibverbs.so.1" in done.stdout, done.stdout
    return done.stdout.strip()


SIZES = (0, 1, 4096, 64 << 10, MIB, 16 * MIB)


def _sizes(fixture: RankFixture) -> tuple[list[tuple[int, int]], str]:
    fixture.until_paths(RAILS)
    fixture.report("connected")
    fixture.command()
    wrong = []
    for size in SIZES:
        receives = [fixture.receive(tag, size) for tag in range(4)]
        sends = [fixture.send(tag, content(10 * tag + fixture.rank, size)) for tag in range(4)]
        for tag, (work, memory) in enumerate(receives):
            over(work)
            if memory[:size] != content(10 * tag + fixture.peer, size):
                wrong.append((tag, size))
        for work in sends:
            over(work)
        fixture.report(size)
    return wrong, fixture.endpoint.through(fixture.peer)


@case
def messages_of_all_sizes_go_both_ways_over_both_rails() -> str:
    with Pair(_sizes, fallback=False) as pair:
        for rank in range(2):
            assert pair.report(rank) == "connected"
        before = [packets(rail, rank) for rail in range(RAILS) for rank in range(2)]
        for rank in range(2):
            pair.send(rank, "go")
        for size in SIZES:
            assert [pair.report(rank) for rank in range(2)] == [size, size]
        assert results(pair) == [
            ([], "+".join(f"rail{rail}{end}:1" for rail in range(RAILS))) for end in ENDS
        ]
        after = [packets(rail, rank) for rail in range(RAILS) for rank in range(2)]
    sent = [now - then for now, then in zip(after, before, strict=True)]
    needed = 4 * 17 * MIB / MTU  # of each rank
    for rank in range(2):
        assert sent[rank] + sent[2 + rank] >= needed, sent
        # A piece goes over the rail that is free first: a busy host may have made one slow.
        decided(f"each rail's part of {sent}", min(sent[rank], sent[2 + rank]) >= 0.2 * needed)
    return f"packets {sent}"


def _streams(
    fixture: RankFixture, paths: int, count: int, size: int
) -> tuple[list[int], list[str]]:
    fixture.until_paths(paths)
    wrong = fixture.stream(count, size, under_way=min(16, count // 5), waits=True)
    return wrong, [event.why for event in list(fixture.endpoint.records.last)]  # it may grow


def _through(
    fail: Callable[[], Any],
    later: Callable[[], Any] = lambda: None,
    fallback: bool = False,  # emulated rails are slow: TCP would carry most
    rails: int = RAILS,
) -> list[list[str]]:
    """Messages both ways, with `fail` called in the middle; what each rank has recorded.

    The last quarter of them is sent after it; `later` comes while they are.
    """
    paths = rails + (4 if fallback else 0)
    job = paths, 200 if Size.full else 60, MIB
    with mended(), Pair(_streams, *job, rails=rails, fallback=fallback) as pair:
        assert pair.report(0) == "half"
        fail()
        for rank in range(2):
            pair.send(rank, "go on")
        later()
        assert pair.report(1) == "half"
        found = results(pair)
    assert [wrong for wrong, _ in found] == [[], []]
    return [records for _, records in found]


def _says(records: list[str], *words: str) -> None:
    assert any(all(word in record for word in words) for record in records), records


def _up_after(rail: int, seconds: float) -> None:
    time.sleep(seconds)  # this is how long it lasts
    link(rail, 0, "up")


@case
def own_or_peers_link_down() -> str:
    found = []
    for rank, end in enumerate(ENDS):
        records = _through(lambda: link(0, rank, "down"))  # noqa: B023
        _says(records[rank], f"port 1 of rail0{end}", "here")
        found.append(records)
    return str(found)


@case
def all_packets_lost() -> str:
    ours, theirs = _through(lambda: lose(0, 100))
    _says(ours + theirs, "the other side does not answer over port 1 of rail0")
    return f"{ours} {theirs}"


@case
def every_hundredth_packet_lost() -> str:
    found = _through(lambda: lose(0, 1))
    assert found == [[], []], found  # the devices send again what is lost
    return "nothing failed"


@case
def the_only_rail_flaps() -> str:
    """Nothing else may carry its messages: they wait until it is back."""
    down = _through(lambda: link(0, 0, "down"), lambda: _up_after(0, 0.75), rails=1)
    assert all(down), down
    return str(down)


@case
def both_rails_down_and_one_back_later_or_tcp_there() -> str:
    def both_down() -> None:
        for rail in range(RAILS):
            link(rail, 0, "down")

    seconds = 60 if Size.full else 8
    back = _through(both_down, lambda: _up_after(1, seconds))
    return f"{back} {_through(both_down, fallback=True)}"


def _until_error(fixture: RankFixture, paths: int) -> tuple[float, str]:
    fixture.until_paths(paths)
    fixture.stream(2, MIB, under_way=1)
    work, _ = fixture.receive(0, 8)
    fixture.report("waits")
    start = time.monotonic()
    assert work.wait(PATIENCE)
    return time.monotonic() - start, work.error()


@case
def no_way_left_is_an_error_that_names_the_rank() -> str:
    with mended(), Pair(_until_error, RAILS, fallback=False, timeout=5) as pair:
        for rank in range(2):
            assert [pair.report(rank) for _ in range(2)] == ["half", "waits"]
        for rail in range(RAILS):
            link(rail, 0, "down")
        found = results(pair)
    for rank, (_, error) in enumerate(found):
        assert error.startswith(f"rank {1 - rank} is lost, no way to it for 5 s: "), error
    return str(found)


@case
def a_killed_process_is_named() -> str:
    with Pair(_until_error, PATHS) as pair:
        for rank in range(2):
            assert [pair.report(rank) for _ in range(2)] == ["half", "waits"]
        pair.kill(1)
        seconds, error = pair.report(0)
    assert "its connection closed" in error, error
    assert seconds < PATIENCE / 2, seconds  # long before the limit of a rank without any way
    return f"{seconds:.1f} s: {error}"


@case
def memory_of_messages_is_on_the_node_that_is_asked_for() -> str:
    from megatron_adaptra.transport.engine.bindings import new_engine

    def pages() -> dict[str, int]:
        """Of the engine's memory, by node."""
        text = Path("/proc/self/numa_maps").read_text()
        (line,) = [x for x in text.splitlines() if "/memfd:adaptra" in x]
        pairs = [word.split("=") for word in line.split() if re.match(r"N[0-9]+=", word)]
        return {node: int(count) for node, count in pairs}

    engine = new_engine(MIB, MIB, PATIENCE)
    blocks = [engine.take(16 * MIB)]
    ctypes.memset(blocks[0].address, 1, 16 * MIB)
    here = pages()  # the processors are all on node 0
    assert set(here) == {"N0"}
    assert engine.prefer_node(1) == ""
    blocks.append(engine.take(64 * MIB))
    ctypes.memset(blocks[1].address, 1, 64 * MIB)
    there = pages()
    assert there["N1"] * os.sysconf("SC_PAGE_SIZE") >= 64 * MIB
    assert there["N0"] == here["N0"]
    assert engine.prefer_node(2) == "mbind: Invalid argument"
    engine.close("seen")
    return f"pages {here}, then {there}"
