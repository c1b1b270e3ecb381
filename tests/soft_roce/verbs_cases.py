"""What is tested in the virtual machine, by name: `CASES`.

Each raises what is wrong, and returns what may interest a reader. `Size.full`: as much as the
engine's failure suite asks for, 200 messages and a minute without a rail; else a part of that.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from soft_roce.verbs_pair import (
    ENDS,
    MIB,
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
    until,
)
from soft_roce.verbs_speed import MESSAGES, compare

from megatron_adaptra.bench.options import RESULT

PATHS = RAILS + 4  # of a peer: each rail, and the connections of the network
MTU = 4096
ARENA = "/memfd:adaptra"


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

    from megatron_adaptra.transport.engine.bindings import ports
    from megatron_adaptra.transport.engine.devices import device_ports

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


def _sizes(fixture: RankFixture) -> tuple[list[tuple[int, int]], str]:
    fixture.until_paths(PATHS)
    fixture.report("connected")
    fixture.command()
    wrong = []
    for size in (0, 1, 4096, 64 << 10, MIB, 16 * MIB):
        receives = [fixture.receive(tag, size) for tag in range(4)]
        sends = [fixture.send(tag, content(10 * tag + fixture.rank, size)) for tag in range(4)]
        for tag, (work, memory) in enumerate(receives):
            over(work)
            if memory[:size] != content(10 * tag + fixture.peer, size):
                wrong.append((tag, size))
        for work in sends:
            over(work)
    return wrong, fixture.endpoint.through(fixture.peer)


@case
def messages_of_all_sizes_go_both_ways_over_both_rails() -> str:
    with Pair(_sizes) as pair:
        for rank in range(2):
            assert pair.report(rank) == "connected"
        before = [packets(rail, rank) for rail in range(RAILS) for rank in range(2)]
        for rank in range(2):
            pair.send(rank, "go")
        assert results(pair) == [
            ([], "+".join(f"rail{rail}{end}:1" for rail in range(RAILS))) for end in ENDS
        ]
        after = [packets(rail, rank) for rail in range(RAILS) for rank in range(2)]
    sent = [now - then for now, then in zip(after, before, strict=True)]
    needed = 4 * 17 * MIB / MTU  # of each rank
    for rank in range(2):
        assert sent[rank] + sent[2 + rank] >= needed, sent
        assert min(sent[rank], sent[2 + rank]) >= 0.2 * needed, sent
    return f"packets {sent}"


@case
def memory_of_messages_is_on_the_node_that_is_asked_for() -> str:
    from megatron_adaptra.transport.engine.bindings import new_engine

    def pages() -> dict[str, int]:
        """Of the engine's memory, by node."""
        (line,) = [x for x in Path("/proc/self/numa_maps").read_text().splitlines() if ARENA in x]
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


def _pinned() -> int:
    """Bytes of this process's memory that devices have registered."""
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("VmPin:") + 1]) << 10


def _by_need(fixture: RankFixture) -> tuple[str, str, int]:
    fixture.until_paths(PATHS - RAILS)
    assert fixture.stream(20, 4096, under_way=4) == []
    before = fixture.endpoint.through(fixture.peer)
    assert _pinned() == 0
    fixture.command()
    fixture.endpoint.open_rails(fixture.peer)
    assert fixture.stream(20, MIB, under_way=4) == []  # whatever is open already
    fixture.until_paths(PATHS)
    assert fixture.stream(20, MIB, under_way=4) == []
    return before, fixture.endpoint.through(fixture.peer), _pinned()


@case
def rails_are_opened_for_large_messages_alone() -> str:
    before = [packets(rail, rank) for rail in range(RAILS) for rank in range(2)]
    with Pair(_by_need, at_once=False) as pair:
        for rank in range(2):
            assert pair.report(rank) == "half"
        after = [packets(rail, rank) for rail in range(RAILS) for rank in range(2)]
        assert after == before
        for rank in range(2):
            pair.send(rank, "go")
        for rank in range(2):
            assert [pair.report(rank) for _ in range(2)] == ["half", "half"]
        found = results(pair)
    rails = ["+".join(f"rail{rail}{end}:1" for rail in range(RAILS)) for end in ENDS]
    assert [ways for *ways, _ in found] == [["lo", rails[0]], ["lo", rails[1]]]
    registered = [pinned for *_, pinned in found]
    assert min(registered) > RAILS * 64 * (128 << 10), registered  # slots for what comes
    return f"{registered} bytes registered"


@case
def messages_are_carried_as_nccls_variables_ask() -> None:
    """Real verbs take the values; no switch looks at them here, and there is one partition."""
    values = {"TC": "106", "SL": "3", "PKEY": "0", "TIMEOUT": "18", "RETRY_CNT": "7"}
    with patch.dict(os.environ, {f"NCCL_IB_{name}": value for name, value in values.items()}):
        with Pair(_sizes) as pair:
            for rank in range(2):
                assert pair.report(rank) == "connected"
                pair.send(rank, "go")
            found = results(pair)
    assert [wrong for wrong, _ in found] == [[], []]
    assert [way.count("rail") for _, way in found] == [RAILS, RAILS]


def _streams(
    fixture: RankFixture, paths: int, count: int, size: int
) -> tuple[list[int], list[str]]:
    fixture.until_paths(paths)
    wrong = fixture.stream(count, size, under_way=min(16, count // 5), waits=True)
    return wrong, [event.why for event in list(fixture.endpoint.records.last)]  # it may grow


def _through(
    fail: Callable[[], Any],
    later: Callable[[], Any] = lambda: None,
    fallback: bool = True,
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


@case
def own_link_down() -> str:
    ours, theirs = _through(lambda: link(0, 0, "down"))
    _says(ours, "port 1 of rail0a", "here")
    return f"{ours} {theirs}"


@case
def peers_link_down() -> str:
    ours, theirs = _through(lambda: link(0, 1, "down"))
    _says(theirs, "port 1 of rail0b", "here")
    return f"{ours} {theirs}"


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


def _up_after(rail: int, seconds: float) -> None:
    time.sleep(seconds)  # this is how long it lasts
    link(rail, 0, "up")


@case
def a_flap() -> str:
    return str(_through(lambda: link(0, 0, "down"), lambda: _up_after(0, 0.75)))


@case
def the_only_rail_flaps() -> str:
    """Nothing else may carry its messages: they wait until it is back."""
    down = _through(lambda: link(0, 0, "down"), lambda: _up_after(0, 0.75), fallback=False, rails=1)
    assert all(down), down
    return str(down)


def _both_down() -> None:
    for rail in range(RAILS):
        link(rail, 0, "down")


@case
def both_rails_down_and_one_back_later() -> str:
    seconds = 60 if Size.full else 8
    return str(_through(_both_down, lambda: _up_after(1, seconds), fallback=False))


@case
def both_rails_down_and_tcp_there() -> str:
    return str(_through(_both_down))


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
    from soft_roce.verbs_peer import DATA, HAVE, LONGEST, Stranger, frame

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


def _writes_too_much(rendezvous: Any, pipe: Any) -> str:
    from soft_roce.verbs_peer import ALIVE, DATA, LONGEST, Stranger, frame

    me = Stranger(rendezvous, 1, 0, "rail0b")
    pipe.recv()  # before it, the other rank may still look for a path, and would find none
    data = frame(DATA, 1, bytes(LONGEST), total=LONGEST, tag=7)
    me.write(*[frame(ALIVE, 0)] * 16, data)  # each is as it should be, and there is one too many
    me.connection.settimeout(60)
    return me.connection.recv(200).decode()


@case
def a_write_of_more_than_a_slot_ends_the_path() -> None:
    with Pair(_connected_first_record, rails=1, fallback=False, stranger=_writes_too_much) as pair:
        assert pair.report(0) == "connected"
        pair.send(1, "go on")
        assert set(results(pair)) == {"a write of more than a slot"}


@case
def adaptra_bench_has_rows_of_verbs() -> str:
    """Both ranks use the same ports, as two ranks of a host do."""
    before = [packets(rail, 0) for rail in range(RAILS)]
    nbytes = 64 << 10
    script = Path(__file__).with_name("verbs_bench.py")
    done = subprocess.run(
        [sys.executable, script, str(nbytes)], capture_output=True, text=True, timeout=300,
        check=False, env={**os.environ, "NCCL_IB_HCA": "=rail0a,rail1a"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout.removeprefix(RESULT))
    ways = [(row["transport"], row["direction"]) for row in rows]
    names = ("gloo", "shm", "tcp", "verbs", "copy")
    assert ways == [(name, way) for way in ("one way", "both ways") for name in names]
    after = [packets(rail, 0) for rail in range(RAILS)]
    messages = 4 * 100 * 3  # of verbs: bursts, each of a hundred, one way and both ways
    sent = [now - then for now, then in zip(after, before, strict=True)]
    assert messages * nbytes / MTU <= sum(sent) < 1.5 * messages * nbytes / MTU, sent
    return str([row for row in rows if row["transport"] == "verbs"])


@case
def speed_beside_perftest() -> str:
    """Only a ruin of it fails: the machine's host has other work as well."""
    found = {size: compare(size, 7 if Size.full else 2) for size in MESSAGES}
    assert all(ratio > 0.1 for _, _, ratio in found.values()), found
    return ", ".join(
        f"{size >> 10} KiB: {ours:.1f} MB/s, ib_write_bw {theirs:.1f}, ratio {ratio:.2f}"
        for size, (ours, theirs, ratio) in found.items()
    )
