"""Memory of messages is taken from the GPU's NUMA node; where that is refused, one line has why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from controlled.test_messages import is_all, memory
from fakes.controlled_cuda.gpu import Driver, run, two
from patience import PATIENCE

from megatron_adaptra.device import staging


@contextmanager
def near(node: int | None) -> Iterator[list[str]]:
    """What is logged where GPUs are near to a node."""
    lines: list[str] = []
    with (
        patch.object(staging, "node_near", lambda pci: node),
        patch.object(staging, "log_line", lines.append),
    ):
        yield lines


def policies() -> list[str]:
    """Of engines' memory, as the kernel writes them."""
    rows = Path("/proc/self/numa_maps").read_text().splitlines()
    return [row.split()[1] for row in rows if "/memfd:adaptra" in row]


def exchange(driver: Driver, node: int | None) -> tuple[list[str], list[str]]:
    with near(node) as lines, two(driver) as (a, b):
        there, here = a.open(), b.open()
        got, sent = memory(0), memory(7)
        work = here.irecv(got, 0, 1)
        there.isend(sent, 1, 1)
        work.wait(PATIENCE)
        driver.finish(b.compute)
        assert is_all(got, 7)
        found = policies()
        there.close()
        here.close()
        return found, lines


def test_memory_comes_from_the_gpus_node() -> None:
    """From another one it costs time only: it is preferred, and no more."""
    found, lines = run(exchange, 0)
    assert "prefer:0" in found
    assert lines == []


def test_where_nothing_is_known_it_comes_from_anywhere() -> None:
    found, lines = run(exchange, None)
    assert set(found) == {"default"}
    assert lines == []


def test_a_system_that_refuses_costs_a_line() -> None:
    found, lines = run(exchange, 63)
    assert set(found) == {"default"}
    assert len(lines) == 2  # one of each GPU
    assert lines[0] == (
        "cuda:0: messages' memory is wherever the system has some, and not on NUMA node 63, which "
        "is the GPU's: mbind: Invalid argument"
    )
