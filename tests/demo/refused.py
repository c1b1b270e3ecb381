"""What the demo refuses."""

from __future__ import annotations

import pytest

from megatron_adaptra.cli.main import main


def refused_in_a_line(
    words: tuple[str, ...], flag: str, value: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo with these `words` ends with status 2 and one line, which has all the others."""
    assert main(["demo", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"adaptra: error: {flag} ")
    assert value in line
    assert allowed in line
