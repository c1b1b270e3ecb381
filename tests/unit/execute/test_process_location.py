"""Who shares a clock, and who sees whose process."""

from __future__ import annotations

import os

from transport.ranks import Processes, RankFixture

from megatron_adaptra.execute.process_location import ProcessLocation, clock_ids, visible_pids

HERE = ProcessLocation("a", 100.0, "pid:[1]", 7)


def test_copies_of_a_virtual_machine_do_not_share_a_clock() -> None:
    """They have one boot id, but one of them was set going a minute later."""
    copy, other = HERE._replace(booted=160.0), HERE._replace(kernel="b")
    ids = clock_ids([HERE, copy, other, HERE._replace(booted=100.0002, pid=8)])
    assert ids[0] == ids[3]
    assert len(set(ids)) == 3
    assert visible_pids([HERE, copy, other], 0) == {0: 7}


def test_containers_share_a_clock_but_do_not_see_each_other() -> None:
    """A process of the same number elsewhere would be taken for that of a rank."""
    inside = HERE._replace(processes="pid:[2]", pid=9)
    assert len(set(clock_ids([HERE, inside]))) == 1
    assert visible_pids([HERE, inside], 0) == {0: 7}
    assert visible_pids([HERE, inside], 1) == {1: 9}


def location(me: RankFixture) -> tuple[ProcessLocation, int]:
    return ProcessLocation.here(), os.getpid()


def test_processes_of_this_machine_are_found_to_be_so() -> None:
    with Processes(location, ranks=3) as processes:
        locations, pids = zip(*(processes.result(rank) for rank in range(3)), strict=True)
    assert len(set(clock_ids(locations))) == 1
    assert visible_pids(locations, 1) == dict(enumerate(pids))
