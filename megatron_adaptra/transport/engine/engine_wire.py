"""A wire whose messages all go over one endpoint of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_adaptra.base import waits
from megatron_adaptra.device.cuda import cuda_device
from megatron_adaptra.device.staging import Staging
from megatron_adaptra.emulate.links import LinkEmulator
from megatron_adaptra.transport.base import Transport, Work
from megatron_adaptra.transport.connect import store_connection
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.on_device import DeviceTransport
from megatron_adaptra.transport.engine.rendezvous import Rendezvous
from megatron_adaptra.transport.engine.transport import End, EngineTransport
from megatron_adaptra.transport.wire import Links, Wire


class StoreRendezvous(Rendezvous):
    """torch's store as an Endpoint's Rendezvous.

    `prefix`: of all keys. Raises RuntimeError, which torch words, where the store does not answer.
    """

    def __init__(self, prefix: str) -> None:
        self._store = dist.PrefixStore(prefix, store_connection())
        self._store.set_timeout(timedelta(seconds=waits.START))

    def put(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def put_first(self, key: str, text: str) -> None:
        self._store.compare_set(key, "", text)

    def get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None


class EngineWire(Wire):
    """A wire over `endpoint`, which it owns, of global rank `me`. `name`, `ranks`: as for Wire.

    `copies`: memory that GPUs send may be written to again (see DeviceTransport).
    """

    name = "engine"

    def __init__(self, endpoint: Endpoint, me: int, copies: bool = False) -> None:
        self._endpoint, self._me, self._copies = endpoint, me, copies
        self._staging: dict[int, Staging] = {}  # by GPU

    def transport(
        self,
        name: str,
        ranks: Sequence[int],
        links: Links,
        emulator: LinkEmulator | None = None,
        device: torch.device | None = None,
    ) -> EngineTransport | DeviceTransport:
        """Raise DeviceFailed where the GPU of `device` cannot be used."""
        ends = self._ends(ranks, links)
        if device is None or device.type == "cpu":
            return EngineTransport(self._endpoint, name, ends, emulator)
        return DeviceTransport(
            self._endpoint, name, ends, self.staging(device), self._me, emulator, self._copies
        )

    def extend(
        self, transport: Transport, name: str, ranks: Sequence[int], links: Links, timeout: float
    ) -> None:
        """Take one connection with a rank for every `name`, and `timeout` seconds for all."""
        assert isinstance(transport, EngineTransport)  # GPUs have no links between replicas
        transport.add(self._ends(ranks, links, timeout))

    def staging(self, device: torch.device) -> Staging:
        """The host's memory that messages of the GPU `device` go through. Raises DeviceFailed."""
        gpu = cuda_device(device)
        if gpu.ordinal not in self._staging:
            self._staging[gpu.ordinal] = Staging(gpu, self._endpoint.engine)
        return self._staging[gpu.ordinal]

    def control(self, name: str, ranks: Sequence[int]) -> EngineTransport:
        peers = range(1, len(ranks)) if ranks[0] == self._me else [0]
        ends = self._connect(ranks, peers, "member")
        # The first of many ranks is connected with all: a large plan is not worth their rails.
        return EngineTransport(self._endpoint, name, ends, rails=False)

    def mesh(
        self, name: str, ranks: Sequence[int], timeout: float | None = None
    ) -> EngineTransport:
        """Connect within `timeout` seconds, `waits.START` if None."""
        ends = self._connect(ranks, range(len(ranks)), "member", timeout)
        return EngineTransport(self._endpoint, name, ends)

    def group(self, name: str, ranks: Sequence[int], timeout: float) -> EngineGroup:
        """Wait `timeout` seconds for all of them together."""
        return EngineGroup(self.mesh(name, ranks, timeout), ranks.index(self._me))

    def through(self, rank: int) -> str:
        return self._endpoint.through(rank)

    def close(self) -> None:
        for staging in self._staging.values():
            staging.close()
        self._endpoint.close()

    def _ends(
        self, ranks: Sequence[int], links: Links, timeout: float | None = None
    ) -> dict[int, End]:
        """The other ends of this rank's `links`, connected within `timeout` seconds."""
        mine = [{source, target} for source, target in links]
        peers = {i for link in mine for i in link if self._me in {ranks[j] for j in link}}
        ends = self._connect(ranks, peers, "stage" if timeout is None else "worker", timeout)
        for end in ends.values():  # messages of pipelines, and what measures links for them
            self._endpoint.open_rails(end.rank)
        return ends

    def _connect(
        self, ranks: Sequence[int], peers: Iterable[int], who: str, timeout: float | None = None
    ) -> dict[int, End]:
        ends = {
            i: End(ranks[i], f"{who} {i} (rank {ranks[i]})") for i in peers if ranks[i] != self._me
        }
        limit = waits.START if timeout is None else timeout
        self._endpoint.connect([end.rank for end in ends.values()], limit)
        return ends


class EngineGroup:
    """An EngineGroup serves a FlatAllGather as its group over a transport. `rank`: the member's."""

    def __init__(self, transport: EngineTransport, rank: int) -> None:
        self._transport, self._rank = transport, rank

    def rank(self) -> int:
        """This member's number."""
        return self._rank

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Waited:
        """Send `tensors`, of which there is one, to `peer` with `tag`, as a backend does."""
        return _Waited(self._transport.isend(tensors[0], peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Waited:
        """Receive `tensors`, of which there is one, from `peer` with `tag`, as a backend does."""
        return _Waited(self._transport.irecv(tensors[0], peer, tag, exact=False))


class _Waited:
    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self, timeout: timedelta) -> None:
        self._work.wait(timeout.total_seconds())
