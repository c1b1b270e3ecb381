"""The plugin comes and goes while a model trains: nothing is left, and results are stock's."""

from __future__ import annotations

import json
import random
from pathlib import Path

from running import zygote

SCRIPT = Path(__file__).with_name("life_cycles_script.py")
CYCLES, RANKS = 10, 3


def test_activated_and_undone_by_ranks_at_different_moments(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    words = [str(SCRIPT), str(tmp_path), str(seed), str(CYCLES)]
    done = zygote(False).run(tmp_path, words, ranks=RANKS)
    assert done.status == 0, done.text[-4000:]
    (line,) = [line for line in done.text.splitlines() if line.startswith("LIFE ")]
    ranks = json.loads(line.removeprefix("LIFE "))
    assert all(rank["same"] for rank in ranks)
    for rank in ranks:
        first, *after = rank["counts"]
        assert after == [first] * CYCLES, "descriptors and threads, before and after each cycle"
