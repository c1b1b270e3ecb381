"""Every process of pytest-xdist collects all tests, before it runs its own."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_collecting_imports_no_megatron(pytestconfig: pytest.Config) -> None:
    """It takes four seconds of each process: tests that need it import it when they run."""
    assert not pytestconfig.collecting_imported_megatron


def test_what_needs_torch_for_gpus_is_run_where_there_is_one() -> None:
    """scripts/test.sh runs it with the newest release, by these names."""
    folder = Path(__file__).with_name("fake_cuda")
    skipped = [path for path in folder.glob("test_*.py") if "needs_torch_for" in path.read_text()]
    assert len(skipped) >= 4
    assert [path.name for path in skipped if not path.match("test_fake_*.py")] == []
