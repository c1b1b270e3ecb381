"""The C++ half of the layer, as Python sees it; it is there if the engine was built.

It is part of the engine's module, whose memory it pins; its types are in _native.pyi. Memory and
streams are given by address.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from megatron_adaptra.base.errors import DeviceFailed
from megatron_adaptra.base.package import HERE, how_to_build

if TYPE_CHECKING:
    from megatron_adaptra.transport.engine._native import Device, DeviceMessages, Pinned

_MODULE = "megatron_adaptra.transport.engine._native"


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
        return cast("Device", _module().Device.open(ordinal))
    except RuntimeError as error:
        raise DeviceFailed(str(error)) from error


def new_pinned(device: Device, engine: object, limit: int) -> Pinned:
    """Pinned memory; of an `engine` of C++. `limit`: bytes."""
    return cast("Pinned", _module().Pinned(device, engine, limit))


def open_messages(
    engine: object,
    device: Device,
    pinned: Pinned,
    tag_space: int,
    peers: Sequence[int],
    name: str,
    piece: int = 0,
) -> DeviceMessages:
    """Messages over an `engine` of C++ with the ranks `peers`.

    `tag_space`: the upper bits of all tags. `name`: of this side, for the peer's errors. `piece`:
    bytes that are copied at a time, so that copies and wire overlap; 0: as measured to be good.
    """
    module = _module()
    each = piece or module.message_piece()
    new = module.DeviceMessages
    return cast("DeviceMessages", new(engine, device, pinned, tag_space, list(peers), name, each))
