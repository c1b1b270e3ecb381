"""A plan that one stage refuses is run by nobody."""

from runtime.leading import drive, warmups

from megatron_adaptra.runtime.channel import Channel
from megatron_adaptra.runtime.decisions import read_log

SLOW = {(1, 2): 0.04, (2, 1): 0.04}


def test_a_plan_that_comes_damaged_to_one_stage_is_run_by_nobody(tmp_path):
    """Twice its bytes are others when stage 2 gets it; the third time all swap together."""
    path, damaged = tmp_path / "decisions.jsonl", []

    class Damaging(Channel):
        def receive(self, timeout):
            message = super().receive(timeout)
            if message is not None and message["kind"] == "propose" and len(damaged) < 2:
                damaged.append(message["number"])
                message["plan"] += " "
            return message

    run = drive(path, lambda i: SLOW if i >= 6 else {}, 40, channels={2: Damaging}, paced=True)
    for ran in run.ran:
        assert ran == run.ran[0]
    assert damaged == [0, 1]
    assert [row["committed"] for row in read_log(path)] == [False, False, True]
    assert len(warmups(run.ran[0])) == 2
