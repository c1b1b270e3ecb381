"""`adaptra plan --failures`: a plan for each number of dead workers, kept and read again."""

import json
from pathlib import Path

import pytest

from megatron_adaptra.ir.schedule import Schedule

SHAPE = ("--stages", 3, "--microbatches", 4, "--forward-ms", 10, "--backward-ms", 20)
JOB = (*SHAPE, "--replicas", 3, "--activation-budget", "5,4,3")


def test_each_number_of_failures_has_a_row(here):
    out, _ = here("plan", *JOB, "--failures", 2)
    lines = [line for line in out.splitlines() if line.startswith("│")]
    first, second = ([cell.strip() for cell in line.strip("│").split("│")] for line in lines)
    assert first[0] == "1"
    assert second[0] == "2"
    assert first[1].startswith("1 of stage ")
    assert float(first[2]) <= float(second[2])
    assert float(first[3]) == pytest.approx(float(first[2]) / 180, abs=1e-3)  # 1F1B: (4 + 2) 30


def test_plans_are_kept_in_a_folder(here, tmp_path):
    words = ("plan", *JOB, "--failures", 2, "--failure-plans", tmp_path / "kept")
    out, _ = here(*words)
    assert f"kept in {tmp_path / 'kept'}" in out
    (file,) = Path(tmp_path / "kept").iterdir()
    before = file.stat().st_mtime_ns, file.stat().st_ino
    data = json.loads(here(*words, "--json")[0])
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == before
    assert [row["failures"] for row in data["failures"]] == [1, 2]
    for row in data["failures"]:
        schedule = Schedule.from_json(row["schedule"])
        empty = [w for w, line in enumerate(schedule.order) if not line]
        assert len(empty) >= row["failures"] == sum(row["dead_per_stage"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((*JOB, "--failures", 7), "--failures 7: it has to be from 1 to 6, as each stage keeps"),
        ((*JOB, "--failures", 0), "--failures 0: it has to be from 1 to 6"),
        ((*SHAPE, "--failures", 1), "--failures 1: workers take over from others; give --replicas"),
        ((*JOB, "--failure-plans", "x"), "--failure-plans 'x': it keeps plans; give --failures"),
        ((*JOB, "--failures", 1, "--explain"), "--explain True: it compares moves of one plan"),
    ],
)
def test_bad_input(here, words, line):
    assert here.refused("plan", *words).startswith(line)
