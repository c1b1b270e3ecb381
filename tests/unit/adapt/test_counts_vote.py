"""When a proposal of counts counts as in force: what its iteration really runs decides."""

from __future__ import annotations

import pytest

from megatron_adaptra.adapt.counts_vote import SYNC, CountsVote
from megatron_adaptra.agree.bundle import Bundle
from megatron_adaptra.ir.sync import SyncPlan

FULL, SHARED = (Bundle({SYNC: SyncPlan(8, counts)}) for counts in ((8, 8, 8), (9, 9, 6)))


@pytest.mark.parametrize(("runs", "committed"), [(SHARED, True), (FULL, False)])
def test_counts_are_in_force_if_their_iteration_runs_them(runs: Bundle, committed: bool) -> None:
    vote = CountsVote(5, FULL)
    proposal = vote.propose(5, SHARED)
    assert proposal is not None
    assert vote.begin(proposal.swap - 1, FULL) is None
    assert vote.begin(proposal.swap, runs) is proposal
    assert proposal.committed is committed
    assert vote.in_force is runs
