"""The plugin comes and goes while a model trains: nothing is left, and results are stock's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import zygote
from seeding import new_seed

SCRIPT = Path(__file__).parent / "ranks" / "life_cycles_script.py"
CYCLES, FITTING, RANKS = 5, 2, 3
UNFIT = "adaptra: the checkpoint's plan does not fit, starting from "


@pytest.mark.long
def test_activated_and_undone_by_ranks_at_different_moments(tmp_path: Path) -> None:
    words = [str(SCRIPT), str(tmp_path), str(new_seed())]
    done = zygote(False).run(tmp_path, words, ranks=RANKS)
    assert done.status == 0, done.text[-4000:]
    (line,) = [line for line in done.text.splitlines() if line.startswith("LIFE ")]
    ranks = json.loads(line.removeprefix("LIFE "))
    assert all(rank["same"] for rank in ranks)
    assert [text.count(UNFIT) for text in done.texts] == [CYCLES - FITTING - 1, 0, 0]
    assert all(rank["unreachable"] and rank["crowded"] for rank in ranks)
    no_address = "adaptra: stock schedule: cannot connect: rank 1: "
    assert [text.count(no_address) for text in done.texts] == [1, 0, 0]
    crowded = "adaptra: stock schedule: rank 0 would need "
    assert [text.count(crowded) for text in done.texts] == [1, 0, 0]
    for rank in ranks:
        assert rank["taken"] == [cycle < FITTING for cycle in range(CYCLES)]
        first, *after = rank["counts"]
        assert after == [first] * CYCLES, "descriptors and threads, before and after each cycle"
