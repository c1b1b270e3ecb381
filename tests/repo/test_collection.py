"""Every process of pytest-xdist collects all tests, before it runs its own."""

from __future__ import annotations

import pytest


def test_collecting_imports_no_megatron(pytestconfig: pytest.Config) -> None:
    """It takes four seconds of each process: tests that need it import it when they run."""
    assert not pytestconfig.collecting_imported_megatron
