"""Hangs of real trainings: each is named by all ranks, in time, and the training goes on.

ADAPTRA_TEST_HANGS repeats each kind, by a seed.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
from patience import PATIENCE, decided, in_time
from running import zygote
from trainings import SCRIPT, Done, needs_training, stock, words_of

pytestmark = [needs_training, pytest.mark.timeout(1200)]

HANGS = str(SCRIPT.with_name("hangs_pretrain.py"))
SECONDS, AFTER = 3.0, 5.0  # until the lines: the time-out, and what finding out may take
ITERATIONS = 5
ONE_STAGE = ("--pipeline-model-parallel-size", "1")
STOCK = ("--adaptra-engine", "stock")
WHERE = r"stage \d \(rank {rank}\) on \S+"
SILENT = WHERE + r", which has reported no wait.*; stopped: rank {rank}"
SCRIPTS = r".*\(hangs_pretrain.py:\d+\)"
KINDS = {  # by kind: Megatron's flags, ours, and what each line has
    "stop": ((), (), SILENT),
    "stop under stock": ((), STOCK, SILENT),
    "message": ((), (), r"the message [FB]\d+ from " + WHERE + ", which has sent it"),
    "loader": ((), (), WHERE + r", which is in the data loader, in " + SCRIPTS),
    "all-reduce": (ONE_STAGE, (), "all 2 ranks are in that collective: none is missing"),
    "disk": (ONE_STAGE, (), WHERE + r", which is in .*fill_disk" + SCRIPTS),
}
SEEDS = range(int(os.environ.get("ADAPTRA_TEST_HANGS", "1")))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_name_a_hang_in_time_and_the_training_goes_on(
    kind: str, seed: int, tmp_path: Path
) -> None:
    flags, ours, named = KINDS[kind]
    drawn = random.Random(f"{kind} {seed}")
    rank, iteration = drawn.randrange(2), drawn.randrange(2, ITERATIONS)
    print(f"seed {seed}: rank {rank}, iteration {iteration}")
    fault = f"{kind.partition(' ')[0]}:{rank}:{iteration}"
    words = words_of(tmp_path, 2, *flags, iterations=ITERATIONS)
    ours = ("--adaptra", "--adaptra-hang-timeout", str(SECONDS), *ours)
    done = zygote(True).run(
        tmp_path, [HANGS, fault, str(PATIENCE), *words, *ours], ranks=2, timeout=3 * PATIENCE
    )
    assert done.status == 0, done.text[-4000:]
    assert Done(0, done.text).numbers == stock(2, *flags, iterations=ITERATIONS).done.numbers
    for one, text in enumerate(done.texts):
        lines = [
            line for line in text.splitlines() if f"no progress in iteration {iteration} " in line
        ]
        assert lines or one == rank, done.text[-4000:]
        for line in lines:
            # Without the answer, for which it waits seconds, a rank knows its own wait alone.
            answers = "the job's store does not answer" not in line
            decided(f"the store answers: {line}", answers)
            here = "the job waits for this rank; first missing op: "
            assert re.search(named.format(rank=rank), line) or (one == rank and here in line), line
            assert "first missing op: " in line
            assert "training goes on once that moves" in line
        assert one == rank or re.search(r"goes on in .* after \d+ s", text), text[-2000:]
    (seconds,) = re.findall(r"all lines after ([\d.]+) s", done.text)
    in_time("the line of each rank", float(seconds), SECONDS + AFTER)


def test_rank_0_says_at_start_which_limit_comes_first(tmp_path: Path) -> None:
    words = words_of(tmp_path, 2, "--adaptra", "--distributed-timeout-minutes", "2", iterations=1)
    done = zygote(True).run(tmp_path, words, ranks=2)
    assert done.status == 0, done.text[-4000:]
    line = (
        "a hang is named after 105 s, and not 180 s: --adaptra-timeout would come first; after "
        "it, --adaptra-timeout 115 s, torch's limit 120 s"
    )
    assert done.text.count(line) == done.texts[0].count(line) == 1
