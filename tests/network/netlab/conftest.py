"""Tests of slow links run with a relay, and some with netem, too, where a machine has them."""

from __future__ import annotations

from functools import lru_cache

import pytest
from labs import lab


@lru_cache
def refusal(shaper: str) -> str:
    """Why this machine has no such laboratory: root alone is not enough in a container, say."""
    words = ["--shaper", shaper, "--link", "0>1:1ms", "--no-measure"]
    done = lab("run", "--hosts", "2", *words, "--", "true")
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"


@lru_cache
def refused_ports() -> str:
    """Why this machine has no laboratory with rates of hosts."""
    done = lab("run", "--host", "0:1MB/s", "--no-measure", "--", "true")
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"


@pytest.fixture
def ports() -> None:
    if reason := refused_ports():
        pytest.skip(f"no laboratory with rates of hosts here: {reason}")


@pytest.fixture
def shaper(request: pytest.FixtureRequest) -> str:
    """The relay, or what a test of both ways names by `indirect`."""
    name = str(getattr(request, "param", "relay"))
    if reason := refusal(name):
        pytest.skip(f"no laboratory with {name} here: {reason}")
    return name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"shaper", "ports"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.root)
