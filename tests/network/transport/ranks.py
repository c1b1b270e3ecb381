"""Runs one body on several ranks: threads over loopback, processes over gloo."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import processes
from patience import PATIENCE
from transport.loopback import LoopbackNetwork

from megatron_adaptra.base import waits
from megatron_adaptra.emulate.links import LinkEmulator
from megatron_adaptra.emulate.rules import parse_rules
from megatron_adaptra.transport.base import Transport
from megatron_adaptra.transport.engine import bindings
from megatron_adaptra.transport.engine.endpoint import Endpoint
from megatron_adaptra.transport.engine.engine_wire import StoreRendezvous
from megatron_adaptra.transport.engine.transport import End, EngineTransport
from megatron_adaptra.transport.gloo import GlooTransport, open_links

KINDS = ("eager", "rendezvous", "gloo", "shm", "tcp")
PROCESSES = KINDS[2:]
MS = 1e-3


@dataclass
class RankFixture:
    """What a body gets: its rank, a way to its peers, and a barrier of all ranks."""

    rank: int
    transport: Transport
    meet: Callable[[], Any]
    open: Callable[[str], Transport]  # another transport between the same ranks
    say: Callable[[Any], None]  # reports to the test while the body still runs


Body = Callable[..., Any]


def run(kind: str, body: Body, *args: Any, ranks: int = 2, rules: Sequence[str] = ()) -> list[Any]:
    """What `body(rank_fixture, *args)` returned on each rank; raises what it raised."""
    if kind in PROCESSES:
        with Processes(body, *args, ranks=ranks, rules=rules, kind=kind) as processes:
            return [processes.result(rank) for rank in range(ranks)]
    assert not rules, "loopback has no emulator"
    networks: dict[str, LoopbackNetwork] = {}
    lock, barrier = threading.Lock(), threading.Barrier(ranks)

    def one(rank: int) -> Any:
        opened = []

        def opens(name: str) -> Transport:
            with lock:
                if name not in networks:
                    networks[name] = LoopbackNetwork(rendezvous=kind == "rendezvous")
            opened.append(networks[name].open(rank))
            return opened[-1]

        meet = partial(barrier.wait, PATIENCE)
        try:
            return body(RankFixture(rank, opens("first"), meet, opens, lambda _: None), *args)
        except BaseException:
            barrier.abort()
            raise
        finally:
            for transport in opened:
                transport.close()

    try:
        with ThreadPoolExecutor(ranks) as pool:
            results = [pool.submit(one, rank) for rank in range(ranks)]
            errors = [e for f in results if (e := f.exception(PATIENCE)) is not None]
            if errors:  # the cause, not the barriers that it broke
                raise min(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError))
            return [f.result() for f in results]
    finally:
        for network in networks.values():
            network.close()


class Processes:
    """`ranks` processes that run a body over gloo or the engine; they can be killed one by one.

    `kind`: one of PROCESSES; "shm" and "tcp" are the engine, and so is "tls", tcp encrypted.
    """

    def __init__(
        self, body: Body, *args: Any, ranks: int = 2, rules: Sequence[str] = (), kind: str = "gloo"
    ) -> None:
        if kind != "gloo" and (why := bindings.missing()):
            pytest.skip(why)
        context = processes()
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._barrier = barrier = context.Barrier(ranks)
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe(duplex=False)
            job = (
                theirs, body, args, rank, ranks, self._store.port, barrier, tuple(rules), kind,
                waits.STORE,
            )  # fmt: skip
            process = context.Process(target=_process, args=job, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(PATIENCE)

    def reported(self, rank: int) -> Any:
        """The next report of a rank."""
        if not self._pipes[rank].poll(PATIENCE):
            raise TimeoutError(f"rank {rank} has reported nothing after {PATIENCE:g} s")
        word, value = self._pipes[rank].recv()
        if word == "raised":
            raise AssertionError(f"rank {rank} raised\n{value}")
        return value

    result = reported

    def ended(self, rank: int) -> int | None:
        """The exit status of a rank that ends by itself."""
        self._processes[rank].join(PATIENCE)
        return self._processes[rank].exitcode

    def drop_store(self) -> None:
        """End the server that all ranks' stores talk to."""
        self._store = None

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join(PATIENCE)


def _process(
    pipe: Any, body: Body, args: Any, rank: int, ranks: int, port: int, barrier: Any, rules: Any,
    kind: str, store_seconds: float,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    waits.STORE = store_seconds  # as long as the test's own process waits
    try:
        store = dist.TCPStore("127.0.0.1", port, None, False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        links = list(permutations(range(ranks), 2))
        opened: list[Transport] = []
        endpoint = None
        if kind != "gloo":
            machine = "one" if kind == "shm" else f"of rank {rank}"
            rendezvous, encrypted = StoreRendezvous("adaptra/engine"), kind == "tls"
            endpoint = Endpoint(
                rank, "127.0.0.1", machine, rendezvous, PATIENCE, encrypted=encrypted
            )
            endpoint.connect([other for other in range(ranks) if other != rank])

        def opens(name: str) -> Transport:
            parsed = [rule for text in rules for rule in parse_rules(text, ranks)]
            emulator = LinkEmulator(rank, parsed) if parsed else None
            if endpoint is None:
                opened.append(GlooTransport(*open_links(list(range(ranks)), links, name), emulator))
            else:
                ends = {
                    other: End(other, f"stage {other} (rank {other})") for other in range(ranks)
                }
                opened.append(EngineTransport(endpoint, name, ends, emulator))
            return opened[-1]

        transport = opens("first")
        meet = partial(barrier.wait, PATIENCE)
        meet()  # a rank that closes at once would cut the others' connections in the making

        def say(report: Any) -> None:
            pipe.send(("reports", report))

        result = body(RankFixture(rank, transport, meet, opens, say), *args)
        for transport in opened:
            transport.close()
        if endpoint is not None:
            endpoint.close()
        pipe.send(("returned", result))
    except BaseException:
        barrier.abort()
        pipe.send(("raised", traceback.format_exc()))
    pipe.close()
    os._exit(0)  # neighbours may be gone, and gloo's destructors would wait for them


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what has no event to wait for."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(MS)


def threads() -> list[str]:
    """The package's threads of this process."""
    return [t.name for t in threading.enumerate() if t.name.startswith("adaptra-")]


def full(value: float, size: int = 8) -> torch.Tensor:
    return torch.full((size,), float(value))
