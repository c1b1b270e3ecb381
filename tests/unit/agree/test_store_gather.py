"""All ranks get the value of each, through torch's store alone."""

import random

import pytest
import torch.distributed as dist
from agree.pipeline import on_threads
from seeding import new_seed
from transport.ranks import until

from megatron_adaptra.adapter.pipeline.job_gather import StoreGather
from megatron_adaptra.base import waits
from megatron_adaptra.base.errors import PeerLost


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_all_have_what_each_has_written(ranks):
    seed, store = new_seed(), dist.HashStore()

    def body(rank):
        rng, gather = random.Random(seed), StoreGather(store, rank, ranks)
        for number in range(20):
            gathered = [(number, i, rng.random(), None) for i in range(ranks)]
            assert gather.gather(gathered[rank]) == gathered
        return True

    assert all(on_threads(ranks, body))
    assert store.num_keys() <= 3  # nothing adds up


def test_a_rank_that_writes_nothing_is_named(monkeypatch):
    monkeypatch.setattr(waits, "CONNECT", 0.5)
    store = dist.HashStore()

    def body(rank):
        if rank == 2:
            return "gone"
        # Else rank 0 would wait for both of them.
        until(lambda: rank == 1 or store.num_keys() > 0, "rank 1 has written")
        with pytest.raises(PeerLost) as caught:
            StoreGather(store, rank, 3).gather(rank)
        return str(caught.value)

    first, second, _ = on_threads(3, body)
    assert first.startswith("rank 2 has written nothing to torch's store")
    assert second == first
