import json

import pytest
from commands import Here


@pytest.fixture
def here(capsys):
    return Here(capsys)


@pytest.fixture
def profile(tmp_path):
    """Writes a profile, and returns its path."""

    def write(data, name="job.json"):
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return write


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    """Lines and tables are as long as they come, unless a test has another width."""
    monkeypatch.setenv("COLUMNS", "1000")
