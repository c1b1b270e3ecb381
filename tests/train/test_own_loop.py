"""A training loop of a user's own."""

from __future__ import annotations

import json
from pathlib import Path

from running import zygote

SCRIPT = Path(__file__).parent / "ranks" / "own_loop_script.py"


def test_a_replica_may_run_another_number_of_microbatches_than_the_others(tmp_path: Path) -> None:
    done = zygote(False).run(tmp_path, [str(SCRIPT), str(tmp_path)], ranks=4)
    assert done.status == 0, done.text[-4000:]
    (line,) = [line for line in done.text.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert all(rank["same"] for rank in found)
    ours = ["stock", *["ours"] * 8]
    theirs = ["stock", *["ours"] * 2, *["stock"] * 3, *["ours"] * 3]
    assert sorted(rank["runs"] for rank in found) == sorted([ours, ours, theirs, theirs])
    note = "stock schedule: iterations with another number of microbatches than 4"
    assert done.text.count(note) == 2, "once on each rank of that replica"
