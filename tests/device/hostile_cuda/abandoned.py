"""Messages that nobody wants any more: given up one by one, and with the transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fakes.hostile_cuda.driver import Driver
from hostile_cuda.jobs import Job

from megatron_adaptra.transport.base import Transport

_TAG, _COUNT = 1 << 30, 3  # of these messages; of each kind
_LOOKS = 200  # at a message that may never come


def give_up(driver: Driver, transport: Transport, peers: Sequence[int], job: Job, me: int) -> None:
    """At a job's end; `transport` is closed with messages under way.

    The memory of a message is its owner's again as soon as it was given up, whether the message had
    come, was being copied, or was still to come.
    """
    rng = job.random(f"ends of {me}")
    memory: list[torch.Tensor] = []  # of what is under way when the transport closes

    def use(tensor: torch.Tensor, what: str) -> None:
        driver.kernel(f"{what} of {me}", len(what), [], [tensor])

    for peer in peers:
        sources = [driver.tensor(job.words, f"unwanted {i}") for i in range(2 * _COUNT)]
        targets = [driver.tensor(job.words, f"target {i}") for i in range(2 * _COUNT)]
        for i, tensor in enumerate(targets):
            use(sources[i], f"unwanted {i}")
            use(tensor, f"target {i}")
        works = [transport.irecv(t, peer, _TAG + i) for i, t in enumerate(targets)]
        sends = [transport.isend(t, peer, _TAG + i) for i, t in enumerate(sources)]
        for i, work in enumerate(works):
            for _ in range(rng.choice((0, 1, _LOOKS))):
                if work.done():
                    break
                driver.quiet()
            if i < _COUNT:
                work.abort()
                use(targets[i], f"what comes after {i}")
            if i == 0:
                sends[-1].abort()
                use(sources[-1], "what comes after a send")
        memory += sources[:-1] + targets[_COUNT:]
        # Nothing more of it is on the streams than what the transport has put there.
        driver.quiet()
    transport.close()
    for i, tensor in enumerate(memory):
        use(tensor, f"what comes after all, {i}")
