"""Our messages are tried once in shadow of Megatron's own, whose bits a training has all along."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from running import zygote

SCRIPT = Path(__file__).parent / "ranks" / "rehearsal_script.py"
FAILED = "no message leaves the GPU's queue, as a rehearsal of it has failed: "
WORDS = {
    "order": "rank 2: stage 2 on host {host}: Megatron has run B, the plan says F0; ",
    "bytes": "rank 1: stage 1 on host {host}: the message for F0 from stage 0 (rank 0) came with ",
    "path": "rank 0: stage 0 on host {host}: the message B0 from stage 1 (rank 1) is not there ",
}


@pytest.mark.parametrize(
    ("fault", "chunks"),
    [*((fault, "1") for fault in ("", *WORDS)), ("", "2"), ("", "2 apart"), ("bytes", "2")],
)
def test_a_training_has_stocks_bits_whatever_a_rehearsal_finds(
    fault: str, chunks: str, tmp_path: Path
) -> None:
    done = zygote(False).run(tmp_path, [str(SCRIPT), str(tmp_path), fault, chunks], ranks=3)
    assert done.status == 0, done.text[-4000:]
    (line,) = [line for line in done.text.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert all(rank["same"] for rank in found)
    # The third iteration is rehearsed; before the fourth all ranks know what has come of it.
    then = "none" if fault else "ours"
    assert [rank["runs"] for rank in found] == [["stock"] * 3 + [then] * 4] * 3
    assert len({rank["why"] for rank in found}) == 1
    assert [text.count("adaptra: stock schedule: ") for text in done.texts] == [bool(fault), 0, 0]
    if fault:
        words = FAILED + WORDS[fault].format(host=platform.node())
        assert found[0]["why"].startswith(words)
        assert f"adaptra: stock schedule: {words}" in done.text
