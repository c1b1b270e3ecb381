"""The C++ engine (csrc/rdma_offload), as Python sees it; it is there if it was built.

Its types are in _native.pyi. Memory is given by address and length; no wait holds the GIL.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from megatron_adaptra.base.package import HERE, how_to_build
from megatron_adaptra.transport.engine.addresses import ANY, Choice

if TYPE_CHECKING:
    from megatron_adaptra.transport.engine import _native

    Engine: TypeAlias = _native.Engine
    VerbsPath: TypeAlias = _native.VerbsPath
    Work: TypeAlias = _native.Work
    Transfer: TypeAlias = _native.Transfer


@dataclass(frozen=True)
class Port:
    """An RDMA port. `gid`: its address, `gid_index`: the place of that, -1 for none.

    `why`: the reason that this address was chosen, or that there is none.
    """

    device: str
    port: int
    active: bool
    link: str
    gid_index: int
    gid: bytes
    why: str


def missing() -> str:
    """Why there is no engine here, and how to get it; or an empty string."""
    why = not_built()
    return f"{why}; {how_to_build()}" if why else ""


def not_built() -> str:
    """Why there is no engine here, or an empty string."""
    try:
        importlib.import_module(f"{__package__}._native")
    except ImportError as error:
        return f"it was not built in {HERE} ({error})"
    return ""


def missing_tls() -> str:
    """Why tcp cannot be encrypted here, or an empty string."""
    if why := missing():
        return why
    from megatron_adaptra.transport.engine import _native

    return _native.no_tls()


def missing_verbs() -> str:
    """Why there is no RDMA here, or an empty string."""
    if why := missing():
        return why
    from megatron_adaptra.transport.engine import _native

    return _native.verbs_missing()


def new_engine(window: int, piece: int, silence: float) -> Engine:
    """An engine; `window`: bytes per peer without a receive, `piece`: that move at once.

    `silence`: seconds without a frame after which a path is given up; each side sends one per
    second. Raises ImportError where it is missing.
    """
    from megatron_adaptra.transport.engine import _native

    return _native.Engine(window=window, piece=piece, silence=silence)


def new_ring() -> int:
    """A descriptor of memory for a path."""
    from megatron_adaptra.transport.engine import _native

    return _native.new_ring()


def ports(which: Choice = ANY) -> list[Port]:
    """All RDMA ports of this machine; none without the engine, libibverbs or a device.

    `which`: the addresses that may be shown, on Ethernet.
    """
    if missing():
        return []
    from megatron_adaptra.transport.engine import _native

    return [Port(*port) for port in _native.verbs_ports(*which.words)]
