"""A plan that one stage refuses, or reads as another one, is run by nobody."""

import json

from agree.leading import drive, warmups
from run_records import read_log

from megatron_adaptra.agree.bundle import digest_of, scheduled
from megatron_adaptra.agree.channel import Channel
from megatron_adaptra.ir.schedule import Schedule

SLOW = {(1, 2): 0.04, (2, 1): 0.04}


def test_a_plan_that_comes_damaged_to_one_stage_is_run_by_nobody(tmp_path):
    """Twice its bytes are others when stage 2 gets it; the third time all swap together."""
    path, damaged = tmp_path / "decisions.jsonl", []

    class Damaging(Channel):
        def receive(self, timeout):
            message = super().receive(timeout)
            if message is not None and message["kind"] == "propose" and len(damaged) < 2:
                damaged.append(message["number"])
                message["bundle"] += " "
            return message

    run = drive(path, lambda i: SLOW if i >= 6 else {}, 40, channels={2: Damaging}, paced=True)
    for ran in run.ran:
        assert ran == run.ran[0]
    assert damaged == [0, 1]
    assert [row["committed"] for row in read_log(path)] == [False, False, True]
    assert len(warmups(run.ran[0])) == 2


def test_a_plan_that_one_stage_reads_as_another_is_run_by_nobody(tmp_path, capfd):
    """What stage 1 gets is whole and could run; only its digest shows that it is not the same."""
    path, changed = tmp_path / "decisions.jsonl", []

    class Changing(Channel):
        def receive(self, timeout):
            message = super().receive(timeout)
            if message is not None and message["kind"] == "propose" and len(changed) < 2:
                changed.append(message["number"])
                plan = Schedule.from_json(json.loads(message["bundle"])["schedule"])
                other = scheduled(Schedule(plan.order, plan.microbatches, 1, plan.policy, "why"))
                message |= {"bundle": other.text, "digest": digest_of(other.text)}
            return message

    run = drive(path, lambda i: SLOW if i >= 6 else {}, 40, channels={1: Changing}, paced=True)
    for ran in run.ran:
        assert ran == run.ran[0]
    assert changed == [0, 1]
    assert [row["committed"] for row in read_log(path)] == [False, False, True]
    assert capfd.readouterr().err.count("member 1 reads another plan than was proposed") == 1
