"""What a rank works with: its GPU, the engine's messages, barriers with the other ranks."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.folder_rendezvous import FolderRendezvous
from megatron_adaptra.device.base import Mark
from megatron_adaptra.device.cuda import CudaDevice, cuda_device
from megatron_adaptra.device.staging import Staging
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.on_device import DeviceTransport
from megatron_adaptra.transport.engine.transport import End, EngineTransport

CYCLES = 1_000_000  # of one kernel that does nothing: half a millisecond or so
TRIED = 64  # such kernels, timed once
CONNECT = 20.0  # seconds until the other rank has to be there
SHORTLY = 3e-3  # seconds in which a key of the store reaches all ranks
SOON = 20.0  # seconds for what the GPU has to pass at once


class RankFixture:
    """`gpus`: 0 on the CPU. `folder`: of this job. `patience`: seconds for a wait."""

    def __init__(self, rank: int, ranks: int, gpus: int, folder: str, patience: float) -> None:
        self.rank, self.ranks, self.folder = rank, ranks, Path(folder)
        self.patience = patience
        self.device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
        self.shared = 0 < gpus < ranks  # one GPU by several ranks
        self.on_gpu = gpus > 0
        self.gpu: Any = None
        torch.set_num_threads(1)
        if self.on_gpu:
            torch.cuda.set_device(self.device)
            self.gpu = cuda_device(self.device)
        self.store = self._store()
        self._each = 0.0  # seconds of a kernel of `busy`
        self._between: Any = None  # the open endpoint, its ends, pinned memory

    def _store(self) -> Any:
        """Rank 0 has it; its port is the kernel's choice."""
        limit, place = timedelta(seconds=self.patience), self.folder / "port"
        if self.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
            FolderRendezvous(self.folder).put("port", str(store.port))
            return store
        end = time.monotonic() + self.patience
        while not place.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"rank 0 has no store after {self.patience:g} s")
            time.sleep(1e-3)
        return dist.TCPStore("127.0.0.1", int(place.read_text()), None, False, limit)

    def close(self) -> None:
        if self.rank:
            self.signal(f"gone/{self.rank}")
        elif self.ranks > 1:  # the store is this rank's
            self.store.wait([f"gone/{other}" for other in range(1, self.ranks)])
        if isinstance(self.gpu, CudaDevice):
            self.gpu.close()

    def meet(self, name: str) -> None:
        """All ranks are here, which call it by the same `name`, once."""
        if self.store.add(f"meet/{name}", 1) == self.ranks:
            self.store.set(f"met/{name}", "")
        self.store.wait([f"met/{name}"])

    def together(self, name: str) -> None:
        """As `meet`, and go on at the same moment: all ranks have one clock."""
        self.meet(name)
        if self.rank == 0:
            self.store.set(f"at/{name}", repr(time.monotonic() + SHORTLY))
        at = float(self.store.get(f"at/{name}"))
        while time.monotonic() < at:
            pass

    def signal(self, key: str) -> None:
        self.store.set(key, "")

    def wait_for(self, key: str, seconds: float | None = None) -> bool:
        """Whether another rank has signalled `key` within `seconds`."""
        try:
            self.store.wait([key], timedelta(seconds=seconds or self.patience))
        except RuntimeError:
            return False
        return True

    @contextlib.contextmanager
    def messages(self, kind: str) -> Iterator[tuple[Any, Staging | None]]:
        """The engine between the two ranks: from GPU to GPU where there are.

        `kind`: shm, tcp, or verbs, which is over RDMA devices alone. Raises PeerLost.
        """
        peer, folder = 1 - self.rank, self.folder / kind
        self.meet(
            f"opening {kind}"
        )  # the other one may be slow to import torch, and to find its GPU
        folder.mkdir(exist_ok=True)
        machine = kind if kind == "shm" else f"{kind} of rank {self.rank}"
        rendezvous = FolderRendezvous(folder)
        ports, gpu = (None, self.gpu.pci if self.on_gpu else "") if kind == "verbs" else ([], "")
        endpoint = Endpoint(
            self.rank, "127.0.0.1", machine, rendezvous, self.patience, ports=ports, gpu=gpu,
            fallback=kind != "verbs",
        )  # fmt: skip
        ends = {peer: End(peer, f"rank {peer}")}
        staging: Staging | None = None
        try:
            endpoint.connect([peer], min(CONNECT, self.patience))
            if self.on_gpu:
                staging = Staging(self.gpu, endpoint.engine)
                self._between = endpoint, ends, staging
                transport: Any = DeviceTransport(endpoint, kind, ends, staging, self.rank)
            else:
                transport = EngineTransport(endpoint, kind, ends)
            yield transport, staging
            self.meet(f"closing {kind}")
            transport.close()
            if staging is not None:
                staging.close()
        finally:
            endpoint.close()

    # On the GPU alone.

    @contextlib.contextmanager
    def opened(self, name: str, piece: int) -> Iterator[DeviceTransport]:
        """Within `messages`, others that go in pieces of `piece` bytes, over the same endpoint."""
        endpoint, ends, staging = self._between
        transport = DeviceTransport(endpoint, name, ends, staging, self.rank, piece=piece)
        self.meet(f"opened {name}")
        yield transport
        self.meet(f"done {name}")
        transport.close()

    def passed(self, mark: Mark) -> float:
        """When the stream passed `mark`, which it is to do soon."""
        end = time.monotonic() + SOON
        while (at := mark.at()) is None:
            if mark.fault:
                raise RuntimeError(f"a mark has no moment: {mark.fault}")
            if time.monotonic() > end:
                raise TimeoutError(f"the GPU has not passed a mark for {SOON:g} s")
            time.sleep(1e-4)  # a mark is asked for, and has nothing to wait for
        return at

    def finish(self) -> None:
        """What was launched on the current stream has run."""
        torch.cuda.current_stream().synchronize()

    def calibrate(self) -> float:
        """Seconds of one kernel of `busy`."""
        for turn in range(2):  # the first one warms up
            self.finish()
            begin = self.gpu.mark()
            _launch(TRIED)
            end = self.gpu.mark()
            self.finish()
            if turn:
                self._each = (self.passed(end) - self.passed(begin)) / TRIED
        if not self._each > 0:
            raise RuntimeError(f"{TRIED} kernels took {self._each * TRIED:g} s on the GPU")
        return self._each

    def busy(self, seconds: float) -> tuple[Mark, Mark]:
        """Launch kernels that take that long on the current stream; marks before and after."""
        each = self._each or self.calibrate()
        begin = self.gpu.mark()
        # Many small ones, as of a model; in a queue that takes no more a launch blocks.
        _launch(math.ceil(seconds / each))
        return begin, self.gpu.mark()


def _launch(count: int) -> None:
    for _ in range(count):
        torch.cuda._sleep(CYCLES)


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes of the host, the same for the same `seed` on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def timed(call: Callable[[], Any]) -> float:
    """Seconds that a call took."""
    begin = time.monotonic()
    call()
    return time.monotonic() - begin
