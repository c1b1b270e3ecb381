"""The log of decisions is whole at any moment."""

import json
import threading

from runtime.pipeline import PATIENCE

from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.timeline import Span, Timeline
from megatron_adaptra.runtime.decisions import Decision, DecisionLog


def decision(number: int) -> Decision:
    return Decision(
        iteration=number + 2,
        detected=number,
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
        samples=[1.0, 2.0],
    )


def test_lines_are_the_decisions(tmp_path):
    path = tmp_path / "deep" / "decisions.jsonl"
    log = DecisionLog(path)
    assert not path.exists()
    first = decision(0)
    log.add(first)
    log.add(decision(1))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["detected"] for row in rows] == [0, 1]
    assert rows[0]["measured_ms"] is None
    assert rows[0]["stock_ms"] == 250.0
    assert not {"samples", "stock"} & rows[0].keys()
    first.measured_ms, first.committed = 42.0, True
    log.write()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert (rows[0]["measured_ms"], rows[0]["committed"]) == (42.0, True)
    assert [p.name for p in path.parent.iterdir()] == ["decisions.jsonl"]


def test_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "decisions.jsonl"
    log, done = DecisionLog(path), threading.Event()
    log.add(decision(0))

    def writes():
        for number in range(1, 100):
            log.add(decision(number))
        done.set()

    writer = threading.Thread(target=writes)
    writer.start()
    counts = []
    while not done.is_set():
        text = path.read_text()
        assert text.endswith("\n")
        counts.append(len([json.loads(line) for line in text.splitlines()]))
    writer.join(PATIENCE)
    assert counts == sorted(counts)


def test_log_without_a_file_keeps_decisions():
    log = DecisionLog(None)
    log.add(decision(0))
    log.write()
    assert len(log.decisions) == 1
