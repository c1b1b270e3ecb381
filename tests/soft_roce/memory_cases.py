"""Where memory of messages is, and how much of it devices have registered."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from soft_roce.cases import case
from soft_roce.verbs_pair import (
    ENDS,
    MIB,
    PATHS,
    PATIENCE,
    RAILS,
    Pair,
    RankFixture,
    packets,
    results,
)

ARENA = "/memfd:adaptra"


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
