"""The emulated late network of gpu_check, between two ranks over the fake machine."""

from __future__ import annotations

from pathlib import Path

from gpu_check import target
from gpu_check.ranks import Deadline, run_ranks
from patience import PATIENCE, in_time

DELAY, AT_ONCE = 0.5, 8  # seconds; messages
QUEUES = 100  # of the hardware; streams that share one wait for each other, as on a GPU


def test_messages_at_once_take_one_delay_as_over_a_link(tmp_path: Path) -> None:
    fake = target.find(rehearse=True, gpus=2)
    assert fake.kind == target.FAKE, "torch's CUDA build is here, and with it the fake machine"
    options = {"seconds": DELAY, "counts": [1, AT_ONCE]}
    deadline = Deadline(10 * PATIENCE)
    ranks = run_ranks(
        fake, "late_messages", tmp_path, deadline, ranks=2, options=options, kernel_us=5000,
        depth=100_000, queues=QUEUES,
    )  # fmt: skip
    for rank in ranks:
        one, several = rank["late"]
        assert one >= 0.9 * DELAY, rank
        assert several <= AT_ONCE / 2 * one, f"{AT_ONCE} messages wait for each other: {rank}"
        for times in (rank["well"], rank["healed"]):
            in_time("messages over a link that is well", max(times), DELAY / 2)
