"""What a training launches that waits for other ranks on the device, as NCCL's collectives do.

Rule 1 is about the work of the product itself. The collectives of a training wait for peers, and
with few hardware queues hold up what the product puts behind them: a message that a peer needs
before it launches its part must not stand there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from fakes.hostile_cuda.driver import Driver
from hostile_cuda.jobs import Job

from megatron_adaptra.transport.base import Transport


class Collectives:
    """Those of one rank: with its peers in other replicas, and with all stages of its pipeline."""

    def __init__(self, driver: Driver, job: Job, replica: int, stage: int) -> None:
        self._driver, self._job, self._stage = driver, job, stage
        self._pipeline = [f"rank {job.rank(replica, s)}" for s in range(job.stages)]
        self._peers = [f"rank {job.rank(r, stage)}" for r in range(job.replicas)]
        self._replica = replica
        self._side = driver.stream("gradients")

    def tensor_parallel(self, name: str) -> None:
        """At the start of an op, in some jobs: the ranks of a stage together."""
        if len(self._peers) > 1 and self._job.tensor_parallel:
            self._driver.collective(f"of tensors in {name}", self._peers)

    def data_parallel(self, name: str) -> None:
        """Behind a backward, in some jobs: gradients of a stage, on a stream of their own."""
        if len(self._peers) > 1 and not self._job.tensor_parallel:
            with self._driver.on(self._side):
                self._driver.collective(f"of gradients in {name}", self._peers)

    def step(self, iteration: int) -> None:
        """All stages together, as the norm of the gradients, or tied embeddings."""
        if len(self._pipeline) > 1:
            key = f"of the step {iteration} of replica {self._replica}"
            self._driver.collective(key, self._pipeline)


class WaitsReported:
    """A Transport of rank `me`; the driver learns who waits for which message, to find cycles.

    `late`, a planted fault: a send begins with the next call of its rank, behind what was launched
    meanwhile.
    """

    def __init__(
        self, driver: Driver, transport: Transport, ranks: Sequence[int], me: int, late: bool
    ) -> None:
        self._driver, self._transport, self._ranks, self._me = driver, transport, ranks, me
        self.traits, self._late, self._begins = transport.traits, late, lambda: None

    def isend(self, buffer: torch.Tensor, peer: int, tag: int) -> Any:
        self.catch_up()
        key = self._key(self._me, self._ranks[peer], tag)
        self._driver.sends(key, buffer)
        if not self._late:
            return self._transport.isend(buffer, peer, tag)
        memory, work = buffer.detach(), _Work(self, key)

        def begins() -> None:
            work.work = self._transport.isend(memory, peer, tag)

        self._begins = begins
        return work

    def catch_up(self) -> None:
        """Begin the send that is late."""
        begins, self._begins = self._begins, lambda: None
        begins()

    def irecv(self, buffer: torch.Tensor, peer: int, tag: int) -> Any:
        self.catch_up()
        rank = self._ranks[peer]
        key = self._key(rank, self._me, tag)
        self._driver.promise(key, f"rank {rank}")
        return _Work(self, key, self._transport.irecv(buffer, peer, tag))

    def waiting(self, key: str) -> AbstractContextManager[None]:
        """Meanwhile this thread waits for that message."""
        self.catch_up()
        return self._driver.waiting(key)

    def close(self) -> None:
        self._transport.close()

    def _key(self, source: int, target: int, tag: int) -> str:
        return f"message {tag} from rank {source} to {target}"


class _Work:
    def __init__(self, transport: WaitsReported, key: str, work: Any = None) -> None:
        self._transport, self._key, self.work = transport, key, work

    def wait(self, timeout: float) -> Any:
        with self._transport.waiting(self._key):
            return self.work.wait(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)
