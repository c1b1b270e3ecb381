"""A rank that is late for what Megatron waits for: no wait of ours ends before Megatron's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from patience import PATIENCE
from running import zygote
from trainings import EVALUATION, HALF, SCRIPT, needs_training, words_of

pytestmark = [needs_training, pytest.mark.timeout(1200)]

LATE = str(SCRIPT.with_name("late_rank_pretrain.py"))
FLAGS = (*HALF, *EVALUATION, "--save-interval", "5", "--iterations-to-skip", "8", "9")
PLACES = "forward:1,norm:2,forward:3,norm:4,log:4,save:5,evaluation:5,norm:7,skip:7,log:11"
SHORT = ("--adaptra-timeout", "1")


def late(
    folder: Path, seconds: float, timeout: float, places: str, *flags: str
) -> tuple[int, list[str]]:
    """The status of a training in which rank 3 is late, and what each rank has printed."""
    save = ("--save", str(folder / "saved"))
    words = words_of(folder, 4, *FLAGS, *save, "--adaptra", *flags, iterations=11)
    given = [LATE, "3", str(seconds), str(timeout), places]
    done = zygote(True).run(folder, [*given, *words], ranks=4)
    return done.status, list(done.texts)


@pytest.mark.parametrize(("transport", "collectives"), [("gloo", "on"), ("engine", "auto")])
def test_a_rank_that_is_later_than_a_shorter_limit_of_ours_is_awaited(
    transport: str, collectives: str, tmp_path: Path
) -> None:
    flags = ("--adaptra-transport", transport, "--adaptra-small-collectives", collectives)
    status, texts = late(tmp_path, 3, PATIENCE, PLACES, *SHORT, *flags)
    assert status == 0, "\n".join(texts)[-4000:]
    assert texts[3].count("late for") == len(PLACES.split(","))
    # Who waited for a message of it has printed that.
    assert "from stage 1 (rank 3); training goes on if it comes within" in texts[1]


def test_a_rank_that_is_late_twice_is_awaited_each_time(tmp_path: Path) -> None:
    """Together longer than the limit: ranks that know their step's results do not run ahead."""
    flags = ("--adaptra-small-collectives", "on")
    status, texts = late(tmp_path, 14, 20, "norm:7,skip:7", *flags)
    assert status == 0, "\n".join(texts)[-4000:]
    assert texts[3].count("late for") == 2


def printed_by(texts: list[str]) -> list[str]:
    return [line for text in texts for line in text.splitlines() if "adaptra: " in line]


@pytest.mark.parametrize(("transport", "place"), [("engine", "norm:6"), ("gloo", "forward:3")])
def test_a_rank_that_is_later_than_megatrons_limit_is_named(
    transport: str, place: str, tmp_path: Path
) -> None:
    flags = ("--adaptra-transport", transport, "--adaptra-small-collectives", "on")
    status, texts = late(tmp_path, PATIENCE, 20, place, *flags)
    assert status != 0
    named = any("stage 1 (rank 3)" in line for line in printed_by(texts[:3]))
    assert named, "\n".join(texts)[-4000:]


@pytest.mark.parametrize("place", ["save:5", "skip:7"])
def test_where_a_collective_of_torchs_ends_each_rank_says_where_it_was(
    place: str, tmp_path: Path
) -> None:
    """So that the one that was not in it is found."""
    status, texts = late(tmp_path, PATIENCE, 20, place)
    assert status != 0
    waited = re.compile(
        r"stage \d \(rank [0-2]\) was in .*, in torch's \w+, called by \w+ \(\w+.py:"
    )
    found = any(waited.search(line) for line in printed_by(texts[:3]))
    assert found, "\n".join(texts)[-4000:]
    late_one = "stage 1 (rank 3) was in "
    (line,) = [line for line in printed_by(texts[3:]) if late_one in line]
    assert "in late (late_rank_pretrain.py:" in line
