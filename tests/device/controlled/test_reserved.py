"""Memory is pinned before a rank agrees to a plan that needs it; where it cannot be, it refuses."""

from __future__ import annotations

import math
from functools import partial

import pytest
from controlled.test_messages import SIZE, memory
from controlled.test_unpinned import OUT_OF_MEMORY, logged
from fakes.controlled_cuda.gpu import Driver, run, two, until
from patience import PATIENCE

from megatron_adaptra.adapter.pipeline.pinned_vote import (
    messages_at_once,
    pin_first,
    waits_for_vote,
)
from megatron_adaptra.agree.agreement import Ballot, Proposal
from megatron_adaptra.agree.bundle import LINKS, Bundle, Links, scheduled
from megatron_adaptra.base.errors import DeviceFailed
from megatron_adaptra.ir.program import lower
from megatron_adaptra.plan.pipeline.initial import over_own_messages, starting_schedule

OURS = starting_schedule("1f1b", 2, 8, 1, math.inf, False)
STOCK = over_own_messages(OURS)
SWAP = 12
BLOCK = (SIZE + 4095) // 4096 * 4096  # bytes that are pinned for a message
WHY = "stage 1 (rank 1) cannot pin memory for its GPU's messages: cuMemHost"


def proposed(number: int = 0) -> Proposal:
    return Proposal(number, SWAP, scheduled(OURS), "key")


def agrees(driver: Driver) -> None:
    with two(driver) as (a, b):
        vote = partial(pin_first, a.staging, "stage 0 (rank 0)", 0, None, SIZE)
        for bundle in (scheduled(STOCK), Bundle({LINKS: Links()})):
            vote(Proposal(0, SWAP, bundle))
            assert (a.staging.memory().held, a.staging.reserved) == (0, -1), "it needs none"
        count = messages_at_once(lower(OURS), 0)
        assert count > 2
        vote(proposed())
        found = a.staging.memory()
        assert (found.used, found.unpinned, a.staging.reserved) == (0, "", SWAP)
        assert found.held >= count * SIZE
        asked = driver.calls("cuMemHostRegister_v2")
        vote(proposed())
        a.staging.prepare(SIZE, count)
        until(lambda: a.staging.memory().used == 0, "all of it is there")
        assert driver.calls("cuMemHostRegister_v2") == asked == count, "once is enough"
        assert b.staging.memory().held == 0


def test_a_rank_that_agrees_has_pinned_what_the_plan_needs() -> None:
    run(agrees)


def beside(driver: Driver) -> None:
    """Messages are under way when a vote on another such plan begins."""
    with two(driver) as (a, b):
        there, here = a.open(), b.open()
        go = driver.stop_copies("out", 0)
        sends = [there.isend(memory(tag), 1, tag) for tag in (1, 2)]
        until(lambda: a.staging.memory().used == 2 * BLOCK, "two blocks are lent")
        partial(pin_first, a.staging, "stage 0 (rank 0)", 0, None, SIZE)(proposed())
        assert a.staging.memory().held == messages_at_once(lower(OURS), 0) * BLOCK
        go()
        for tag, send in enumerate(sends, 1):
            got = memory(0)
            here.irecv(got, 0, tag).wait(PATIENCE)
            send.wait(PATIENCE)
        there.close()
        here.close()


def test_memory_of_messages_under_way_counts() -> None:
    run(beside)


def refuses(driver: Driver) -> list[str]:
    with two(driver) as (_, b):
        vote = partial(pin_first, b.staging, "stage 1 (rank 1)", 1, None, SIZE)
        driver.refuse_pinning(OUT_OF_MEMORY)
        words = []
        for _ in range(2):
            with pytest.raises(DeviceFailed) as refused:
                vote(proposed())
            words.append(str(refused.value))
            assert (b.staging.reserved, b.staging.memory().held) == (-1, 0)
        assert logged(b) == [], "no message has gone through other memory"
        driver.refuse_pinning(0)
        vote(proposed())
        assert b.staging.reserved == SWAP, "it is asked again each time"
        return words


def test_a_rank_that_can_pin_nothing_refuses_the_plan() -> None:
    for words in run(refuses):
        assert words.startswith(WHY)
        assert "CUDA_ERROR_OUT_OF_MEMORY" in words


def kept(driver: Driver) -> list[bool]:
    """In iterations round a swap: of an open vote, of one that was lost, of one that was won."""
    with two(driver) as (a, _):
        vote = partial(pin_first, a.staging, "stage 0 (rank 0)", 0, None, SIZE)
        found = []
        ballot = Ballot(scheduled(STOCK))
        vote(proposed())
        found.append(waits_for_vote(a.staging, ballot, SWAP - 1))  # it has not agreed yet
        proposal = proposed()
        assert ballot.offer(proposal)
        found.append(waits_for_vote(a.staging, ballot, SWAP - 1))
        found.append(waits_for_vote(a.staging, ballot, SWAP))
        found.append(waits_for_vote(a.staging, ballot, SWAP + 1))
        ballot.decide(proposal.number, False)
        found.append(waits_for_vote(a.staging, ballot, SWAP - 1))
        return found


def test_what_is_pinned_stays_until_the_vote_is_over() -> None:
    assert run(kept) == [True, True, True, False, False]
