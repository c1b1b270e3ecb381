"""The C++ half of the layer, as Python sees it; it is there if the engine was built.

It is part of the engine's module, whose memory it pins. Memory and streams are given by address.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from megatron_adaptra.base.errors import DeviceFailed
from megatron_adaptra.base.package import HERE, how_to_build

_MODULE = "megatron_adaptra.transport.engine._native"

# By direction, from the GPU and to it: how many, bytes, seconds.
Copied = tuple[tuple[int, int, float], tuple[int, int, float]]


class Mark(Protocol):
    """A moment of a stream; see device/base.py."""

    recorded: float
    fault: str

    def at(self) -> float | None:
        """Return when the stream passed it."""
        ...


class Device(Protocol):
    """A GPU of this process. `stream`: its address, 0 for the default one."""

    def close(self, seconds: float) -> str:
        """Give everything back; return in words what is left after `seconds`."""
        ...

    def pci(self) -> str:
        """Its address on the bus."""
        ...

    def mark(self, stream: int) -> Mark:
        """Mark a `stream`."""
        ...

    def anchor(self, stream: int) -> None:
        """Tie its clock to the host's where `stream` is."""
        ...

    def anchors(self) -> int:
        """Return how many anchors the clock has had; it keeps the last 32."""
        ...

    def marks(self) -> int:
        """Return how many marks there were."""
        ...

    def calls(self) -> tuple[int, int, int]:
        """Return the calls into the driver: for messages, for marks, for anything else."""
        ...

    def fault(self) -> str:
        """Return the last failure of anything beside messages; empty if there was none."""
        ...


class Pinned(Protocol):
    """Pinned memory of a GPU and an engine."""

    def prepare(self, device: Device, nbytes: int, count: int) -> None:
        """Have `device` pin `count` blocks of `nbytes`, unless they are there."""
        ...

    def reserve(self, nbytes: int, count: int) -> str:
        """Have `count` blocks of `nbytes` pinned; return why that failed, or an empty text."""
        ...

    def trim(self, device: Device, all: bool) -> None:
        """Have `device` give back `all` that is idle, or what was idle since the last call."""
        ...

    def close(self, device: Device) -> None:
        """Have `device` give all back."""
        ...

    def bytes(self) -> tuple[int, int, int, int]:
        """Return the bytes held, used, held at the peak, and above the limit."""
        ...

    def new_peak(self) -> None:
        """Count the peak anew."""
        ...

    def set_limit(self, nbytes: int) -> None:
        """Give back what is idle above so many `nbytes`."""
        ...

    def copied(self) -> str:
        """Why the engine's memory could not be pinned; else empty."""
        ...

    def unpinned(self) -> str:
        """Why memory that is not pinned has served; else empty."""
        ...


class Transfer(Protocol):
    """A message under way from or to the GPU."""

    def wait(self, seconds: float) -> bool:
        """Wait for its end, `seconds` at most; return whether it has ended."""
        ...

    def done(self) -> bool:
        """Return whether it has ended."""
        ...

    def error(self) -> str:
        """Why it failed; empty for one that went well."""
        ...

    def stamps(self) -> tuple[float, float, float, float]:
        """Return when its producer ended, it could leave, was posted, was there; 0 for never."""
        ...

    def over(self) -> bool:
        """Return whether the GPU no longer touches its memory."""
        ...


OnCopied = Callable[[Transfer], None]


class Messages(Protocol):
    """Messages between a GPU and peers' ones.

    `at`, `nbytes`: the GPU's memory. `stream`: the one that produced it, or used it last.
    """

    def send(
        self, rank: int, tag: int, at: int, nbytes: int, stream: int, on_copied: OnCopied | None
    ) -> Transfer:
        """Send to `rank` with `tag`; with `on_copied` it stays here until `release`.

        `on_copied` is called on the device's thread when the message is in the host's memory.
        """
        ...

    def receive(self, rank: int, tag: int, at: int, nbytes: int, stream: int) -> Transfer:
        """Receive from `rank` with `tag`."""
        ...

    def release(self, transfer: Transfer) -> None:
        """Send what was held back."""
        ...

    def join(self, transfer: Transfer, stream: int) -> None:
        """Let work launched on `stream` after this call see what `transfer` received."""
        ...

    def abort(self, transfer: Transfer, seconds: float) -> bool:
        """Give it up; return whether its memory was free after `seconds`."""
        ...

    def close(self, seconds: float) -> bool:
        """Give all up, as `abort` with `seconds`."""
        ...

    def copies(self) -> Copied:
        """Return the copies made so far, by direction."""
        ...


def _module() -> Any:
    return importlib.import_module(_MODULE)


def missing() -> str:
    """Why there is no GPU for messages and marks here, or an empty string."""
    try:
        return str(_module().cuda_missing())
    except ImportError as error:
        return f"the engine was not built in {HERE} ({error}); {how_to_build()}"


def open_device(ordinal: int) -> Device:
    """The GPU `ordinal`, as torch counts; the same object in one process. Raises DeviceFailed."""
    if why := missing():
        raise DeviceFailed(why)
    try:
        return cast(Device, _module().Device.open(ordinal))
    except RuntimeError as error:
        raise DeviceFailed(str(error)) from error


def new_pinned(device: Device, engine: object, limit: int) -> Pinned:
    """Pinned memory; of an `engine` of C++. `limit`: bytes."""
    return cast(Pinned, _module().Pinned(device, engine, limit))


def open_messages(
    engine: object,
    device: Device,
    pinned: Pinned,
    tag_space: int,
    peers: Sequence[int],
    name: str,
    piece: int = 0,
) -> Messages:
    """Messages over an `engine` of C++ with the ranks `peers`.

    `tag_space`: the upper bits of all tags. `name`: of this side, for the peer's errors. `piece`:
    bytes that are copied at a time, so that copies and wire overlap; 0: as measured to be good.
    """
    module = _module()
    each = piece or module.message_piece()
    new = module.DeviceMessages
    return cast(Messages, new(engine, device, pinned, tag_space, list(peers), name, each))
