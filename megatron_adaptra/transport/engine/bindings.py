"""The C++ engine (csrc/rdma_offload), as Python sees it; it is there if it was built.

Memory is given by address and length. No wait holds the interpreter's lock.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol, cast

from megatron_adaptra.package import HERE, how_to_build


class Work(Protocol):
    """A send or a receive under way."""

    def wait(self, seconds: float) -> bool:
        """Whether it ended within `seconds`."""
        ...

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def error(self) -> str:
        """Why it failed; empty for one that went well."""
        ...

    def stamps(self) -> tuple[float, float, float, float]:
        """When it was sent, left, was posted and was complete; monotonic seconds, 0 for never."""
        ...


class Block(Protocol):
    """Memory of the engine, which it sends without a copy."""

    address: int


class VerbsPath(Protocol):
    """A queue pair of an RDMA port, that is not connected yet."""

    def card(self) -> bytes:
        """What the other side has to know."""
        ...

    def connect(self, card: bytes) -> None:
        """Connect with the other side's `card`; may take seconds. Raises RuntimeError."""
        ...


@dataclass(frozen=True)
class Port:
    """An RDMA port. `gid`: its address, `gid_index`: at which place, -1 for none.

    `why`: this address was chosen, or there is none.
    """

    device: str
    port: int
    active: bool
    link: str
    gid_index: int
    gid: bytes
    why: str


class Counts(Protocol):
    """Of a peer.

    `paths`: those that work; `trials`: those of them on trial. `again`: pieces that were sent
    again; `twice`: frames that came so.
    `kept`: the cost of messages that wait here for their receive.
    """

    paths: int
    trials: int
    sent: int
    received: int
    bytes_sent: int
    bytes_received: int
    again: int
    twice: int
    kept: int


class Engine(Protocol):
    """Moves the messages of one process.

    `rank`: the peer's; an unknown one raises ValueError. `tag`: of 64 bits. `at`, `nbytes`: memory,
    its address and length.
    """

    def add_peer(self, rank: int, name: str) -> None:
        """Before anything else with `rank`; `name`: for errors."""
        ...

    def add_tcp(self, rank: int, fd: int, order: int) -> int:
        """Take over `fd`, a connected socket; the path's number. `order`: the lowest are used."""
        ...

    def add_tls(
        self, rank: int, fd: int, order: int, key: bytes, first: bool, seconds: float
    ) -> int:
        """As `add_tcp`, for `fd` and `order`, with TLS.

        `key`: of 32 bytes, on both sides, of which one is `first`.

        Raises RuntimeError if there is no such peer, also after `seconds`.
        """
        ...

    def add_shm(self, rank: int, socket: int, ring: int, arena: int, first: bool) -> int:
        """Take over the descriptors of a path through memory; its number.

        `socket`: connected to the other process. `ring`: memory of both. `arena`: the other one's.
        `first`: whether this side writes the first half of the ring.
        """
        ...

    def open_verbs(self, rank: int, device: str, port: int, gid: int) -> VerbsPath:
        """A queue pair of a `port` of a `device`; `gid`: an index, -1 for the best one.

        Raises RuntimeError where there is no such port, or it has no address.
        """
        ...

    def add_verbs(self, rank: int, path: VerbsPath, socket: int, order: int) -> int:
        """Take over a connected queue pair, and a `socket` that ends with its peer; its number.

        `order`: see `add_tcp`.
        """
        ...

    def fail_peer(self, rank: int, why: str) -> None:
        """All that is under way with `rank`, or asked later, fails because of `why`."""
        ...

    def events(self, seconds: float) -> list[tuple[int, int, str]]:
        """Rank, path and reason of paths that failed since; waits `seconds` for the first.

        The reason is empty for a path on trial that has carried its first probe.
        """
        ...

    def wake(self) -> None:
        """End the wait of `events`."""
        ...

    def send(self, rank: int, tag: int, at: int, nbytes: int, sent: float = 0.0) -> Work:
        """Send a copy of memory; nothing is copied of a Block. `sent`: when it was ready."""
        ...

    def receive(self, rank: int, tag: int, at: int, nbytes: int, exact: bool = True) -> Work:
        """Receive into memory, which has to stay until the work has ended.

        It has the message's size or, if not `exact`, room for it.
        """
        ...

    def abort(self, rank: int, work: Work) -> None:
        """Give a receive up; nothing is written to its memory after this."""
        ...

    def take(self, nbytes: int) -> Block:
        """Memory for a message of `nbytes`."""
        ...

    def arena_fd(self) -> int:
        """The descriptor of all such memory."""
        ...

    def counts(self, rank: int) -> Counts:
        """What has moved."""
        ...

    def close(self, why: str) -> None:
        """End everything; what is under way fails because of `why`."""
        ...


def _module() -> Any:
    return importlib.import_module(f"{__package__}._native")


def missing() -> str:
    """Why there is no engine here, and how to get it; or an empty string."""
    why = not_built()
    return f"{why}; {how_to_build()}" if why else ""


def not_built() -> str:
    """Why there is no engine here, or an empty string."""
    try:
        _module()
    except ImportError as error:
        return f"it was not built in {HERE} ({error})"
    return ""


def missing_tls() -> str:
    """Why tcp cannot be encrypted here, or an empty string."""
    return missing() or str(_module().no_tls())


def missing_verbs() -> str:
    """Why there is no RDMA here, or an empty string."""
    return missing() or str(_module().verbs_missing())


def new_engine(window: int, piece: int, silence: float) -> Engine:
    """An engine; `window`: bytes per peer without a receive, `piece`: that move at once.

    `silence`: seconds without a frame after which a path is given up; each side sends one per
    second. Raises ImportError where it is missing.
    """
    return cast(Engine, _module().Engine(window=window, piece=piece, silence=silence))


def new_ring() -> int:
    """A descriptor of memory for a path."""
    return int(_module().new_ring())


def ports() -> list[Port]:
    """All RDMA ports of this machine; none without the engine, libibverbs or a device."""
    return [] if missing() else [Port(*words) for words in _module().verbs_ports()]
