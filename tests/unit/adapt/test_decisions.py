"""The log of decisions: nothing in it is lost, and no disk holds up or ends a training."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from agree.leading import drive
from run_records import read_log

from megatron_adaptra.adapt.log import DecisionLog
from megatron_adaptra.adapt.pipeline.remedy import why_leave, why_none, why_swap
from megatron_adaptra.adapt.schedules.decisions import (
    LinkChange,
    Place,
    PlanDecision,
)
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import STOCK
from megatron_adaptra.ir.timeline import Span, Timeline
from megatron_adaptra.plan.pipeline.base import make_plan

SCHEMA = Path(__file__).parents[3] / "docs" / "decision-log.schema.json"


def decision(number: int) -> PlanDecision:
    return PlanDecision(
        number=number,
        iteration=number + 2,
        detected=number,
        kinds=["schedule"],
        links=[
            LinkChange(Place(2, 6, "here", "eth0"), Place(3, 7, "there", "mlx5_0:1"), 0.0, 40.0)
        ],
        why="link 2->3 takes 40 ms " * 50,
        warmup_before=[3, 2, 1],
        warmup_after=[6, 4, 1],
        predicted_ms=100.0,
        predicted_without_ms=200.0,
        stock=Timeline((Span(0, Op(Kind.F, 0), 0.0, 0.25),)),
        lower_bound_ms=90.0,
        planning_ms=1.0,
        digest="d",
        plan="p",
        conditions={"cores": None},
    )


def test_the_lines_of_a_decision_add_up(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "decisions.jsonl"
    log = DecisionLog(PlanDecision, path)
    first = decision(0)
    log.add(first)
    log.add(decision(1))
    log.close_vote(first, True)
    for ran in range(2, 6):
        log.outcome(ran, 0.04)
    log.refresh(first, 41.0)
    log.close()
    one, other = read_log(path)
    assert (one["detected"], one["stock_ms"], one["why"]) == (0, 250.0, first.why)
    assert (one["committed"], one["measured_ms"], one["refreshed_ms"]) == (True, 40.0, 41.0)
    assert (other["detected"], other["committed"], other["measured_ms"]) == (1, False, None)
    assert not {"samples", "stock"} & one.keys()


def test_a_decision_is_one_line_and_what_comes_later_is_another_kind(tmp_path: Path) -> None:
    """As its schema in docs says; the last of three decisions cannot be acknowledged in time."""
    path, record = tmp_path / "decisions.jsonl", tmp_path / "replica-0.jsonl"
    slow = {(1, 2): 0.04, (2, 1): 0.02}
    began = time.time()
    drive(path, lambda i: slow if 6 <= i < 20 else {}, 40, paced=True, record_at=record)
    log = DecisionLog(PlanDecision, path)
    log.add(refused := decision(0))
    log.close_vote(refused, False)
    log.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    for row in rows:
        validator.validate(row)
        assert began - 1 <= row["at"] <= time.time() + 1
    kinds = [row["kind"] for row in rows]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "decision": 3, "vote": 3, "prediction": kinds.count("prediction"), "outcome": 2,
    }  # fmt: skip
    assert "prediction" in kinds
    assert [row["committed"] for row in rows if row["kind"] == "vote"] == [True, True, False]
    in_record = [json.loads(line) for line in record.read_text().splitlines()]
    kept = [row for row in in_record if row["kind"] not in ("run", "iteration")]
    assert [(r["kind"], r["at"]) for r in kept] == [(r["kind"], r["at"]) for r in rows[:-2]]
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**rows[0], "unheard": 1})


def test_a_decision_names_both_ends_of_its_links(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    run = drive(path, lambda i: {(1, 2): 0.04} if i >= 6 else {}, 20, paced=True)
    (found,) = read_log(path)
    (link,) = [one for one in found["links"] if one["source"]["stage"] == 1]
    ends = [
        {"stage": 1, "rank": 11, "host": "host1", "through": "eth2", "worker": ""},
        {"stage": 2, "rank": 12, "host": "host2", "through": "eth1", "worker": ""},
    ]
    assert [link["source"], link["target"]] == ends
    assert link["delay_ms"] == pytest.approx(40, rel=0.1)
    assert link["delay_before_ms"] < 1
    last = run.leader.loop.log.last
    assert last is not None
    assert last.sentence().endswith("; between rank 11 on host1 (eth2) and rank 12 on host2 (eth1)")


@pytest.mark.parametrize(
    ("took", "words"),
    [(104.0, "104 ms, as predicted (100)"), (106.0, "106 ms, predicted were 100")],
)
def test_what_came_of_a_decision_is_a_sentence_where_it_was_announced(
    took: float, words: str
) -> None:
    log, lines = DecisionLog(PlanDecision, None), list[str]()
    for number, say in ((10, None), (13, lines.append), (16, lines.append)):
        log.close_vote(decision(number), True, say)
    for ran in range(12, 18):  # the last plan begins with 18
        log.outcome(ran, took / 1e3)
    log.close()
    assert lines == [f"the plan of iteration 16: an iteration takes {words}"]


@pytest.fixture(params=["full", "no name"])
def unwritable(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "log"
    if request.param == "full":  # by a link: a log that replaced it would take root's device away
        path.symlink_to("/dev/full")
    else:
        return Path("with a NUL \0 in it")
    return path


def test_a_log_that_cannot_be_written_costs_one_line_and_no_replan(
    unwritable: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = drive(unwritable, lambda i: {(1, 2): 0.04} if i >= 8 else {}, 30, paced=True)
    assert run.leader.loop.log.committed == 1
    (line,) = capfd.readouterr().err.splitlines()
    where = str(unwritable.absolute())
    assert line.startswith(f"adaptra: decisions cannot be logged in {where!r}: ")


def test_log_without_a_file_counts_decisions() -> None:
    log = DecisionLog(PlanDecision, None)
    log.add(decision(0))
    log.close()
    assert log.made == 1
    json.dumps(decision(0).to_json())


def test_a_link_out_of_bandwidth_that_no_plan_helps_has_its_reason() -> None:
    links = {(0, 1): LinkState(0.001, 2e7), (1, 0): LinkState(0.001)}
    job = Conditions(8, (0.01, 0.01), (0.01, 0.01), (0.01, 0.01), links, message_bytes=1e6)
    text = why_none({(0, 1): 0.002}, job, 0.5, 0.45, 0.15)
    assert "link 0->1 takes 51 ms, 50 for its bytes at 20 MB/s, before 2 ms" in text
    assert "the messages of a microbatch take up to 50 ms there, a microbatch 30 ms on" in text
    least = "an iteration takes 500 ms, by the best plan 450 (10.0% less, 15% are needed)"
    assert f"the plan in force stays: {least}; out of bandwidth: 0->1" in text
    late = why_none({(1, 0): 0.0005}, job, 0.5, 0.5, 0.15)
    assert late.endswith("no plan is faster than the one in force, whose iterations take 500 ms")


def test_messages_that_leave_the_queue_without_a_deeper_warmup() -> None:
    """A model whose layers are CUDA graphs keeps its warmup."""
    before = {(0, 1): 0.001}
    job = Conditions(8, (0.01, 0.01), (0.01, 0.01), (0.01, 0.01), {(0, 1): LinkState(0.04)})
    same, deeper = make_plan(job, "1f1b"), make_plan(job)
    assert deeper.schedule.warmup > same.schedule.warmup
    stock = replace(same, schedule=replace(same.schedule, policy=STOCK))
    leave = "its messages leave the GPU's queue"
    text = why_swap(before, job, stock, same, back=False)
    assert text.endswith(f": {leave} (warmup 2,1 -> 2,1)")
    assert f"{leave}, and a deeper warmup hides it (" in why_swap(before, job, stock, deeper, False)
    assert ": a deeper warmup hides it (" in why_swap(before, job, same, deeper, False)


def test_a_link_that_is_slow_for_megatrons_messages_alone_has_both_times() -> None:
    ours, theirs = ({(0, 1): LinkState(seconds)} for seconds in (0.001, 0.08))
    job = Conditions(8, (0.01, 0.01), (0.01, 0.01), (0.01, 0.01), ours)
    plan, native = make_plan(job, "1f1b"), replace(job, links=theirs)
    stock = replace(plan, schedule=replace(plan.schedule, policy=STOCK), extra=0.3)
    both = "takes 80 ms for Megatron's messages, for ours 1 ms"
    leave = ": its messages leave the GPU's queue (warmup 2,1 -> 2,1)"
    text = why_swap({(0, 1): 0.0005}, job, stock, plan, False, native)
    assert text == f"link 0->1 {both}, before 0.5 ms{leave}"
    assert why_leave((0, 1), job, native, stock, plan) == (
        "Megatron's own messages hold up an iteration by 300 ms; most on link 0->1, "
        f"which {both}{leave}"
    )
    alike = why_swap({(0, 1): 0.0005}, job, stock, plan, False, replace(job))
    assert alike == f"link 0->1 takes 1 ms, before 0.5 ms{leave}"
