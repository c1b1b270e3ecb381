# What csrc/rdma_offload/bindings exports; a test compares it with the built module. Arguments
# before a slash have no name there, attributes are read-only. Work is described in bindings.py, the
# GPU's half in device/gpu_bindings.py.

from collections.abc import Callable, Sequence
from typing import Protocol

class Work(Protocol):  # so that a Transfer serves as one
    def wait(self, seconds: float) -> bool: ...
    def done(self) -> bool: ...
    def error(self) -> str: ...
    def stamps(self) -> tuple[float, float, float, float]: ...

class Block:
    """Memory of the engine, which it sends without a copy."""

    address: int
    def __buffer__(self, flags: int, /) -> memoryview: ...

class VerbsPath:
    """A queue pair of an RDMA port, that is not connected yet."""

    def card(self) -> bytes:
        """What the other side has to know."""

    def connect(self, card: bytes, /) -> None:
        """Connect with the other side's `card`; may take seconds. Raises RuntimeError."""

class Counts:
    """Of a peer.

    `paths`: those that work; `trials`: those of them on trial. `again`: pieces that were sent
    again; `twice`: frames that came so. `kept`: cost of messages that wait here for their receive.
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

class Engine:
    """Moves the messages of one process.

    `rank`: the peer's; an unknown one raises ValueError. `tag`: of 64 bits. `at`, `bytes`: memory,
    its address and length. The constructor's arguments: Limits of engine.h.
    """

    def __init__(
        self, *, window: int = ..., piece: int = ..., arena: int = ..., beat: float = ...,
        silence: float = ...,
    ) -> None: ...  # fmt: skip
    def add_peer(self, rank: int, name: str, /) -> None:
        """Before anything else with `rank`; `name`: for errors."""

    def add_tcp(self, rank: int, fd: int, order: int, /) -> int:
        """Take over `fd`, a connected socket; the path's number. `order`: the lowest are used."""

    def add_tls(
        self, rank: int, fd: int, order: int, key: bytes, first: bool, seconds: float, /
    ) -> int:
        """As `add_tcp`, for `fd` and `order`, with TLS.

        `key`: of 32 bytes, on both sides, of which one is `first`.

        Raises RuntimeError if there is no such peer, also after `seconds`.
        """

    def add_shm(self, rank: int, socket: int, ring: int, arena: int, first: bool, /) -> int:
        """Take over the descriptors of a path through memory; its number.

        `socket`: connected to the other process. `ring`: memory of both. `arena`: the other one's.
        `first`: whether this side writes the ring's first half.
        """

    def open_verbs(
        self, rank: int, device: str, port: int, gid: int,
        family: int, version: int, network: bytes, bits: int,
        traffic_class: int, level: int, partition: int, timeout: int, retries: int,
        connections: int, /,
    ) -> VerbsPath:  # fmt: skip
        """A queue pair of a `port` of a `device`; `gid`: an index, -1 for the best one.

        `family` to `bits`: the words of addresses.Choice. The others: the fields of
        rails.Service. Raises ValueError for a network of another size, RuntimeError
        where there is no such port, or it has no address, or no such partition.
        """

    def add_verbs(self, rank: int, path: VerbsPath, socket: int, order: int, /) -> int:
        """Take over a connected queue pair, and a `socket` that ends with its peer; its number.

        `order`: see `add_tcp`.
        """

    def fail_peer(self, rank: int, why: str, /) -> None:
        """All that is under way with `rank`, or asked later, fails because of `why`."""

    def events(self, seconds: float, /) -> list[tuple[int, int, str]]:
        """Rank, path and reason of paths that failed since; waits `seconds` for the first.

        The reason is empty for a path on trial that has carried its first probe.
        """

    def wake(self) -> None:
        """End the wait of `events`."""

    def send(self, rank: int, tag: int, at: int, bytes: int, sent: float = 0.0) -> Work:
        """Send a copy of memory; nothing is copied of a Block. `sent`: when it was ready."""

    def receive(self, rank: int, tag: int, at: int, bytes: int, exact: bool = True) -> Work:
        """Receive into memory, which has to stay until the work has ended.

        It has the message's size or, if not `exact`, room for it.
        """

    def abort(self, rank: int, work: Work, /) -> None:
        """Give a receive up; nothing is written to its memory after this."""

    def take(self, nbytes: int, /) -> Block:
        """Memory for a message of `nbytes`."""

    def prefer_node(self, node: int, /) -> str:
        """Take such memory from the NUMA node `node` while it has some; why not, or empty."""

    def arena_fd(self) -> int:
        """The descriptor of all such memory."""

    def counts(self, rank: int, /) -> Counts:
        """What has moved."""

    def close(self, why: str, /) -> None:
        """End everything; what is under way fails because of `why`."""

def new_ring() -> int:
    """A descriptor of memory for a path."""

def verbs_missing() -> str:
    """Why there is no RDMA here, or an empty string."""

def verbs_ports(
    family: int, version: int, network: bytes, bits: int, /
) -> list[tuple[str, int, bool, str, int, bytes, str]]:
    """All RDMA ports of this machine: the fields of bindings.Port.

    The words of addresses.Choice: ValueError for a network of another size.
    """

def no_tls() -> str:
    """Why tcp cannot be encrypted here, or an empty string."""

class CudaError(RuntimeError):
    """A call into the CUDA driver failed."""

def cuda_missing() -> str: ...

class Mark:
    recorded: float
    fault: str
    def at(self) -> float | None: ...

class Device:
    @staticmethod
    def open(ordinal: int, /) -> Device: ...
    def close(self, seconds: float, /) -> str: ...
    def pci(self) -> str: ...
    def mark(self, stream: int, /) -> Mark: ...
    def anchor(self, stream: int, /) -> None: ...
    def anchors(self) -> int: ...
    def marks(self) -> int: ...
    def calls(self) -> tuple[int, int, int]: ...
    def fault(self) -> str: ...

class Pinned:
    def __init__(self, device: Device, engine: Engine, limit: int, /) -> None: ...
    def prepare(self, device: Device, nbytes: int, count: int, /) -> None: ...
    def reserve(self, nbytes: int, count: int, /) -> str: ...
    def trim(self, device: Device, all: bool, /) -> None: ...
    def close(self, device: Device, /) -> None: ...
    def bytes(self) -> tuple[int, int, int, int]: ...
    def new_peak(self) -> None: ...
    def set_limit(self, nbytes: int, /) -> None: ...
    def copied(self) -> str: ...
    def unpinned(self) -> str: ...

class Transfer:
    def wait(self, seconds: float, /) -> bool: ...
    def done(self) -> bool: ...
    def error(self) -> str: ...
    def stamps(self) -> tuple[float, float, float, float]: ...
    def over(self) -> bool: ...

def message_piece() -> int:
    """Bytes of a message that are copied at a time, unless another number is given."""

class DeviceMessages:
    def __init__(
        self, engine: Engine, device: Device, pinned: Pinned, tag_space: int, peers: Sequence[int],
        name: str, piece: int, /,
    ) -> None: ...  # fmt: skip
    def send(
        self, rank: int, tag: int, at: int, nbytes: int, stream: int,
        on_copied: Callable[[Transfer], None] | None, /,
    ) -> Transfer: ...  # fmt: skip
    def receive(self, rank: int, tag: int, at: int, nbytes: int, stream: int, /) -> Transfer: ...
    def release(self, transfer: Transfer, /) -> None: ...
    def join(self, transfer: Transfer, stream: int, /) -> None: ...
    def abort(self, transfer: Transfer, seconds: float, /) -> bool: ...
    def close(self, seconds: float, /) -> bool: ...
    def copies(self) -> tuple[tuple[int, int, float], tuple[int, int, float]]: ...
