"""How a process ends that has not closed everything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from zygote import Zygote

from megatron_adaptra.transport.engine import bindings

SCRIPT = Path(__file__).with_name("exit_script.py")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote(megatron=False) as made:
        yield made


@pytest.mark.long
@pytest.mark.parametrize("wire", ["gloo", "engine"])
def test_a_process_ends_well_with_transports_open(
    wire: str, zygote: Zygote, tmp_path: Path
) -> None:
    """Without its end it would abort: a thread comes back from gloo when its peer goes."""
    if wire == "engine" and bindings.missing():
        pytest.skip(bindings.missing())
    os.mkfifo(tmp_path / "ending")
    done = zygote.run(tmp_path, [str(SCRIPT), wire, str(tmp_path / "ending")], ranks=2)
    assert done.statuses == (0, 0), done.text
    assert done.texts[0] == "ending\n"
