"""A worker whose ops wait, and a path of one replica: slow as asked for, with the bits of stock."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from patience import in_time
from running import summary, zygote
from trainings import HALF, needs_training, stock, train

ENGINES = ("native", "executor", "stock")
SLOW = 3  # from this iteration on; see slow_worker_script.py
SCRIPT = Path(__file__).with_name("slow_worker_script.py")


@functools.cache
def trained() -> dict[str, dict[str, dict[str, Any]]]:
    """What each worker found, by engine."""
    with tempfile.TemporaryDirectory() as folder:
        done = zygote(False).run(Path(folder), [str(SCRIPT), folder], ranks=4, ends=False)
    assert done.status == 0, done.text[-4000:]
    lines = [line[6:] for line in done.text.splitlines() if line.startswith("FOUND ")]
    rows = [json.loads(line) for line in lines]
    return {row[0]["engine"]: {one["worker"]: one for one in row} for row in rows}


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_and_parameters_are_those_of_stock(engine: str) -> None:
    found = trained()[engine]
    assert sorted(found) == ["0.0", "0.1", "1.0", "1.1"]
    for worker, one in found.items():
        assert one["bits"] == one["stock"], worker


@pytest.mark.parametrize("engine", ENGINES)
def test_every_op_of_that_worker_alone_waits(engine: str) -> None:
    found = trained()[engine]
    for worker, one in found.items():
        if worker != "1.0":
            assert one["waits"] == [], worker
    waits = found["1.0"]["waits"]
    ops = {"native": 8, "stock": 8, "executor": 4 * len("FIWR")}[engine]
    # The first iteration is stock's, unless it keeps fewer activations than that.
    each = {} if engine == "executor" else {0: 8}
    wanted = [(i, 2.0 if i >= SLOW else 0.0) for i in range(6) for _ in range(each.get(i, ops))]
    assert [(iteration, times) for iteration, times, *_ in waits] == wanted
    slow = [wait for wait in waits if wait[0] >= SLOW]
    computed, waited, asked = (sum(wait[i] for wait in slow) for i in (2, 3, 4))
    assert waited >= 2 * computed - 1e-3
    # And no more, however late the timers are. The second reading of an op's CPU time is later.
    assert asked <= 2 * computed + 1e-3 * len(slow)


@pytest.mark.parametrize("engine", ["native", "executor"])
def test_what_is_measured_has_the_waits_in_it(engine: str) -> None:
    """At least three times what was computed: no matter how busy the machine is."""
    slow = [op for op in trained()[engine]["1.0"]["ops"] if op[1] >= SLOW]
    kinds = {kind for kind, *_ in slow}
    assert kinds == ({"F", "B"} if engine == "native" else {"F", "I", "W", "R"})
    for kind in kinds:
        mine = [op for op in slow if op[0] == kind]
        # Timers that were late for an op are made up for in the next one, by 1 ms at most.
        assert sum(op[2] for op in mine) >= 3 * sum(op[3] for op in mine) - 1e-3 * len(mine)


@pytest.mark.parametrize("engine", ["native", "executor"])
def test_the_path_of_one_replica_is_slow(engine: str) -> None:
    found = trained()[engine]
    for worker in ("0.0", "0.1"):
        delays = [delay for iteration, delay in found[worker]["delays"] if iteration >= SLOW]
        assert len(delays) == 4 * 3
        assert min(delays) >= 0.03, worker
    for worker in ("1.0", "1.1"):
        delays = [delay for _, delay in found[worker]["delays"]]
        assert min(delays) < 0.03, worker


def test_paths_to_other_replicas_are_there_where_these_are_planned_together() -> None:
    found = {worker: one["targets"] for worker, one in trained()["native"].items()}
    assert found == {
        "0.0": [[1], [1]], "0.1": [[0], [0, 2]], "1.0": [[], [1]], "1.1": [[], []],
    }  # fmt: skip


def test_ops_keep_their_length_where_all_workers_wait() -> None:
    for one in trained()["native"].values():
        assert one["steady"] == [True, False]


def test_where_ops_are_on_gpus_it_is_refused() -> None:
    """In one line, by all ranks alike, before anything is patched."""
    for worker, one in trained()["native"].items():
        assert one["refusal"].startswith("--adaptra-emulate-worker '1.0:3x@3..': not on GPUs"), (
            worker
        )


@needs_training
@pytest.mark.parametrize("engine", [*ENGINES])
def test_in_megatrons_own_program(engine: str, tmp_path: Path) -> None:
    rules = ("--adaptra-emulate-worker", "1.1:3x@2..4,0.0:2x@4..", "--adaptra-emulate-link")
    flags = ("--adaptra", *rules, "0.0>0.1:20ms@3..", "--adaptra-engine", engine)
    ours = train(tmp_path, 4, *HALF, *flags, iterations=6)
    assert ours.printed == stock(4, *HALF, iterations=6).done.printed


@pytest.mark.timing
def test_both_arms_of_the_demo_are_slow(tmp_path: Path) -> None:
    # So many times as slow that what others wait for a core is short beside it, and so many
    # microbatches that not all of them wait for one.
    done = summary(
        tmp_path, stages=2, data_parallel=2, microbatches=8, iterations=12, from_iteration=4,
        to_iteration=9, slow_workers=["0.0:40x"], slow_paths=["0.0-0.1:40ms"], reroute="off",
    )  # fmt: skip
    assert done["losses_identical"]
    assert done["parameters_identical"]
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert done["config"]["slow_links"] == []
    for arm in ("stock", "adaptra"):
        slow = done["arms"][arm]["iteration_ms"][4:9]
        assert min(slow) >= 2 * 40, "the first microbatch's way, there and back"
        stages: dict[int, list[float]] = {}
        for event in events:
            of_arm = event["ph"] == "X" and names[event["pid"]] == f"{arm} measured"
            if of_arm and event["name"][0] == "B":
                stages.setdefault(event["tid"], []).append(event["dur"])
        slowed, other = (min(stages[tid]) for tid in sorted(stages))
        in_time("backwards beside those of the last stage", 1.5 * other, slowed)
