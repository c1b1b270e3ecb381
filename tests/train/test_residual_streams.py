"""Hidden states of several residual streams (mHC): their messages are wider than hidden_size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import zygote
from trainings import Done, needs_training, stock, words_of

pytestmark = [needs_training, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).parent / "ranks" / "streams_pretrain.py"


def train(folder: Path, kind: str, *flags: str) -> Done:
    """A training of two stages."""
    words = [str(SCRIPT), kind, *words_of(folder, 2, *flags, iterations=6)]
    ours = "--adaptra" in flags
    done = zygote(ours).run(folder, words, ranks=2, ends=ours)
    assert done.status == 0, done.text[-4000:]
    return Done(0, done.text)


@pytest.mark.long
def test_wide_messages_train_as_stock(tmp_path: Path) -> None:
    flags = ("--adaptra", "--adaptra-engine", "executor", "--adaptra-policy", "zb-h1")
    ours = train(tmp_path / "ours", "wide", *flags)
    assert ours.printed == train(tmp_path / "stock", "wide").printed
    assert "stock schedule" not in ours.text


def test_streams_of_unknown_width_train_as_stock_with_one_line(tmp_path: Path) -> None:
    ours = train(tmp_path, "flag", "--adaptra")
    assert ours.printed == stock(2, iterations=6).done.printed
    (line,) = re.findall(r"adaptra: stock schedule: (.*)", ours.text)
    assert line == (
        "--enable-mhc-connections: Megatron's get_tensor_shapes gives messages of 64 values, "
        "not 64 for each of 3 residual streams"
    )
