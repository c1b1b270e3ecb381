"""Waits that only a broken part needs are long: a machine with little time is not broken."""

from __future__ import annotations

import pytest
from patience import PATIENCE

from megatron_adaptra.base import waits


@pytest.fixture(autouse=True)
def patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of these tests answer; what is about one that does not sets another limit."""
    monkeypatch.setattr(waits, "STORE", PATIENCE)
