"""Where one rank's driver pins no memory any more, all ranks stay with Megatron's own messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_trainings import needs_torch_for_gpus, train
from patience import decided
from test_fake_adaptation import INTO, changing, decisions

pytestmark = [needs_torch_for_gpus, pytest.mark.trains, pytest.mark.timing]


def test_one_rank_without_pinned_memory_keeps_all_with_stock(tmp_path: Path) -> None:
    unpinnable = tmp_path / "unpinnable"
    unpinnable.write_text("")
    done = changing(
        tmp_path, links="0-1", at=(6, 99), iterations=17, ms=40, unpinnable=unpinnable,
        script=Path(__file__).with_name("pretrain_late_unpinnable.py"),
        variables={"FAKE_UNPINNABLE_FROM": f"{unpinnable}|1|5"}, **{"kernel-us": 100},
    )  # fmt: skip
    assert done.status == 0, done.text[-4000:]
    assert len(done.milliseconds) == 17, done.text[-4000:]
    assert done.complaints == []
    refused = re.findall(r"adaptra: (.*) \(DeviceFailed: (.*)\); training goes on with", done.text)
    print(*decisions(done), *refused, sep="\n")
    assert not [one for one in decisions(done) if INTO in one]
    assert "memory that is not pinned" not in done.text
    decided("a plan for the slow link", bool(refused))
    ((what, why),) = refused
    assert what == "a proposal is refused"
    assert why.startswith("stage 1 (rank 1) cannot pin memory for its GPU's messages: cuMemHost")


def test_a_plan_to_begin_with_that_has_no_memory_is_not_begun(tmp_path: Path) -> None:
    """Backwards in halves are ours from the first iteration on, and take no vote."""
    unpinnable = tmp_path / "unpinnable"
    unpinnable.write_text("1\n")
    done = train(
        tmp_path, "--adaptra", "--adaptra-engine", "executor", "--adaptra-policy", "zb-h1",
        iterations=4, unpinnable=unpinnable,
    )  # fmt: skip
    assert done.status == 0, done.text[-4000:]
    assert len(done.milliseconds) == 4, done.text[-4000:]
    assert done.complaints == []
    (line,) = re.findall(r"adaptra: .*cannot pin memory.*", done.text)
    print(line)
    assert "adaptation cannot start: " in line
    assert "stage 1 (rank 1) cannot pin memory for its GPU's messages: cuMemHost" in line
    assert "memory that is not pinned" not in done.text
