"""What an endpoint and a gloo wire say of the way that messages take, as it is now."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from patience import PATIENCE
from transport.ranks import until
from transport.test_engine_paths import connections, cut

from benchmarks.folder_rendezvous import FolderRendezvous
from megatron_adaptra.transport.address import interface_of
from megatron_adaptra.transport.connect import interfaces
from megatron_adaptra.transport.engine.endpoint import Endpoint


def lost(ends: list[Endpoint], others: set[int]) -> bool:
    """A cut path comes back soon, so it is cut each time that both are asked.

    `others`: descriptors of this process that are none of the ends'.
    """
    cut([fd for fd in connections() if fd not in others])
    return [end.through(1 - rank) for rank, end in enumerate(ends)] == ["", ""]


@pytest.mark.parametrize(
    ("machines", "through"), [(("one", "one"), "memory"), (("one", "other"), "lo")]
)
def test_an_endpoint_names_what_carries(
    tmp_path: Path, machines: tuple[str, str], through: str
) -> None:
    rendezvous, others = FolderRendezvous(tmp_path), set(connections())
    ends = [Endpoint(r, "127.0.0.1", machines[r], rendezvous, PATIENCE, ports=()) for r in (0, 1)]
    try:
        assert ends[0].through(1) == ""
        for rank in (1, 0):
            ends[rank].connect([1 - rank])
        assert [end.through(1 - r) for r, end in enumerate(ends)] == [through] * 2
        until(lambda: lost(ends, others), "both ends have lost it")
    finally:
        for end in ends:
            end.close()


def test_gloo_names_its_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert interfaces() == "lo+eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        assert interfaces() == ""
    else:
        assert interfaces() in (address, *(name for _, name in socket.if_nameindex()))


def test_an_address_that_no_interface_has_is_itself() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") == "203.0.113.7"
