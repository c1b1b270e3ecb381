"""Iterations whose end waits for nobody, in Megatron's own training program: equal to stock.

Results that are read late, gradients of a tied embedding, flags that are taken for granted once all
ranks have been seen to agree on them. `--adaptra-small-collectives on`, for on one machine there
may be nothing to gain.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from running import zygote
from trainings import (
    DROPOUT,
    ENDS,
    HALF,
    needs_training,
    stock,
    trained,
    words_of,
)

pytestmark = [needs_training, pytest.mark.timeout(1200)]


def test_what_is_run_again_ends_as_stock(tmp_path: Path) -> None:
    flags = (
        *DROPOUT, "--user-doubt", "0:8,1:9,3:9,2:11", "--timing-log-level", "1", "--log-interval",
        "3", "--log-num-zeros-in-grad", "--save-interval", "8",
    )  # fmt: skip
    theirs, ours = stock(4, *flags), trained(tmp_path, 4, *flags, *ENDS)
    assert ours.compared() == theirs.compared()
    for result in (theirs, ours):
        assert result.done.text.count("Need to rerun step") == 3
    assert "run again after their end: 3" in ours.done.text


DIFFERS = 9  # the iteration in which a step has not the same result on all ranks
RESULTS = {  # one of two replicas; a stage of both, whose learning rates come from what all say
    "norm": ("--user-result", f"1:{DIFFERS}:norm"),
    "fails": ("--user-result", f"0:{DIFFERS}:fails,1:{DIFFERS}:fails"),
}


@pytest.mark.parametrize("how", RESULTS)
def test_where_a_result_differs_all_ask_again_and_go_on_as_stock(how: str, tmp_path: Path) -> None:
    """Only what is printed of that iteration is this rank's own."""
    flags = (*HALF, *RESULTS[how], "--save-interval", "12")
    theirs, ours = stock(4, *flags), trained(tmp_path, 4, *flags, *ENDS)
    mine, other = (
        [row for row in one.done.numbers if int(row[0]) != DIFFERS] for one in (ours, theirs)
    )
    skipped = how == "fails"  # stock counts it in the next line
    assert [row[: -1 if skipped else None] for row in mine] == [
        row[: -1 if skipped else None] for row in other
    ]
    assert ours.digests == theirs.digests
    lines = re.findall(r"adaptra: rank (\d) has had another result of a step .*", ours.done.text)
    assert lines == (["2", "3"] if skipped else ["3"])


def test_strict_ends_a_training_where_a_result_differs(tmp_path: Path) -> None:
    words = words_of(
        tmp_path, 4, *HALF, *RESULTS["norm"], *ENDS, "--adaptra-strict", iterations=DIFFERS + 1
    )
    done = zygote(True).run(tmp_path, words, ranks=4)
    assert done.status not in (0, None)
    assert "AdaptraError: rank 3 has had another result of a step" in done.text
