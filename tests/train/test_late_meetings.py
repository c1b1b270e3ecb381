"""A layer that meets other replicas for the first time when these run orders of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from interactions import PP2, SMALL
from patience import PATIENCE, decided
from running import zygote
from trainings import SCRIPT, Done, needs_training, words_of

pytestmark = [needs_training, pytest.mark.timeout(1200)]

LATE, ITERATIONS = 20, 32
FLAGS = (*SMALL, *PP2, "--global-batch-size", "8", "--user-layer", "late")
LINKS = ("0.0-0.1:120ms@2..", "1.0-1.1:80ms@2..")
SLOW = tuple(word for link in LINKS for word in ("--adaptra-emulate-link", link))
BACK = re.compile(
    r"adaptra: from iteration (\d+) on, __main__.factor calls all_reduce over ranks 0, 1 in a "
    r"forward: back to 1F1B \(warmup \d+,\d+ -> 2,1\), for good;"
)


def train(folder: Path, *flags: str) -> Done:
    words = words_of(folder, 4, *FLAGS, *flags, iterations=ITERATIONS)
    words[0] = str(SCRIPT.with_name("interactions_pretrain.py"))
    done = zygote(bool(flags)).run(
        folder, words, ranks=4, environment={"HANGS_AFTER": str(PATIENCE)}
    )
    assert done.status == 0, done.text[-4000:]
    return Done(done.status, done.text)


def test_orders_of_their_own_are_left_once_a_layer_meets_other_replicas(tmp_path: Path) -> None:
    """Forwards alone meet, which come in the same order everywhere: so stock's bits are shown."""
    ours, stock = train(tmp_path / "ours", "--adaptra", *SLOW), train(tmp_path / "stock")
    assert ours.numbers == stock.numbers
    assert "adaptra: no order of ops but that of the start from now on: " in ours.text
    before = ours.plans[LATE - 2]  # of the second replica; the first iteration has none
    decided("a deeper warmup before the layer meets", before != [2, 1] and "hides it" in ours.text)
    found = BACK.search(ours.text)
    assert found, ours.text[-4000:]
    assert int(found[1]) > LATE + 1
    assert ours.plans[-1] == [2, 1]
