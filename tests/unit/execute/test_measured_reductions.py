"""An all-reduce that is voted on while training, between real processes: sums, switches, faults."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from execute.planted_sites import FAULTS, by_site, with_fault
from patience import PATIENCE
from transport.ranks import RankFixture, run, until

from megatron_adaptra.adapt.leader import Leader
from megatron_adaptra.adapt.reductions.remedy import ReductionRemedy
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.agree.controller import Controller
from megatron_adaptra.agree.reductions import ALL_REDUCE, GroupReduction
from megatron_adaptra.base.errors import Disagreement
from megatron_adaptra.device import base
from megatron_adaptra.execute.planned import path_probes
from megatron_adaptra.execute.planned.arrival_messages import ArrivalMessages
from megatron_adaptra.execute.planned.connected import Connected
from megatron_adaptra.execute.planned.measured import MESHES, MeasuredReductions
from megatron_adaptra.execute.planned.path_probes import (
    FEWEST,
    LEAST,
    MOST,
    PIECE,
    PathProbes,
    rate_of,
    rounds,
)
from megatron_adaptra.plan.reductions.choice import Choice

RANKS, WORDS, ITERATIONS = 3, 1000, 14
DIRECT = GroupReduction(Choice(RANKS, "direct", 2, (1, 0, 1)), (1,))
NEVER = 1e9  # a gain that nothing has
MANY = 1 << 30  # bytes


def open_group(
    transport: str,
    timeout: float = PATIENCE,
    *,
    sharded: bool = False,
    overlaps: bool = False,
) -> tuple[Connected, MeasuredReductions]:
    """Of all ranks, which never choose anything but native."""
    world = dist.group.WORLD
    assert world is not None
    connected = Connected.between(world, "test", timeout, transport, meshes=MESHES)
    ranks = tuple(range(dist.get_world_size()))
    return connected, MeasuredReductions(
        connected, dist.get_rank(), ranks, NEVER, timeout, None, sharded, overlaps
    )


def reduce(connected: Connected, adaptive: MeasuredReductions, tensor: torch.Tensor) -> str:
    """One iteration's reduction, in two buffers; the algorithm that ran."""
    value = adaptive.ready()
    for part in tensor.chunk(2):
        adaptive.started(part.nbytes)
        if value.plan is None:
            dist.all_reduce(part)
            adaptive.ended()
        else:
            work = connected.exchange.start(part, value.plan)
            work.when_done(lambda error: adaptive.ended())
            work.wait()
    adaptive.check()
    return value.choice.algorithm


def train(
    me: RankFixture, transport: str, fail: Callable[[int, MeasuredReductions], None] | None = None
) -> tuple[list[str], int]:
    """What ran in each iteration, and the last one of which the leader knows all reports."""
    connected, adaptive = open_group(transport)
    controller = adaptive._controller
    if fail is not None:
        fail(me.rank, adaptive)
    ran = []
    for iteration in range(ITERATIONS):
        if iteration in (3, 8) and isinstance(controller, Leader):
            value = DIRECT if iteration == 3 else GroupReduction(Choice(RANKS))
            proposal = controller.propose(iteration, Bundle({ALL_REDUCE: value}))
            assert proposal is not None or fail is not None
            if proposal is not None:
                until(lambda p=proposal: p.committed is not None, "all ranks agree")
                assert proposal.committed
            controller._open = None  # as the loop does when it is over
        me.meet()
        tensor = torch.full((WORDS,), float(1 + me.rank + iteration))
        ran.append(reduce(connected, adaptive, tensor))
        assert tensor.eq(sum(1 + rank + iteration for rank in range(RANKS))).all()
    known = -1
    if isinstance(controller, Leader) and fail is None:
        loop = controller.loop
        assert isinstance(loop.remedy, ReductionRemedy)
        until(lambda: loop.seen >= ITERATIONS - 2, "reports of all ranks")
        known = loop.seen
        assert set(loop.remedy._estimate.ports._rates) == {
            (a, b) for a in range(RANKS) for b in range(RANKS) if a != b
        }
    me.meet()
    adaptive.close()
    return ran, known


@pytest.mark.parametrize("transport", ["gloo", "engine"])
def test_all_ranks_switch_in_one_iteration_and_sums_are_right(transport: str) -> None:
    rows = run("gloo", train, transport, ranks=RANKS)
    ran, known = rows[0]
    assert all(row[0] == ran for row in rows)
    first, last = ran.index("direct"), len(ran) - ran[::-1].index("direct")
    assert ran == ["native"] * first + ["direct"] * (last - first) + ["native"] * (len(ran) - last)
    assert 3 < first <= 5 < 8 < last <= 10
    assert known >= ITERATIONS - 2


def gather(me: RankFixture) -> list[bool]:
    """By iteration, whether its report has waited for two gathers; none comes in the third one."""
    connected, adaptive = open_group("engine", sharded=True)
    waited = []
    for iteration in range(5):
        me.meet()
        reduce(connected, adaptive, torch.ones(WORDS))
        adaptive.gathered()
        waited.append(bool(adaptive._held))
        if iteration != 2:
            adaptive.gathered()
            assert not adaptive._held
    loop = adaptive.loop
    if loop is not None:
        until(lambda: loop.seen >= 3, "reports of all ranks, also of the third iteration")
    me.meet()
    adaptive.close()
    return waited


def test_paths_are_measured_once_shards_have_been_gathered() -> None:
    """A probe beside an all-gather would share its ports."""
    for waited in run("gloo", gather, ranks=RANKS):
        # How many there are is known from the iteration before.
        assert waited == [False, True, True, False, True]


def overlapped(me: RankFixture, overlaps: bool) -> tuple[Any, ...]:
    """What is reported of a reduction of three buffers: of Buffers, one after the other.

    Of four gathers, if it overlaps, the first is waited for at once, others a while later.
    """
    _, adaptive = open_group("engine", sharded=True, overlaps=overlaps)
    ready = [9.0, 10.0, 13.0, 17.0]
    ended, moments = list[Any](), iter([*ready, *ready, 20.0])
    with pytest.MonkeyPatch.context() as patch:
        clock = types.SimpleNamespace(monotonic=lambda: next(moments))
        patch.setattr(base, "time", clock)
        patch.setattr(adaptive._guard, "later", lambda function, held: ended.append(held))
        for _ in range(2):  # how many buffers there are is known from the first one
            adaptive.ready()
            for nbytes in (400, 300, 200):
                adaptive.started(nbytes)
            for _ in range(3):
                adaptive.ended()
            for hidden in (0.1, 4.0, 5.0, 9.0):
                adaptive.gathered()
                if overlaps:
                    adaptive.hidden(hidden)
    me.meet()
    adaptive.close()
    return astuple(ended[-1].buffers)


@pytest.mark.parametrize(("overlaps", "seconds", "hides"), [(True, 7.0, 6.0), (False, 0.0, 0.0)])
def test_a_reduction_overlaps_until_its_last_buffer_is_ready(
    overlaps: bool, seconds: float, hides: float
) -> None:
    """Buffers that wait for each other overlap with nothing. Of gathers the first is not hidden."""
    assert run("gloo", overlapped, overlaps, ranks=RANKS) == [(3, seconds, 200, 4, hides)] * RANKS


SITES = {
    "ready": (ArrivalMessages, "ready"), "seen": (ArrivalMessages, "seen"),
    "probes": (PathProbes, "run"), "reports": (Controller, "hand_in"),
    "rows": (ReductionRemedy, "observe"), "begin": (Controller, "begin"),
}  # fmt: skip


def planted(me: RankFixture, where: int) -> dict[str, list[str]]:
    """By site and fault, what ran although the site of rank `where` has it."""
    return by_site(SITES, partial(faulty, me, where))


def faulty(me: RankFixture, where: int, site: str, what: Callable[..., Any]) -> list[str]:
    return with_fault(SITES, where, site, what, partial(train, me, "engine"))[0]


def test_what_fails_in_measuring_leaves_the_training_as_it_was() -> None:
    """Right sums on all ranks, which run the same."""
    rows = run("gloo", planted, 0, ranks=RANKS)
    assert all(row == rows[0] for row in rows)
    for site in SITES:
        for what in FAULTS:
            ran = rows[0][f"{site} {what.__name__}"]
            if site == "begin":  # on all ranks, as nobody votes any more
                assert ran == ["native"] * ITERATIONS
            else:
                assert "direct" in ran, "the vote goes on"


def stays_behind(me: RankFixture, transport: str) -> str:
    """Rank 2 does not switch: the others find it out instead of adding wrong numbers.

    Both plans have run before, so that nobody compares them any more.
    """
    connected, adaptive = open_group(transport)
    old = GroupReduction(Choice(RANKS, "direct", 2, (1, 1, 0)))
    begin = lambda iteration: Bundle({ALL_REDUCE: adaptive.value})  # noqa: E731
    adaptive._controller.begin = begin  # type: ignore[method-assign]
    found = ""
    try:
        for value in (DIRECT, old, old if me.rank == 2 else DIRECT):
            adaptive.value = value
            reduce(connected, adaptive, torch.ones(WORDS))
        adaptive.ready()
    except Disagreement as error:
        found = str(error)
    finally:
        me.meet()
        adaptive.close()
    return found


def test_a_rank_with_shares_of_an_old_decision_is_named() -> None:
    found = run("gloo", stays_behind, "engine", ranks=RANKS)
    for rank, text in enumerate(found[:2]):
        assert text.startswith(
            f"rank 2 reduces its gradients by something else than rank {rank} in iteration 3, "
            "which runs direct, nothing owned by 1"
        )
    assert "something else than rank 2" in found[2]


def absent(me: RankFixture) -> str:
    """Rank 1 never probes."""
    probes = PathProbes(me.transport, me.rank, RANKS)
    if me.rank != 1:
        probes.run(MANY)
    me.meet()
    return probes.fault


def test_probes_that_are_not_answered_end_measuring_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_probes, "PATIENCE", 0.3)
    found = run("eager", absent, ranks=RANKS)
    assert all("waited" in found[rank] for rank in (0, 2))


def measured(me: RankFixture) -> list[dict[int, float]]:
    probes = PathProbes(me.transport, me.rank, RANKS)
    found = []
    for _ in range(4):
        found.append(probes.run(MANY))
    assert not probes.fault
    me.meet()
    return found


def test_each_path_is_measured_each_time() -> None:
    for rank, row in enumerate(run("eager", measured, ranks=RANKS)):
        for rates in row:
            assert rates.keys() == set(range(RANKS)) - {rank}
            assert all(rate > 0 for rate in rates.values())


def test_a_rate_is_of_pieces_that_follow_one_another() -> None:
    each, pieces = 1.6e-3, range(16)
    even = [each * i for i in pieces]
    for came in (
        even,
        [max(at, 3.5 * each) for at in even],  # the first come at once
        [at + 20e-3 * (i >= 12) for i, at in enumerate(even)],  # a pause
    ):
        assert rate_of(came) == pytest.approx(PIECE / each)
    assert rate_of([0.0] * 16) == PIECE * 4 / LEAST


def limited(me: RankFixture, nbytes: int) -> list[int]:
    """Of each call, how many pieces this rank asks for afterwards, at most of any path."""
    probes = PathProbes(me.transport, me.rank, RANKS)
    most = []
    for _ in range(4):
        probes.run(nbytes)
        most.append(max(probes._wanted.values()))
    me.meet()
    return most


@pytest.mark.parametrize(("nbytes", "limit"), [(0, FEWEST), (4 << 20, 64), (MANY, MOST)])
def test_probes_are_a_share_of_what_is_reduced(nbytes: int, limit: int) -> None:
    """Over a fast path many pieces are wanted; of few gradients few are allowed."""
    for most in run("eager", limited, nbytes, ranks=RANKS):
        assert all(FEWEST <= one <= limit for one in most)
        assert max(most) > FEWEST or limit == FEWEST


@pytest.mark.parametrize("ranks", [2, 3, 8, 11])
def test_in_a_tournament_each_pair_meets_once(ranks: int) -> None:
    table = [rounds(me, ranks) for me in range(ranks)]
    assert len({len(row) for row in table}) == 1
    for turn in range(len(table[0])):
        for me in range(ranks):
            other = table[me][turn]
            assert other is None or (table[other][turn] == me and other != me)
    for me in range(ranks):
        met = sorted(other for other in table[me] if other is not None)
        assert met == [other for other in range(ranks) if other != me]
