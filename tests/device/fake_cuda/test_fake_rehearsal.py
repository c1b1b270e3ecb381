"""Our messages are rehearsed on (fake) GPUs: whatever fails means stock, in the first minute.

What else may fail there does on CPUs, in tests/train/test_rehearsal.py.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest
from fake_trainings import CHUNKS, needs_torch_for_gpus, train

pytestmark = [needs_torch_for_gpus, pytest.mark.trains]
SCRIPT = Path(__file__).with_name("pretrain_rehearsing.py")
ITERATIONS = 7
PINNED = re.compile(r"bytes of stage (\d) in iteration (\d+): \d+ (\d+)\n")
STOCK = "adaptra: stock schedule: "
WORDS = {
    "pin": "rank 1: stage 1 on host {host}: it cannot pin memory for its GPU's messages: cuMemHost",
    "bytes": "rank 1: stage 1 on host {host}: the message for F0 from stage 0 (rank 0) came with ",
}


@pytest.mark.parametrize(
    ("fault", "flags", "warmup"),
    [("pin", (), "2,1"), ("bytes", CHUNKS, "5,3")],
)
def test_what_fails_in_a_rehearsal_means_stock_with_one_line(
    fault: str, flags: tuple[str, ...], warmup: str, tmp_path: Path
) -> None:
    unpinnable = tmp_path / "unpinnable"
    unpinnable.write_text("1\n" if fault == "pin" else "")
    done = train(
        tmp_path, "--adaptra", *flags, iterations=ITERATIONS, script=SCRIPT,
        unpinnable=unpinnable, variables={"FAKE_REHEARSAL": "" if fault == "pin" else fault},
    )  # fmt: skip
    assert done.status == 0, done.text[-4000:]
    assert len(done.milliseconds) == ITERATIONS, done.text[-4000:]
    assert done.complaints == []
    lines = [line for line in done.text.splitlines() if line.startswith("adaptra: ")]
    print(*lines, sep="\n")
    (line,) = [one for one in lines if one.startswith(STOCK)]
    failed = "no message leaves the GPU's queue, as a rehearsal of it has failed: "
    assert line.startswith(f"{STOCK}{failed}{WORDS[fault].format(host=platform.node())}")
    assert done.text.count(f" adaptra: warmup {warmup} |") == 3
    assert done.text.count(" adaptra: stock |") == ITERATIONS - 3


@pytest.mark.parametrize(("pipeline", "flags"), [(4, ()), (2, CHUNKS)])
def test_a_healthy_rehearsal_leaves_nothing_behind(
    pipeline: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    done = train(
        # A busy machine is no reason for a plan.
        tmp_path, "--adaptra", "--adaptra-min-gain", "0.9", *flags, pipeline=pipeline,
        iterations=ITERATIONS, queues=32,
        script=Path(__file__).with_name("pretrain_counting_bytes.py"),
        variables={"FAKE_LINKS_CHANGE": f"{tmp_path / 'links'}||99"},
    )  # fmt: skip
    assert done.status == 0, done.text[-4000:]
    assert done.complaints == []
    assert STOCK not in done.text
    rows = {
        (int(stage), int(iteration)): int(pinned)
        for stage, iteration, pinned in PINNED.findall(done.text)
    }
    assert len(rows) == pipeline * ITERATIONS
    rehearsed = {iteration for (_, iteration), pinned in rows.items() if pinned}
    print(rows)
    assert rehearsed <= {2, 3}
    assert 2 in rehearsed
