"""Schedules of several replicas: `check` refuses exactly those that cannot run, and says why."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir.graph import runs
from ir.served import assert_served, posted_ahead
from ir.strategies import random_replicas, random_schedule, seeds

from megatron_adaptra.base.errors import BadInput, ScheduleError
from megatron_adaptra.ir.check import SENDS, check
from megatron_adaptra.ir.op import Kind, Op
from megatron_adaptra.ir.program import Neighbours, Program, lower, unused_posts
from megatron_adaptra.ir.schedule import Schedule, parse_line

SENT, POSTED = (Kind.SEND_F, Kind.SEND_B), (Kind.POST_F, Kind.POST_B)


def two(*rows: str, count: int = 1) -> Schedule:
    """Of two replicas; a row per worker."""
    return Schedule(tuple(parse_line(row.split()) for row in rows), count, replicas=2)


def refusal(schedule: Schedule, budget=(), ahead=None) -> str:
    return refused(lower(schedule, ahead), budget)


def refused(program: Program, budget=()) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(program, budget)
    return str(caught.value)


# --- what runs -----------------------------------------------------------------------------------


@settings(max_examples=150)
@given(seeds)
def test_with_the_receives_posted_ahead_no_order_hangs(seed):
    schedule = random_replicas(random.Random(seed))
    program = lower(schedule)
    assert all(runs(program, sends) for sends in SENDS)
    check(program, schedule.peak_in_flight())


@settings(max_examples=150)
@given(seeds, st.integers(0, 4))
def test_check_finds_exactly_the_deadlocks(seed, ahead):
    rng = random.Random(seed)
    schedule = random_replicas(rng)
    order = [list(line) for line in schedule.order]
    for _ in range(rng.randint(0, 2)):
        line = rng.choice([line for line in order if line])
        line.insert(rng.randrange(len(line)), line.pop(rng.randrange(len(line))))
    lines = tuple(map(tuple, order))
    program = lower(
        Schedule(lines, schedule.microbatches, replicas=schedule.replicas),
        rng.choice([None, ahead]),
    )
    deadlocking = [sends for sends in SENDS if not runs(program, sends)]
    if not deadlocking:
        check(program)
        return
    with pytest.raises(ScheduleError, match=f"deadlock under {deadlocking[0]} sends") as caught:
        check(program)
    names = [program.routes.name(worker) for worker in range(len(order))]
    _, *rows = str(caught.value).splitlines()
    assert [row.split(" |")[0] for row in rows] == names
    assert any("cannot run" in row for row in rows)


@pytest.mark.parametrize("seed", range(3))
def test_with_one_receive_per_path_many_orders_hang(seed):
    rng = random.Random(seed)
    programs = [lower(random_schedule(rng, 3, 6, replicas=2), 1) for _ in range(20)]
    assert sum(not runs(program, "rendezvous") for program in programs) > 10


@given(seeds)
def test_only_paths_that_are_used_have_receives(seed):
    schedule = random_replicas(random.Random(seed))
    worker = {
        (op.home, op.microbatch, w % schedule.stages): w
        for w, line in enumerate(schedule.order)
        for op in line
    }
    used = set()
    for (home, microbatch, stage), source in worker.items():
        target = worker.get((home, microbatch, stage + 1), source)
        used |= {(source, target), (target, source)} if target != source else set()
    ahead = posted_ahead(schedule)
    assert set(ahead) == used
    most = schedule.replicas * schedule.microbatches + 1
    assert all(1 <= receives <= most for receives in ahead.values())


@given(seeds)
def test_both_ends_of_a_message_name_each_other(seed):
    program = lower(random_replicas(random.Random(seed)))
    sends, posts = [], []
    for worker, line in enumerate(program.order):
        neighbours = Neighbours(worker, program.routes)
        for op in line:
            if op.kind in SENT:
                made, peer = neighbours.exchange(op)
                assert op[1:] == made[1:]
                assert op._replace(kind=made.kind) in (line if made.kind is Kind.F else [made])
                sends.append((worker, peer, made))
            elif op.kind in POSTED:
                made, peer = neighbours.exchange(op)
                posts.append((peer, worker, made))
    assert len(set(sends)) == len(sends)
    assert sorted(sends) == sorted(posts)


@given(seeds, st.sampled_from([None, 0, 1, 3]))
def test_what_stands_posted_is_served_once(seed, ahead):
    program = lower(random_replicas(random.Random(seed)), ahead)
    assert_served(program)
    for worker in range(len(program.order)):
        sends = unused_posts(program, worker).to_send
        peers = [Neighbours(worker, program.routes).exchange(op).peer for op in sends]
        assert worker not in peers


def test_one_stage_exchanges_nothing():
    schedule = two("F0@1 B0@1", "F0@0 B0@0")
    assert posted_ahead(schedule) == {}
    assert lower(schedule).order == schedule.order
    check(lower(schedule))


# --- one line of words for each fault -------------------------------------------------------------

GOOD = (
    "F0@0 F1@0 B0@0 F1@1 B1@0 B1@1",  # 0.0 takes microbatch 1 of home 1 from 1.0
    "F0@0 B0@0 F1@0 B1@0",
    "F0@1 B0@1",
    "F0@1 B0@1 F1@1 B1@1",
)


def changed(worker: int, old: str, new: str) -> Schedule:
    rows = list(GOOD)
    assert old in rows[worker]
    rows[worker] = rows[worker].replace(old, new)
    return two(*rows, count=2)


def test_the_good_one_runs():
    program = lower(two(*GOOD, count=2))
    check(program, (2, 1, 1, 1))
    assert [" ".join(map(str, line)) for line in program.order] == [
        "PB0@0 PB1@0 PB1@1 F0@0 SF0@0 F1@0 SF1@0 B0@0 F1@1 SF1@1 B1@0 B1@1",
        "PF0@0 PF1@0 F0@0 B0@0 SB0@0 F1@0 B1@0 SB1@0",
        "PB0@1 F0@1 SF0@1 B0@1",
        "PF0@1 PF1@1 F0@1 B0@1 SB0@1 F1@1 B1@1 SB1@1",
    ]
    assert program.ahead == {(0, 1): 2, (1, 0): 2, (0, 3): 1, (2, 3): 1, (3, 0): 1, (3, 2): 1}


FAULTS = {  # by a name: a change of GOOD, the words, and the row that is shown
    "twice, on two workers": (
        (2, "B0@1", "B0@1 F1@1 B1@1"),
        "microbatch 1 of home 1 runs twice at stage 0: on worker 0.0 and on worker 1.0",
        "[F1@1]",
    ),
    "twice on one worker": (
        (2, "B0@1", "B0@1 F0@1"),
        "F0@1 stands 2 times on worker 1.0",
        "worker 1.0 | ",
    ),
    "lost": (
        (0, " F1@1 B1@0 B1@1", " B1@0"),
        "stage 0 runs nothing of microbatch 1 of home 1",
        "worker 1.0 | ",
    ),
    "lost in part": (
        (0, "B1@0 B1@1", "B1@0"),
        "worker 0.0 runs F of microbatch 1 of home 1; it has to run F with B",
        "[F1@1]",
    ),
    "wrong home": (
        (2, "F0@1 B0@1", "F0@0 B0@0"),
        "microbatch 0 of home 0 runs twice at stage 0: on worker 0.0 and on worker 1.0",
        "is of a microbatch of worker 0.0",
    ),
    "wrong home of a backward": (
        (2, "F0@1 B0@1", "F0@1 B0@0"),
        "microbatch 0 of home 0 runs twice at stage 0",
        "[B0@0]",
    ),
    "no such home": (
        (2, "F0@1", "F0@2"),
        "F0@2 on worker 1.0: ops of 2 replicas have a home, 0 to 1",
        "[F0@2]",
    ),
    "without home": (
        (2, "F0@1", "F0"),
        "F0 on worker 1.0: ops of 2 replicas have a home, 0 to 1",
        "[F0]",
    ),
    "no such microbatch": (
        (2, "F0@1", "F2@1"),
        "F2@1 on worker 1.0: microbatches are 0 to 1",
        "[F2@1]",
    ),
}


@pytest.mark.parametrize(("change", "words", "row"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named(change, words, row):
    text = refusal(changed(*change))
    assert text.splitlines()[0].startswith(words)
    assert row in text
    assert sum("<--" in line for line in text.splitlines()) <= 1


def test_a_peer_without_memory():
    text = refusal(two(*GOOD, count=2), (1, 1, 1, 1))
    assert text.startswith("worker 0.0 holds 2 microbatches' activations, its budget is 1\n")
    assert "<-- F1@0 exceeds the budget" in text
    for wrong in ((2, 2), (2,) * 5):
        with pytest.raises(BadInput, match="one value per worker, 4 in all"):
            check(lower(two(*GOOD, count=2)), wrong)


def test_a_cycle_between_replicas_under_rendezvous_only():
    """0.0 is held sending F1 to 1.1, which is held sending B0 to 1.0, and so on by 0.1 to 0.0."""
    rows = (
        "F0@0 F1@0 B0@0 B1@0",
        "F0@0 B0@0 F1@1 B1@1",
        "F0@1 F1@1 B0@1 B1@1",
        "F0@1 B0@1 F1@0 B1@0",
    )
    schedule = two(*rows, count=2)
    check(lower(schedule))
    text = refusal(schedule, ahead=0)
    assert text.startswith("deadlock under rendezvous sends: ")
    assert text.count("cannot run") == 4


def test_a_cycle_between_replicas_under_any_sends():
    """Each replica's second stage waits for the other's microbatch first."""
    text = refusal(
        two("F0@0 B0@0 F1@1 B1@1", "F1@0 B1@0 F0@0 B0@0", "F0@1 B0@1 F1@0 B1@0",
            "F1@1 B1@1 F0@1 B0@1", count=2)
    )  # fmt: skip
    assert text.startswith("deadlock under eager sends: ")
    assert text.count("cannot run") == 4


@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("PB1@1", "PB1@1 of worker 1.0 awaits what another worker runs"),
        ("SF1@1", "SF1@1 of worker 1.0 sends what another worker runs"),
    ],
)
def test_a_message_of_a_worker_that_does_not_run_its_op(op, words):
    """Its microbatch has moved from 1.0 to 0.0, the send or the receive has not."""
    good = lower(two(*GOOD, count=2))
    lines = [list(line) for line in good.order]
    lines[0].remove(Op.parse(op))

    def text() -> str:
        return refused(Program(tuple(map(tuple, lines)), 2, 1, good.ahead, 2))

    assert "has no posted receive" in text() or "awaits what nobody sends" in text()
    lines[2].append(Op.parse(op))
    assert text().startswith(words)
    assert f"[{op}]" in text()
