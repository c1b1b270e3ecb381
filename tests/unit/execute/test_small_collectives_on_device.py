"""Small collectives whose values are on a device: timed late, for some ranks at a time."""

from __future__ import annotations

import contextlib
import threading
import time

import torch
import torch.distributed as dist
from execute.test_small_collectives import costs_of, everywhere, install, served_by
from torch.distributed import ReduceOp

from megatron_adaptra.execute.small.collective import FIRST
from megatron_adaptra.execute.small.small_collectives import SMALL


class Behind:
    """A device's clock: a mark's time is known from the second look on."""

    behind = True

    class Mark:
        def __init__(self):
            self.recorded, self._looks = time.monotonic(), 0

        def at(self):
            self._looks += 1
            return self.recorded if self._looks > 1 else None

    def mark(self):
        return self.Mark()


@contextlib.contextmanager
def served_beside(me, late):
    """What stands in for a backend on a device, whose sums are so many seconds late."""
    native = dist.all_reduce

    def slow(*args, **kwargs):
        threading.Event().wait(late)
        return native(*args, **kwargs)

    dist.all_reduce = slow
    served = served_by(me, range(2), "auto", clock=Behind())
    patched = install(served)
    yield served
    patched.close()
    dist.all_reduce = native


def timed_late(me):
    with served_beside(me, 0.2) as served:
        for _ in range(FIRST + 6):
            dist.all_reduce(torch.tensor([1.0]))
        ((backend, ours, direct),) = costs_of(served).values()
    return backend, ours, direct


def test_a_backend_on_a_device_is_timed_by_its_clock():
    for backend, ours, direct in everywhere(timed_late, ranks=2):
        assert direct
        assert backend > 0.15 > ours


def watched(me):
    """Two scalars and something large while the backend does all, and then no more."""
    iterations = []
    with served_beside(me, 0.1) as served:
        for iteration in range(2 * FIRST):
            if iteration == FIRST:  # links have changed, some iterations ago
                served.measure_again(range(2))
            served.active = iteration >= FIRST
            dist.all_reduce(torch.tensor([1.0]))
            served.hiding = True
            dist.all_reduce(torch.tensor([1.0]), op=ReduceOp.MAX)
            served.hiding = False
            dist.all_reduce(torch.zeros(SMALL + 1))
            iterations.append([one.known() for one in map(looked_at, served.take_spans())])
    return iterations


def looked_at(span):
    span.known()  # too early
    return span


def test_what_a_backend_takes_is_watched_while_nothing_is_ours():
    for iterations in everywhere(watched, ranks=2):
        names = {
            tuple(sorted(one.name for one in row if one.name != "connect")) for row in iterations
        }
        assert len(names) == 1  # the same ones on either path
        before, after = iterations[FIRST - 1], iterations[-1]
        for row in iterations[:FIRST]:
            assert len(row) == 3
            assert all(one.end - one.start == one.backend > 0.09 for one in row)
        assert [(one.direct, one.kept) for one in before] == [
            (-1.0, False), (0.0, False), (-1.0, True),
        ]  # fmt: skip
        # Found out at once, and what the backend takes is known.
        first = [one for one in iterations[FIRST] if one.name != "connect"]
        assert all(one.backend > 0.09 for one in first)
        assert first[0].direct > 0
        assert after[0].direct > 0
        assert min(row[0].direct for row in iterations[FIRST + 1 :]) < 0.05
        assert after[2].kept
        assert after[2].end - after[2].start > 0.09


def some_within(me):
    served = served_by(me, range(4), within=[0, 1] if me.rank < 2 else [2, 3])
    patched = install(served)
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][me.rank // 2]
    for _ in range(FIRST + 1):
        dist.all_reduce(torch.zeros(1), group=pair)
        dist.all_reduce(torch.zeros(1))  # with members that may not be active now
    used = [one.members for one in served._all()]
    patched.close()
    return used


def test_what_not_all_serve_at_the_same_time_goes_to_torch():
    assert everywhere(some_within, ranks=4) == [[(0, 1)]] * 2 + [[(2, 3)]] * 2


def unexplained(me, mode):
    """A backend whose sums have an order of no candidate."""
    native = dist.all_reduce

    def odd(tensor, op=ReduceOp.SUM, group=None, async_op=False):
        gathered = [torch.zeros_like(tensor) for _ in range(4)]
        dist.all_gather(gathered, tensor)
        a, b, c, d = gathered
        tensor.copy_((a + c) + (b + d))

    dist.all_reduce = odd
    served = served_by(me, range(4), mode)
    patched = install(served)
    rows = torch.tensor([1e8, 1.0, -1e8, 1.0]) if mode == "fixed" else torch.ones(4)
    for _ in range(FIRST + 2):
        value = rows[me.rank : me.rank + 1].clone()
        dist.all_reduce(value)
    ((_, _, direct),) = costs_of(served).values()
    patched.close()
    dist.all_reduce = native
    return value.item(), direct


def test_sums_in_an_order_that_is_not_known_are_the_backends_or_if_asked_in_that_of_the_ranks():
    assert everywhere(unexplained, "on", ranks=4) == [(4.0, False)] * 4
    rows = torch.tensor([1e8, 1.0, -1e8, 1.0])
    in_turn = ((rows[0] + rows[1]) + rows[2]) + rows[3]
    assert in_turn != (rows[0] + rows[2]) + (rows[1] + rows[3])
    assert everywhere(unexplained, "fixed", ranks=4) == [(in_turn.item(), True)] * 4
