"""When two schedules are one and the same plan."""

from dataclasses import replace

from megatron_adaptra.ir.schedule import STOCK, Schedule, warmup_line


def test_the_same_order_over_other_messages_is_another_plan():
    ours = Schedule((warmup_line(2, 4), warmup_line(1, 4)), 4, policy="1f1b")
    assert ours.same_as(replace(ours, policy="warmup", why="for another reason"))
    assert not ours.same_as(replace(ours, policy=STOCK))
    assert not replace(ours, policy=STOCK).same_as(ours)
    assert not ours.same_as(replace(ours, order=(warmup_line(3, 4), warmup_line(1, 4))))
