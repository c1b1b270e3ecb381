"""The replan loop: all stages run the same schedule in every iteration, whatever happens."""

import random
import re
import threading
from itertools import pairwise

import pytest
from agree.leading import drive, warmups
from agree.pipeline import schedule
from patience import PATIENCE
from run_records import read_log
from seeding import new_seed
from transport.loopback import LoopbackNetwork
from transport.ranks import threads

from megatron_adaptra.adapt.schedules.policy import ReplanPolicy
from megatron_adaptra.agree.channel import Channel
from megatron_adaptra.config import Budget
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.schedule import Schedule, peak_in_flight
from megatron_adaptra.measure.report import Memory

SLOW = {(1, 2): 0.04, (2, 1): 0.04}
STOCK = (3, 2, 1)


def committed(path):
    return [row for row in read_log(path) if row["committed"]]


@pytest.mark.parametrize(("stages", "rendezvous"), [(2, True), (4, False)])
def test_one_replan_in_and_one_out(tmp_path, stages, rendezvous):
    seed = new_seed()
    link = random.Random(seed).randrange(stages - 1)
    slow = {(link, link + 1): 0.05, (link + 1, link): 0.05}
    path = tmp_path / "decisions.jsonl"
    run = drive(
        path,
        lambda i: slow if 8 <= i < 19 else {},
        iterations=34,
        stages=stages,
        seed=seed,
        control=LoopbackNetwork(rendezvous),
        paced=True,
    )
    for ran in run.ran:
        assert ran == run.ran[0]
    stock = tuple(range(stages, 0, -1))
    before, during, after = warmups(run.ran[0])
    assert before == after == stock
    assert during[0] > stock[0]

    into, out = committed(path)
    for row, old, new in ((into, stock, during), (out, during, stock)):
        assert (tuple(row["warmup_before"]), tuple(row["warmup_after"])) == (old, new)
        assert row["predicted_ms"] > 0
        assert row["measured_ms"] > 0
        assert row["lower_bound_ms"] <= row["predicted_ms"] * (1 + 1e-9)
        plan = Schedule.parse(row["plan"])
        assert plan.digest() == row["digest"]
        assert plan == run.ran[0][row["iteration"]]
        assert run.ran[0][row["iteration"] - 1].warmup == old
    assert 8 < into["detected"] < into["iteration"] < 19 < out["detected"] < out["iteration"]
    assert f"{link}->{link + 1} takes 50 ms, before 0.1 ms" in into["why"]
    assert into["predicted_ms"] < into["predicted_without_ms"]
    # At once, and not when the plan is looked at again.
    assert re.search(r"has recovered \(\S+ ms, before 50 ms\).*: back to 1F1B", out["why"])
    assert ", which frees the memory of up to " in out["why"]
    assert "expected to take" not in run.leader.loop.log.last.sentence()


def test_a_link_that_eases_little_by_little_gives_the_memory_back(tmp_path):
    """No single step is a change that matters, yet in the end nothing is slow."""

    def delays(i):
        seconds = 0.0 if i < 6 else 0.04 if i < 14 else 0.02 * 0.85 ** max(0, i - 20)
        return {(1, 2): seconds, (2, 1): seconds}

    path = tmp_path / "decisions.jsonl"
    run = drive(path, delays, iterations=50, paced=True)
    assert len(warmups(run.ran[0])) > 2
    assert run.ran[0][-1].warmup == STOCK
    assert "a deeper warmup gains too little now: back to 1F1B" in committed(path)[-1]["why"]


def test_slow_from_the_start_is_planned_for(tmp_path):
    path = tmp_path / "decisions.jsonl"
    run = drive(path, lambda _: SLOW, iterations=30, paced=True)
    assert len(warmups(run.ran[0])) == 2
    (row,) = committed(path)
    assert "1->2 takes 40 ms, from the start" in row["why"]
    assert row["measured_ms"] > 0


def test_healthy_links_change_nothing(tmp_path):
    path = tmp_path / "decisions.jsonl"
    run = drive(path, lambda _: {}, iterations=20, paced=True)
    assert warmups(run.ran[0]) == [STOCK]
    assert run.leader.loop.log.made == 0
    assert list(run.leader.loop.remedy.delays) == [*range(1, 20)]  # iteration 0 does not count
    assert set(run.leader.loop.remedy.delays[1]) == {"0>1", "1>0", "1>2", "2>1"}


def test_a_fixed_schedule_stays(tmp_path):
    path = tmp_path / "decisions.jsonl"
    run = drive(path, lambda _: SLOW, 20, rule=ReplanPolicy(fixed=True), paced=True)
    assert threads() == [], "its control threads have ended"
    assert warmups(run.ran[0]) == [STOCK]
    assert run.leader.loop.log.made == 0
    assert run.leader.loop.remedy.delays[19]["1>2"] == pytest.approx(0.04, rel=0.1)


@pytest.mark.parametrize(("nbytes", "depths"), [(250, (2, 2, 1)), (199, (1, 1, 1))])
def test_a_budget_in_bytes_is_kept_to_once_a_microbatch_has_been_measured(tmp_path, nbytes, depths):
    path = tmp_path / "decisions.jsonl"
    measured = Memory(peak=3.0, peak_bytes=300, per_microbatch=100, free=0)
    budget = {"budget": Budget(nbytes=nbytes), "memory": measured}
    run = drive(path, lambda _: {}, 16, **budget, paced=True)
    assert warmups(run.ran[0]) == [STOCK, depths]
    (row,) = committed(path)
    assert f"stage 0 holds 3 microbatches, its memory is for {nbytes // 100}" in row["why"]


def test_an_order_that_meets_other_replicas_is_undone_for_good(tmp_path):
    """Also by what a stage has met just once, and however slow the link is later."""
    path, why = tmp_path / "decisions.jsonl", "a layer calls all_reduce over ranks 0, 3"
    met = {"met": lambda stage, i: why if (stage, i) == (1, 20) else ""}
    run = drive(path, lambda i: {} if 30 <= i < 40 else SLOW, 60, **met, paced=True)
    for ran in run.ran:
        assert ran == run.ran[0]
    before, _, after = warmups(run.ran[0])
    assert before == after == STOCK
    *_, row = committed(path)
    assert row["detected"] == 20
    assert row["why"].startswith(f"{why}: back to 1F1B ")


def test_backwards_in_halves_that_memory_is_not_enough_for_are_given_up(tmp_path):
    """One microbatch at a time is as few as can be, but its backward can be in one piece."""
    path = tmp_path / "decisions.jsonl"
    line = tuple(Op(kind, i) for i in range(8) for kind in (Kind.F, Kind.I, Kind.W))
    halved = Schedule((line,) * 3, 8, policy="adaptive")
    measured = Memory(peak=1.0, peak_bytes=120, per_microbatch=100, free=0)
    run = drive(
        path, lambda _: {}, 16, resumed=halved, paced=True, memory=measured, split=True,
        budget=Budget(nbytes=110), rule=ReplanPolicy(policy="adaptive"),
    )  # fmt: skip
    assert run.ran[0][0].order == halved.order
    assert not any(op.kind is Kind.W for line in run.ran[0][-1].order for op in line)
    assert all(peak_in_flight(line) == 1.0 for line in run.ran[0][-1].order)
    assert committed(path)[0]["why"] == "there is no memory for backwards in halves"


def test_a_slow_link_is_planned_for_within_a_budget_in_bytes(tmp_path):
    path = tmp_path / "decisions.jsonl"
    measured = Memory(peak=3.0, peak_bytes=300, per_microbatch=100, free=200)
    run = drive(
        path, lambda i: SLOW if i >= 8 else {}, 24, paced=True, memory=measured,
        budget=Budget(auto=True), rule=ReplanPolicy(policy="adaptive"), split=True, recompute=True,
    )  # fmt: skip
    before, during = (run.ran[0][i] for i in (7, -1))
    assert before.warmup == STOCK
    # Of what was free, nine tenths may be taken: 300 + 180 bytes are 4 microbatches.
    assert run.leader.loop.remedy.estimator.budgets == (4.0, 4.0, 4.0)
    assert all(peak_in_flight(line) <= 4.0 for line in during.order)
    assert {Kind.I, Kind.W} <= {op.kind for line in during.order for op in line}


def test_ranks_beyond_the_pipeline_run_its_order(tmp_path):
    """Tensor-parallel ranks meet those of the leader's pipeline inside every op."""
    path = tmp_path / "decisions.jsonl"
    slow = {(1, 2): 0.05, (2, 1): 0.05}
    run = drive(path, lambda i: slow if i >= 6 else {}, 20, followers=3, watcher=4, paced=True)
    assert len(run.ran) == 6
    for ran in run.ran:
        assert ran == run.ran[0]
    assert len(warmups(run.ran[0])) == 2
    (status,) = run.statuses
    assert status["replans"] == 1
    assert status["delays"]["1>2"] == pytest.approx(0.05, rel=0.1)
    row = committed(path)[0]
    # Predicted again once the plan's own iterations have been measured.
    assert status["predicted"] * 1e3 == pytest.approx(row["refreshed_ms"])
    assert row["refreshed_ms"] == pytest.approx(row["predicted_ms"], rel=0.2)


def test_a_plan_of_a_checkpoint_is_in_force_at_once_and_stays(tmp_path):
    path = tmp_path / "decisions.jsonl"
    deep = schedule((8, 5, 1), 8)
    slow = dict.fromkeys(((0, 1), (1, 0), (1, 2), (2, 1)), 0.04)
    run = drive(path, lambda _: slow, 20, resumed=deep, paced=True)
    assert {one for ran in run.ran for one in ran} == {deep}
    assert run.leader.loop.log.made == 0


def test_a_plan_of_a_checkpoint_is_left_when_the_links_have_healed(tmp_path):
    path = tmp_path / "decisions.jsonl"
    deep = schedule((8, 8, 1), 8)
    run = drive(path, lambda _: {}, 20, resumed=deep, paced=True)
    assert warmups(run.ran[0]) == [deep.warmup, STOCK]
    assert "back to 1F1B" in committed(path)[0]["why"]


def test_late_answers_abort_the_swap_and_it_is_tried_again(tmp_path):
    """Stage 2 reads no message before iteration 20: no rank swaps before, all do after."""
    path, go_on = tmp_path / "decisions.jsonl", threading.Event()

    class Deaf(Channel):
        def receive(self, timeout):
            message = super().receive(timeout)
            assert message is None or go_on.wait(PATIENCE)
            return message

    def at(stage, iteration):
        if iteration == 20:
            go_on.set()

    run = drive(
        path, lambda i: SLOW if i >= 6 else {}, 50, at=at, channels={2: Deaf}, votes=False,
        paced=True,
    )  # fmt: skip
    for ran in run.ran:
        assert ran == run.ran[0]
    assert len(warmups(run.ran[0])) == 2
    lines = read_log(path)
    assert [row["committed"] for row in lines] == [False] * (len(lines) - 1) + [True]
    assert len(lines) >= 3
    assert lines[0]["measured_ms"] is None
    assert lines[-1]["measured_ms"] > 0
    gaps = [row["iteration"] - row["detected"] for row in lines]
    assert all(2 * a <= b + 2 for a, b in pairwise(gaps))  # more time is given each time
    for row in lines:
        assert row["why"].startswith("link 1->2 takes 40 ms, before 0.1 ms")


def test_random_control_delays_never_split_the_pipeline(tmp_path):
    """Control messages take nothing to several iterations, and that changes all the time."""
    seed = new_seed()
    rng = random.Random(seed)
    network = LoopbackNetwork()
    steps = [rng.choice([{}, SLOW, {(0, 1): 0.06}, {(2, 1): 0.1}]) for _ in range(10)]

    def at(stage, iteration):
        if stage == 0:
            way = rng.choice([(0, 1), (1, 0), (0, 2), (2, 0)])
            network.delay[way] = rng.choice([0.0, 0.0, 0.002, 0.01])

    run = drive(tmp_path / "d", lambda i: steps[i // 8], 80, seed=seed, control=network, at=at)
    for ran in run.ran:
        assert ran == run.ran[0]
    swaps = [i for i in range(1, 80) if run.ran[0][i] != run.ran[0][i - 1]]
    assert swaps == [row["iteration"] for row in committed(tmp_path / "d")]
    for row in committed(tmp_path / "d"):
        if row["iteration"] + 1 not in (*swaps, 78, 79, 80):
            assert row["measured_ms"] > 0, "decisions in a row are all measured"


def test_what_a_plan_seems_to_do_to_links_goes_with_it(tmp_path):
    """Cores that are shared delay messages under one plan and not under the next."""
    slow = {(1, 2): 0.05, (2, 1): 0.05}
    last = drive(tmp_path / "quiet.jsonl", lambda i: slow if i >= 6 else {}, 30, paced=True)
    (quiet,) = committed(tmp_path / "quiet.jsonl")
    between = range(quiet["detected"], quiet["iteration"])
    seeming = {(0, 1): 0.2, (1, 0): 0.2}

    def delays(i):
        return (slow if i >= 6 else {}) | (seeming if i in between else {})

    run = drive(tmp_path / "noisy.jsonl", delays, 30, paced=True)
    (noisy,) = committed(tmp_path / "noisy.jsonl")
    assert noisy["iteration"] == quiet["iteration"]
    assert run.ran[0][-1] == last.ran[0][-1]


def test_what_changes_while_a_plan_is_agreed_on_is_planned_for_afterwards(tmp_path):
    slow, more = {(1, 2): 0.05, (2, 1): 0.05}, {(0, 1): 0.05, (1, 0): 0.05}
    drive(tmp_path / "one.jsonl", lambda i: slow if i >= 6 else {}, 30, paced=True)
    (one,) = committed(tmp_path / "one.jsonl")

    def delays(i):
        return (slow if i >= 6 else {}) | (more if i >= one["detected"] else {})

    drive(tmp_path / "two.jsonl", delays, 30, paced=True)
    first, second = committed(tmp_path / "two.jsonl")
    assert first["iteration"] == one["iteration"]
    assert second["detected"] - first["iteration"] <= 2
