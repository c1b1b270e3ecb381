"""Hidden states of several residual streams (mHC): their messages are wider than hidden_size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import zygote
from trainings import ITERATIONS, SLOW, Done, needs_training, stock, words_of

pytestmark = [needs_training, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("streams_pretrain.py")


def train(folder: Path, kind: str, ranks: int, *flags: str) -> Done:
    words = [str(SCRIPT), kind, *words_of(folder, ranks, *flags, iterations=ITERATIONS)]
    done = zygote("--adaptra" in flags).run(folder, words, ranks=ranks)
    assert done.status == 0, done.text[-4000:]
    return Done(0, done.text)


@pytest.mark.long
def test_wide_messages_train_as_stock(tmp_path: Path) -> None:
    expected = train(tmp_path / "stock", "wide", 4)
    for engine in ("native", "executor"):
        ours = train(tmp_path / engine, "wide", 4, *SLOW, "--adaptra-engine", engine)
        assert ours.printed == expected.printed
        assert ours.plans[-1] != [4, 3, 2, 1], "the plan hides the slow link"
        assert "stock schedule" not in ours.text


def test_streams_of_unknown_width_train_as_stock_with_one_line(tmp_path: Path) -> None:
    ours = train(tmp_path, "flag", 2, "--adaptra")
    assert ours.printed == stock(2).done.printed
    (line,) = re.findall(r"adaptra: stock schedule: (.*)", ours.text)
    assert line == (
        "--enable-mhc-connections: Megatron's get_tensor_shapes gives messages of 64 values, "
        "not 64 for each of 3 residual streams"
    )
