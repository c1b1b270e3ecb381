"""Messages over gloo from and to a device; on a GPU they pass through the host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_adaptra.transport.gloo import GlooTransport, Lane

PATIENCE = 30.0
LIMIT = timedelta(seconds=PATIENCE)
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_GPU)]


@contextmanager
def two_ends(device: str) -> Iterator[tuple[GlooTransport, GlooTransport]]:
    """Stages 0 and 1, both in this process."""
    store = dist.HashStore()

    def lane(link: str, rank: int) -> Lane:
        group = dist.ProcessGroupGloo(dist.PrefixStore(link, store), rank, 2, LIMIT)
        return Lane(group, 1 - rank, f"stage {link}")

    with ThreadPoolExecutor(4) as pool:  # a group is there when both of its ranks are
        ends = [pool.submit(lane, link, rank) for link in ("0>1", "1>0") for rank in (0, 1)]
        out, into, back_into, back_out = [end.result(PATIENCE) for end in ends]
    first = GlooTransport({1: out}, {1: back_into}, device=torch.device(device))
    second = GlooTransport({0: back_out}, {0: into}, device=torch.device(device))
    try:
        yield first, second
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_messages_there_and_back(device: str, dtype: torch.dtype) -> None:
    with two_ends(device) as (first, second):
        for tag in range(4):
            source = torch.randn(64, 3, 32, device=device).to(dtype)
            message = source.matmul(source.transpose(1, 2)).contiguous()  # may be under way still
            expected = message.clone()
            there = torch.full_like(message, -1.0)
            received = second.irecv(there, 0, tag)
            sent = first.isend(message, 1, tag)
            message.zero_()  # the transport has its copy
            received.wait(PATIENCE)
            assert torch.equal(there, expected)
            back = torch.full((64, 3), -1.0, device=device, dtype=dtype)
            received = first.irecv(back, 1, tag)
            answered = second.isend(there[..., 0], 0, tag)  # not contiguous
            received.wait(PATIENCE)
            assert torch.equal(back, there[..., 0])
            for work in (sent, answered):
                work.wait(PATIENCE)
