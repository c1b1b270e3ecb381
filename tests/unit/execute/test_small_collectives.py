"""The backend's order of sums, and the collectives of torch that go through all-gathers and it."""

from __future__ import annotations

import os
import threading
from itertools import islice, pairwise, product

import pytest
import torch
import torch.distributed as dist
from pairwise import covering
from patience import PATIENCE
from seeding import new_seed
from torch.distributed import ReduceOp
from transport.ranks import Processes

from megatron_adaptra.adapter.compat.patches import patch
from megatron_adaptra.execute.small import collective, reduction
from megatron_adaptra.execute.small.collective import FIRST, FIRST_RETRY
from megatron_adaptra.execute.small.small_collectives import FUNCTIONS, SmallCollectives
from megatron_adaptra.execute.watchdog import Watchdog
from megatron_adaptra.transport.wire import GlooWire

KINDS = {
    "op": (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN),
    "dtype": (torch.float32, torch.float64, torch.bfloat16, torch.int32),
    "count": (1, 3, 100),
}


def install(served):
    """As the adapter does it."""
    native = {name: getattr(dist, name) for name in FUNCTIONS}
    return patch("small-collectives", **served.stand_ins(native))


def served_by(me, stages, mode="on", **options):
    stages = list(stages)
    watchdog = Watchdog(me.rank, range(len(stages)))
    return SmallCollectives(stages, mode, PATIENCE, watchdog, wire=GlooWire(), **options)


def costs_of(served):
    """By operation the backend's seconds, the AllGather's, and whether it is used."""
    return {one.name: (*one.costs, one.direct) for one in served._collectives.values()}


def everywhere(body, *args, ranks):
    with Processes(body, *args, ranks=ranks) as processes:
        return [processes.result(rank) for rank in range(ranks)]


def backend_orders(me, ranks):
    found = {}
    for kind in covering(KINDS, lambda row: True):
        op, dtype, count = kind.values()
        like = torch.zeros(count, dtype=dtype)

        def native(tensor, op=op):
            dist.all_reduce(tensor, op)

        orders = reduction.orders_of(native, op, like, me.rank, ranks)
        assert orders is not None, (str(op), dtype, count)
        # Other values than those of the test: another seed, infinities, a NaN.
        rng = torch.Generator().manual_seed(7 * ranks + count)
        for trial in range(6):
            rows = torch.randn((ranks, count), generator=rng, dtype=torch.float64)
            rows = (rows * 10 ** (4 * torch.rand(rows.shape, generator=rng))).to(dtype)
            if dtype.is_floating_point and trial in (3, 4):
                special = (torch.inf, torch.nan)[trial - 3]
                rows[int(torch.randint(ranks, (1,), generator=rng)), 0] = special
            elif trial == 5:  # zeros of both signs
                rows *= 0
            ours, theirs = orders.reduce(op, list(rows)), rows[me.rank].clone()
            native(theirs)
            assert bool(reduction._equal(ours, theirs).all())
        found[str(op), str(dtype), count] = orders.digest()
    return found


@pytest.mark.parametrize("ranks", [2, 3, 5, pytest.param(8, marks=pytest.mark.long)])
def test_every_order_of_the_backend_is_found(ranks):
    results = everywhere(backend_orders, ranks, ranks=ranks)
    assert all(found == results[0] for found in results)


def test_candidates_of_a_kind_agree_and_no_others():
    """A kind is what theory says; here is what happens to many values."""
    dtypes = torch.float32, torch.bfloat16, torch.int32
    for size, op, dtype in product((2, 3, 5, 8), KINDS["op"], dtypes):
        kinds = reduction.kinds_of(op, dtype, size)
        same = torch.ones(len(kinds), len(kinds), dtype=torch.bool)
        for values in islice(reduction.trials(op, dtype, size, 50), 8 * size):
            results = reduction.candidates(op, values)
            same &= reduction._equal(results[:, None], results[None]).all(dim=-1)
        assert torch.equal(same, kinds[:, None] == kinds[None]), (size, op, dtype)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_candidate_is_one_way_round_the_ring(size):
    which = torch.arange(reduction.orders(size))
    values = torch.randn(size, 20)
    candidates = reduction.candidates(ReduceOp.SUM, values)
    for number, members in enumerate(reduction.path(which, size).T.tolist()):
        first, down = number % size, number // size % 2
        assert members == [(first + n * (1 - 2 * down)) % size for n in range(size)]
        total = values[members[0]]
        for member in members[1:]:
            total = total + values[member]
        assert torch.equal(candidates[number], total)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN])
@pytest.mark.parametrize("size", [3, 8, 72])
def test_a_few_trials_are_enough(op, size):
    """Even where every element has an order of its own."""
    which = torch.arange(50) % reduction.orders(size)
    truth = reduction.Orders(size, which)
    rows, asked = reduction.trials(op, torch.float32, size, 50), []

    def native(tensor):
        asked.append(1)
        tensor.copy_(truth.reduce(op, list(next(rows))))

    found = reduction.orders_of(native, op, torch.zeros(50), 0, size)
    assert len(asked) < 30
    kinds = reduction.kinds_of(op, torch.float32, size)
    assert torch.equal(kinds[found.which.long()], kinds[which])
    for values in islice(reduction.trials(op, torch.float32, size, 50), 100, 120):
        ours, theirs = found.reduce(op, list(values)), truth.reduce(op, list(values))
        assert bool(reduction._equal(ours, theirs).all())


def test_an_order_that_no_candidate_has_is_not_taken_for_one():
    rows = reduction.trials(ReduceOp.SUM, torch.float32, 4, 1)

    def in_pairs(tensor):  # (0 + 1) + (2 + 3), which no ring gives
        values = next(rows)
        tensor.copy_((values[0] + values[1]) + (values[2] + values[3]))

    assert reduction.orders_of(in_pairs, ReduceOp.SUM, torch.zeros(1), 0, 4) is None


def training(me, stages, mode, seed):
    """Some iterations' collectives, natively and through ours."""
    ranks = len(stages)
    group = dist.new_group([0, ranks - 1])
    native = dist.all_reduce, dist.broadcast, dist.barrier
    ends = me.rank in (0, ranks - 1)
    results = {}
    for arm in ("native", "ours"):
        served = served_by(me, stages, mode)
        if arm == "ours":
            patched = install(served)
        rng = torch.Generator().manual_seed(seed + me.rank)
        log = []
        for _ in range(FIRST + (2 * FIRST_RETRY if mode == "auto" else 6)):  # "on" stays with it
            norm = torch.randn(1, generator=rng) * 1e3
            dist.all_reduce(norm)
            most = torch.randn(1, generator=rng)
            dist.all_reduce(most, op=ReduceOp.MAX)
            rerun = torch.randint(0, 2, (2,), generator=rng, dtype=torch.int32)
            dist.all_reduce(rerun)
            tokens = torch.randint(0, 999, (1,), generator=rng)
            dist.broadcast(tokens, src=ranks - 1)
            dist.barrier()
            log += [norm.item(), most.item(), *rerun.tolist(), tokens.item()]
            gradient = torch.randn(5000, generator=rng)
            if ends:
                dist.all_reduce(gradient, group=group)
            log.append(gradient.sum().item())
        costs = costs_of(served)
        if arm == "ours":
            patched.close()
        results[arm] = log
    assert (dist.all_reduce, dist.broadcast, dist.barrier) == native
    assert results["native"] == results["ours"]
    return {name: direct for name, (_, _, direct) in costs.items()}


@pytest.mark.parametrize(
    ("stages", "mode"),
    [
        ((0, 1), "on"),
        ((0, 1, 2), "auto"),
        ((0, 0, 1, 1), "on"),
        pytest.param(tuple(sorted(2 * (*range(6),))), "on", marks=pytest.mark.crowd),
    ],
)
def test_collectives_have_the_backends_results(stages, mode):
    used = everywhere(training, stages, mode, new_seed(), ranks=len(stages))
    if mode == "on":
        assert all(used[0].values())
    assert used[0].keys() == {"all_reduce", "broadcast", "barrier"}


def prefetching(me, wrong):
    """A flag, then two values that were known when the flag was."""
    served = served_by(me, [0, 0, 1, 2])
    patched = install(served)
    swaps = []
    wait = collective.SmallCollective.wait
    collective.SmallCollective.wait = lambda self: swaps.append(1) or wait(self)
    counts = []
    for step in range(FIRST + 4):
        flag, norm = (
            torch.tensor([me.rank], dtype=torch.int32),
            torch.tensor([me.rank + step / 8]),
        )
        zeros = torch.tensor([10.0 - me.rank])
        before = len(swaps)
        served.prefetch([(norm, ReduceOp.MAX), (zeros, ReduceOp.MAX)], dist.group.WORLD)
        if wrong and step == FIRST + 3 and me.rank == 1:
            norm = norm + 1
        dist.all_reduce(flag, ReduceOp.MIN)
        dist.all_reduce(norm, op=ReduceOp.MAX)
        dist.all_reduce(zeros, op=ReduceOp.MAX)
        assert (flag.item(), norm.item(), zeros.item()) == (0, 3 + step / 8, 10.0), step
        rate = torch.tensor([0.5])  # not prefetched
        dist.all_reduce(rate, op=ReduceOp.MAX)
        assert rate.item() == 0.5
        counts.append(len(swaps) - before)
    collective.SmallCollective.wait = wait
    patched.close()
    return counts[-1]


def test_what_is_prefetched_comes_with_the_first_exchange():
    assert everywhere(prefetching, False, ranks=4) == [2] * 4


def test_a_value_that_changes_after_it_was_sent_ahead_is_refused():
    with Processes(prefetching, True, ranks=4) as processes:
        with pytest.raises(AssertionError, match="was sent ahead, now it is"):
            processes.result(1)


def unmatched(me, path):
    """One member sees another result of the self-test than the rest."""
    os.dup2(os.open(f"{path}{me.rank}", os.O_WRONLY | os.O_CREAT), 2)
    if me.rank == 1:
        found = reduction.orders_of

        def other(*args):
            orders = found(*args)
            orders.which = orders.which + 1
            return orders

        collective.orders_of = other
    served = served_by(me, range(3))
    patched = install(served)
    for _ in range(FIRST + 3):
        value = torch.tensor([float(me.rank + 1)])
        dist.all_reduce(value)
        assert value.item() == 6.0
    ((_, _, direct),) = costs_of(served).values()
    patched.close()
    return direct


def test_a_mismatch_on_one_rank_leaves_all_with_the_backend(tmp_path):
    assert everywhere(unmatched, str(tmp_path / "err"), ranks=3) == [False] * 3
    printed = [(tmp_path / f"err{rank}").read_text() for rank in range(3)]
    assert "all_reduce of 1 torch.float32 over 3 ranks stays with the backend" in printed[0]
    assert "stays with the backend" not in printed[1] + printed[2]


def left_alone(me):
    served = served_by(me, [0, 0, 1, 1])
    patched = install(served)
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][me.rank // 2]
    for _ in range(FIRST + 1):
        dist.all_reduce(torch.zeros(1), group=inside)  # one stage
        dist.all_reduce(torch.zeros(10_000))  # much to say
        dist.all_reduce(torch.zeros(1), async_op=True).wait()
        dist.all_reduce(torch.ones(1), op=ReduceOp.PRODUCT)
    costs = costs_of(served)
    patched.close()
    return costs


def test_the_rest_goes_to_torch():
    assert everywhere(left_alone, ranks=4) == [{}] * 4


class Odd(Exception):
    pass


def patient(me):
    """The last rank does not wait for the first one's share of a gradient, nor for a flag."""
    group = dist.new_group([0, 2])
    served = served_by(me, range(3))
    raised = []

    def defer(collective, tensor):
        if tensor.numel() == 5000:
            return (lambda: None) if me.rank == 2 else None
        if tensor.dtype != torch.int32:
            return None
        tensor.zero_()

        def learn():
            if tensor.item():
                raise Odd

        return learn

    served.defer_hooks = [defer]
    patched = install(served)
    for step in range(FIRST + 6):
        doubt = step == FIRST + 3 and me.rank == 1
        deferred = me.rank == 2 and step >= FIRST
        gradient = torch.full((5000,), float(me.rank + step))
        if me.rank == 0 and step >= FIRST:
            me.meet()  # the last rank has gone on by then
        if me.rank != 1:
            dist.all_reduce(gradient, group=group)
        flag = torch.tensor([int(doubt)], dtype=torch.int32)
        dist.all_reduce(flag)
        if step >= FIRST:
            assert flag.item() == 0
            assert served.pending
        if deferred:
            assert gradient[0].item() == me.rank + step
            me.meet()
        if me.rank == 1 and step >= FIRST:
            me.meet()
        norm = torch.tensor([float(me.rank)])
        try:
            dist.all_reduce(norm)
        except Odd:
            raised.append(step)
        assert norm.item() == 3.0
        assert not served.pending
        if me.rank != 1:
            assert gradient.unique().tolist() == [2.0 + 2 * step]
    patched.close()
    return raised


def test_what_is_deferred_is_there_when_the_next_result_is():
    assert everywhere(patient, ranks=3) == [[FIRST + 3]] * 3


def seldom(me):
    """Which of 200 calls the backend has served, though it is much slower."""
    calls, native, now = [], dist.all_reduce, 0

    def slow(*args, **kwargs):
        calls.append(now)
        threading.Event().wait(0.5)  # a backend over a slow network
        return native(*args, **kwargs)

    dist.all_reduce = slow
    served = served_by(me, range(2), "auto")
    patched = install(served)
    for step in range(1, 201):
        now = step
        dist.all_reduce(torch.tensor([1.0]))
    patched.close()
    dist.all_reduce = native
    return [call for call in calls if call > FIRST]


@pytest.mark.long
def test_a_path_that_lost_is_measured_less_and_less_often():
    tries = everywhere(seldom, ranks=2)
    assert tries[0] == tries[1]
    gaps = [b - a for a, b in pairwise(tries[0])]
    assert len(gaps) >= 2
    assert all(later == 2 * gap for gap, later in pairwise(gaps))


def again_and_again(me, stages, others):
    """One that is always deferred comes many times in a row; what it has brought each time."""
    ranks = len(stages)
    served = served_by(me, stages)
    learned = []
    served.defer_hooks = [
        lambda one, tensor: (
            (lambda: learned.append(tensor.item())) if tensor.dtype == torch.int32 else None
        )
    ]
    patched = install(served)
    for step in range(FIRST + 12):
        dist.all_reduce(torch.tensor([step + me.rank], dtype=torch.int32))
        if others and step % others == others - 1:
            dist.all_reduce(torch.ones(1))
    served.wait_pending()
    patched.close()
    once = sum(range(ranks))
    assert learned == [ranks * step + once for step in range(FIRST - 1, FIRST + 12)]
    return True


@pytest.mark.parametrize(("stages", "others"), [((0, 1, 2), 0), ((0, 0, 1, 1), 3)])
def test_a_collective_in_flight_ends_before_it_starts_again(stages, others):
    assert all(everywhere(again_and_again, stages, others, ranks=len(stages)))


def between_steps(me):
    """What the backend is called for, in a step and outside."""
    native, called = dist.all_reduce, []

    def counted(*args, **kwargs):
        called.append(1)
        return native(*args, **kwargs)

    dist.all_reduce = counted
    served = served_by(me, range(3))
    patched = install(served)
    for _ in range(FIRST):
        dist.all_reduce(torch.ones(1))
    counts = []
    for served.in_step in (True, False, True):
        called.clear()
        value = torch.ones(1)
        dist.all_reduce(value)
        counts.append((value.item(), len(called)))
    patched.close()
    dist.all_reduce = native
    return counts


def test_outside_a_step_all_goes_to_torch():
    assert everywhere(between_steps, ranks=3) == [[(3, 0), (3, 1), (3, 0)]] * 3
