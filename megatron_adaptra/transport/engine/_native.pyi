# What csrc/rdma_offload/bindings exports; a test compares it with the built module. Arguments
# before a slash have no name there, attributes are read-only.

from collections.abc import Callable, Sequence
from typing import Protocol

class Work(Protocol):  # so that a Transfer serves as one
    """A send or a receive under way; a message from or to a GPU is one, too."""

    def wait(self, seconds: float) -> bool:
        """Wait for its end, `seconds` at most; return whether it has ended."""

    def done(self) -> bool:
        """Return whether it has ended."""

    def error(self) -> str:
        """Why it failed; empty for one that went well."""

    def stamps(self) -> tuple[float, float, float, float]:
        """Return when it was sent, left, posted and complete, in monotonic seconds; 0 for never."""

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

def cuda_missing() -> str:
    """Why no GPU can be used here, or an empty string."""

class Mark:
    """A moment of a stream; see device/base.py."""

    recorded: float
    fault: str
    def at(self) -> float | None:
        """Return when the stream passed it."""

class Device:
    """A GPU of this process. `stream`: its address, 0 for the default one."""

    @staticmethod
    def open(ordinal: int, /) -> Device:
        """The GPU `ordinal`, the same object in one process. Raises CudaError."""

    def close(self, seconds: float, /) -> str:
        """Give everything back; return in words what is left after `seconds`."""

    def pci(self) -> str:
        """Its address on the bus."""

    def mark(self, stream: int, /) -> Mark:
        """Mark a `stream`."""

    def anchor(self, stream: int, /) -> None:
        """Tie its clock to the host's where `stream` is."""

    def anchors(self) -> int:
        """Return how many anchors the clock has had; it keeps the last 32."""

    def marks(self) -> int:
        """Return how many marks there were."""

    def calls(self) -> tuple[int, int, int]:
        """Return the calls into the driver: for messages, for marks, for anything else."""

    def fault(self) -> str:
        """Return the last failure of anything beside messages; empty if there was none."""

class Pinned:
    """Pinned memory of a GPU and an engine. `limit`: bytes."""

    def __init__(self, device: Device, engine: Engine, limit: int, /) -> None: ...
    def prepare(self, device: Device, nbytes: int, count: int, /) -> None:
        """Have `device` pin `count` blocks of `nbytes`, unless they are there."""

    def reserve(self, nbytes: int, count: int, /) -> str:
        """Have `count` blocks of `nbytes` pinned; return why that failed, or an empty text."""

    def trim(self, device: Device, all: bool, /) -> None:
        """Have `device` give back `all` that is idle, or what was idle since the last call."""

    def close(self, device: Device, /) -> None:
        """Have `device` give all back."""

    def bytes(self) -> tuple[int, int, int, int]:
        """Return the bytes held, used, held at the peak, and above the limit."""

    def new_peak(self) -> None:
        """Count the peak anew."""

    def set_limit(self, nbytes: int, /) -> None:
        """Give back what is idle above so many `nbytes`."""

    def copied(self) -> str:
        """Why the engine's memory could not be pinned; else empty."""

    def unpinned(self) -> str:
        """Why memory that is not pinned has served; else empty."""

class Transfer:
    """A message under way from or to the GPU; see Work."""

    def wait(self, seconds: float, /) -> bool: ...
    def done(self) -> bool: ...
    def error(self) -> str: ...
    def stamps(self) -> tuple[float, float, float, float]:
        """Return when its producer ended, it could leave, was posted, was there; 0 for never."""

    def over(self) -> bool:
        """Return whether the GPU no longer touches its memory."""

def message_piece() -> int:
    """Bytes of a message that are copied at a time, unless another number is given."""

class DeviceMessages:
    """Messages between a GPU and peers' ones.

    `at`, `nbytes`: the GPU's memory. `stream`: the one that produced it, or used it last.
    """

    def __init__(
        self, engine: Engine, device: Device, pinned: Pinned, tag_space: int, peers: Sequence[int],
        name: str, piece: int, /,
    ) -> None: ...  # fmt: skip
    def send(
        self, rank: int, tag: int, at: int, nbytes: int, stream: int,
        on_copied: Callable[[Transfer], None] | None, /,
    ) -> Transfer:  # fmt: skip
        """Send to `rank` with `tag`; with `on_copied` it stays here until `release`.

        `on_copied` is called on the device's thread when the message is in the host's memory.
        """

    def receive(self, rank: int, tag: int, at: int, nbytes: int, stream: int, /) -> Transfer:
        """Receive from `rank` with `tag`."""

    def release(self, transfer: Transfer, /) -> None:
        """Send what was held back."""

    def join(self, transfer: Transfer, stream: int, /) -> None:
        """Let work launched on `stream` after this call see what `transfer` received."""

    def abort(self, transfer: Transfer, seconds: float, /) -> bool:
        """Give it up; return whether its memory was free after `seconds`."""

    def close(self, seconds: float, /) -> bool:
        """Give all up, as `abort` with `seconds`."""

    def copies(self) -> tuple[tuple[int, int, float], tuple[int, int, float]]:
        """Return the copies made so far, from the GPU and to it: how many, bytes, seconds."""
