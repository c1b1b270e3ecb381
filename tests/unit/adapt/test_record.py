"""The record of a run: what is written is read again, whatever has happened to the file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from agree.leading import drive
from hypothesis import given, settings
from hypothesis import strategies as st
from measure.records import report
from measure.test_report import REPORTS, SECONDS
from run_records import Recorded, read_log, read_record

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.pipeline.remedy import PipelineRemedy
from megatron_adaptra.adapt.record import AROUND, DIGITS, VERSION, RunRecord, shortened
from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.base.errors import BadFile
from megatron_adaptra.base.log import LogFile
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.measure.estimate import Estimator
from megatron_adaptra.measure.report import StageReport

SLOW = {(1, 2): 0.04, (2, 1): 0.04}
STATUS = {"iteration": 0, "delays": {"0>1": 1e-4}, "alarms": [], "replans": 0}


def write(path: Path, iterations: range, first: int = 0) -> None:
    record = RunRecord(path)
    record.run(first, start={})
    for i in iterations:
        record.iteration(i, [report(0, iteration=i, seconds=0.5 + i)], {**STATUS, "iteration": i})
    record.close()


def test_a_run_is_recorded_whole(tmp_path: Path) -> None:
    """Every iteration with all reports, and every decision as in its log."""
    path, log = tmp_path / "replica-0.jsonl", tmp_path / "decisions.jsonl"
    drive(
        log, lambda i: SLOW if 6 <= i < 16 else {}, 30, paced=True, record_at=path,
    )  # fmt: skip
    (run,) = read_record(path)
    assert list(run.iterations) == list(range(30))
    for number, row in run.iterations.items():
        assert [one.worker for one in row.reports] == [0, 1, 2]
        assert {one.iteration for one in row.reports} == {number}
    assert run.iterations[12].status["delays"]["1>2"] == pytest.approx(0.04, rel=0.1)
    assert list(run.seconds()) == list(range(29))
    decisions = read_log(log)
    assert len(decisions) == 2
    assert [d["why"] for d in run.decisions] == [d["why"] for d in decisions]
    assert [d["committed"] for d in run.decisions] == [True, True]


def replayed(run: Recorded, remedy: PipelineRemedy) -> list[tuple[int, str]]:
    """The iterations whose reports lead to a plan, and the plans as text."""
    now = Schedule.from_json(run.about["now"])
    swaps = {d["iteration"]: Schedule.parse(d["plan"]) for d in run.decisions}
    found: list[Any] = []
    for iteration, row in run.iterations.items():
        ran, now = now, swaps.get(iteration, now)
        if iteration == run.about["iteration"]:
            continue
        changed = remedy.measure(iteration, dict(enumerate(row.reports)), ran)
        if iteration in swaps:
            remedy.swapped(found[-1][1], iteration)
        due = [d for d in run.decisions if d["detected"] < iteration <= d["iteration"]]
        change = remedy.plan(iteration, changed, now, possible=not due)
        if change is not None:
            found.append((iteration, change))
    return [(iteration, change.plan.schedule.text()) for iteration, change in found]


def test_a_replay_comes_to_the_same_plans(tmp_path: Path) -> None:
    path = tmp_path / "replica-0.jsonl"
    drive(tmp_path / "d", lambda i: SLOW if 6 <= i < 16 else {}, 30, paced=True, record_at=path)
    (run,) = read_record(path)
    rule = ReplanPolicy(**run.about["rule"])
    start = Schedule.from_json(run.about["start"])
    estimator = Estimator.from_settings(run.about["estimator"])
    remedy = PipelineRemedy(start, estimator, rule, DecisionLog(PlanDecision, None), ())
    assert replayed(run, remedy) == [(d["detected"], d["plan"]) for d in run.decisions]


def test_an_iteration_of_replicas_takes_what_the_slowest_takes(tmp_path: Path) -> None:
    path = tmp_path / "replica-0.jsonl"
    record = RunRecord(path)
    record.run(0, replicas=2)
    for iteration in range(2):
        seconds = [0.5, 9.0, 0.7, None]  # of workers 0.0, 0.1, 1.0, 1.1
        rows = [report(w, iteration=iteration, seconds=one) for w, one in enumerate(seconds)]
        record.iteration(iteration, rows, STATUS)
    record.close()
    assert read_record(path)[0].seconds() == {-1: 0.7, 0: 0.7}


SHARES = st.tuples(st.lists(st.integers(0, 99)), st.lists(SECONDS), SECONDS)


@settings(max_examples=20)
@given(st.lists(st.lists(REPORTS, min_size=1, max_size=3), max_size=3) | st.lists(SHARES))
def test_what_a_record_was_given_is_read_again(given: list[Any]) -> None:
    """Reports of stages, and the shares of replicas: to a tenth of a microsecond."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.jsonl"
        record = RunRecord(path)
        record.run(0, replicas=2)
        for i, one in enumerate(given):
            if isinstance(one, list):
                record.iteration(i, one, STATUS)
            else:
                record.replicas(i, *one)
        record.close()
        (run,) = read_record(path)
    assert list(run.iterations) == list(range(len(given)))
    for one, row in zip(given, run.iterations.values(), strict=True):
        if isinstance(one, list):
            wanted = [StageReport.from_json(rounded(report.to_json())) for report in one]
            assert list(row.reports) == wanted
        else:
            keys = "microbatches", "seconds", "took"
            assert dict(row.status) == rounded(dict(zip(keys, one, strict=True)))
    if given and not isinstance(given[0], list):
        assert list(run.seconds().values()) == rounded([took for _, _, took in given])


def rounded(data: Any) -> Any:
    return json.loads(json.dumps(data), parse_float=lambda text: round(float(text), DIGITS))


@pytest.mark.parametrize("cut", [1, 30, 2])
def test_a_line_that_was_cut_off_costs_that_line_alone(tmp_path: Path, cut: int) -> None:
    """A job is killed in the middle of a line, and is started again."""
    path = tmp_path / "r.jsonl"
    write(path, range(5))
    path.write_bytes(path.read_bytes()[:-cut])
    assert list(read_record(path)[0].iterations) == [0, 1, 2, 3, 4][: 5 if cut == 1 else 4]
    write(path, range(3, 8), first=3)
    before, after = read_record(path)
    assert list(before.iterations) == [0, 1, 2], "iteration 3 was trained again"
    assert list(after.iterations) == [3, 4, 5, 6, 7]
    assert after.seconds()[4] == 5.5


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"kind": "run", "iteration": 0, "version": VERSION + 1}, "line 4: a record of version 3"),
        ({"kind": "run", "iteration": 0, "version": None}, "a record of version None"),
        ({"kind": "iteration", "iteration": 3, "at": 1.0, "reports": [{"version": 10}]},
         "line 4: a report of version 10; this one reads 9"),
        ({"kind": "iteration", "reports": []}, "line 4: KeyError('iteration')"),
        ([], "line 4"),
    ],
)  # fmt: skip
def test_what_another_version_has_written_is_refused(tmp_path: Path, row: Any, words: str) -> None:
    path = tmp_path / "r.jsonl"
    write(path, range(2))
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(BadFile) as refused:
        read_record(path)
    assert words in str(refused.value)


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="it cannot be read"):
        read_record(tmp_path / "none")
    tmp_path.joinpath("empty").touch()
    with pytest.raises(BadFile, match="--adaptra-record writes them"):
        read_record(tmp_path / "empty")


def test_a_long_run_keeps_to_its_size_and_what_is_near_decisions(tmp_path: Path) -> None:
    """The same lines as in a training, and a file of 40,000 bytes at most."""
    path, most, decided = tmp_path / "r.jsonl", 40_000, 150
    record = RunRecord(path)
    assert record._file is not None
    record._file.close()
    record._file = LogFile(path, "a record", most, shortened)
    record.run(0, start={})
    for i in range(600):
        record.iteration(i, [report(0, iteration=i, seconds=1.0)], STATUS)
        if i == decided:
            record.decision({"kind": "decision", "job": "a", "number": 0, "why": "slow"})
    record.close()
    assert path.stat().st_size <= most + 1000
    assert [one.name for one in tmp_path.iterdir()] == ["r.jsonl"]
    (run,) = read_record(path)
    kept = list(run.iterations)
    assert set(range(decided - AROUND + 1, decided + AROUND)) <= set(kept)
    assert kept[-10:] == list(range(590, 600)), "the last ones are whole"
    assert kept[0] < 50, "and something of the beginning is there"
    assert [d["why"] for d in run.decisions] == ["slow"]
