"""Slow replicas are named once per change, what moves about is not; speeds are as made up."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure.replica_runs import COUNT, KINDS, SECONDS, iteration, made

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.measure.replica_speed import Outside, ReplicaSpeeds
from megatron_adaptra.plan.shares.counts import share_by_speed

SEED = 20251127  # fixed: a rate of false alarms is never quite zero


def run(speeds, rows):
    """What is decided, from iteration 1 on: iteration, words."""
    found = []
    for i, row in enumerate(rows, 1):
        if speeds.update(row):
            found.append((i, speeds.changes()))
            speeds.accept()
            assert speeds.changes() == []
    return found


def rows(rng, count, slow=None, counts=(COUNT,) * 4, **noise):
    return [iteration(rng, slow or {}, counts, **noise) for _ in range(count)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_at_most_one_decision_per_change(kind, replicas, seed):
    made_up, speeds, notes = made(kind, seed, replicas), ReplicaSpeeds(replicas), []
    found = []
    for i, row in enumerate(made_up.rows):
        if speeds.update(row):
            found.append(i)
            speeds.accept()
        if (note := speeds.note()) is not None:
            notes.append(note)
    print(found, made_up.changes, notes)
    if kind == "drift":  # by at least SLOW times each
        assert 1 <= len(found) <= math.log(3) / math.log(1.2)
        assert speeds.slow()
    else:
        assert len(found) == len(made_up.changes)
        for decided, change in zip(found, made_up.changes, strict=True):
            assert 0 <= decided - change < 8
        assert speeds.slow() == {}
    rotates = ["another replica is slow in each iteration: each keeps its own microbatches"]
    assert notes == rotates * (kind == "rotating")


def test_a_slow_replica_in_words_and_figures():
    rng, speeds = random.Random(SEED), ReplicaSpeeds(4)
    assert run(speeds, rows(rng, 30)) == []
    assert share_by_speed(speeds.speeds(), COUNT).sync.full  # by the last bit
    ((i, words),) = run(speeds, rows(rng, 20, {2: 1.8}))
    assert (words, i <= 8) == (["replica 2 takes 1.8 times as long as the others"], True)
    assert speeds.slow() == pytest.approx({2: 1.8}, rel=0.1)
    each = [speed.per_microbatch for speed in speeds.speeds()]
    assert each == pytest.approx([SECONDS, SECONDS, 1.8 * SECONDS, SECONDS], rel=0.05)
    assert share_by_speed(speeds.speeds(), COUNT).sync.counts == (9, 9, 5, 9)
    ((i, words),) = run(speeds, rows(rng, 20, counts=(9, 9, 5, 9)))
    assert (words, i <= 8) == (["replica 2 has recovered"], True)
    assert share_by_speed(speeds.speeds(), COUNT).sync.full


def test_chance_moves_nothing():
    """However noisy replicas are, those that are not slow count as equally fast."""
    rng, speeds = random.Random(SEED), ReplicaSpeeds(4)
    run(speeds, rows(rng, 30, sigma=0.1))
    assert len(set(speeds.speeds())) == 1
    run(speeds, rows(rng, 30, {2: 4.0}, sigma=0.1))
    each = speeds.speeds()
    assert len({each[0], each[1], each[3]}) == 1
    assert each[2].per_microbatch > 3 * each[0].per_microbatch


def test_two_that_change_together_are_one_decision():
    rng, speeds = random.Random(SEED), ReplicaSpeeds(4)
    run(speeds, rows(rng, 30))
    ((_, words),) = run(speeds, rows(rng, 20, {0: 1.5, 3: 3.0}))
    assert [word.split()[1] for word in words] == ["0", "3"]
    ((_, words),) = run(speeds, rows(rng, 20, {1: 3.0, 3: 3.0}))
    assert [word.split()[1] for word in words] == ["0", "1"]


def test_until_it_is_accepted_a_change_is_shown_again():
    rng, speeds = random.Random(SEED), ReplicaSpeeds(4)
    run(speeds, rows(rng, 30))
    assert [speeds.update(row) for row in rows(rng, 12, {1: 2.0})][-4:] == [True] * 4
    assert speeds.slow() == pytest.approx({1: 2.0}, rel=0.1)
    assert [speeds.update(row) for row in rows(rng, 12)][-4:] == [False] * 4
    assert speeds.slow() == {}


@pytest.mark.parametrize("each", [10, 20, 40])
def test_slowness_that_moves_now_and_then_is_followed_once_per_move(each):
    rng, speeds = random.Random(SEED), ReplicaSpeeds(4)
    made_up = [iteration(rng, {i // each % 4: 2.0}, (COUNT,) * 4) for i in range(400)]
    assert 400 // each - 1 <= len(run(speeds, made_up)) <= 400 // each
    assert speeds.note() is None


def test_slowness_that_begins_to_rotate_gives_all_their_own_again():
    rng, speeds = random.Random(SEED), ReplicaSpeeds(4)
    run(speeds, rows(rng, 60, {1: 2.0}))
    found = run(speeds, [iteration(rng, {i % 4: 2.0}, (COUNT,) * 4) for i in range(80)])
    assert [words for _, words in found] == [["replica 1 has recovered"]]


def test_what_does_not_depend_on_counts_is_found_when_they_change():
    """Each iteration has 60 ms outside of microbatches of 25 ms."""
    rng, speeds = random.Random(SEED), ReplicaSpeeds(4)
    more = {"outside": 0.06, "sigma": 0.01}
    run(speeds, rows(rng, 30, {2: 2.0}, **more))
    assert speeds.speeds()[0].outside == 0
    found = run(speeds, rows(rng, 30, {2: 2.0}, (9, 9, 5, 9), **more))
    assert found == []
    assert speeds.speeds()[0].outside == pytest.approx(0.06, rel=0.4)
    for replica, count in enumerate((9, 9, 5, 9)):
        takes = 0.06 + SECONDS * count * (2 if replica == 2 else 1)
        assert speeds.speeds()[replica].seconds(count) == pytest.approx(takes, rel=0.05)
        takes = 0.06 + SECONDS * 8 * (2 if replica == 2 else 1)
        assert speeds.speeds()[replica].seconds(8) == pytest.approx(takes, rel=0.05)


@pytest.mark.parametrize("fill", [0.0, 3.0])
def test_filling_a_pipeline_takes_as_many_microbatches(fill):
    rng, speeds = random.Random(SEED), ReplicaSpeeds(4, fill)
    run(speeds, rows(rng, 30, {2: 2.0}, fill=fill, sigma=0.01))
    slow, well = speeds.speeds()[2], speeds.speeds()[0]
    assert slow.outside == pytest.approx(2 * fill * SECONDS, rel=0.05)
    assert well.seconds(5) == pytest.approx((5 + fill) * SECONDS, rel=0.05)


def test_seconds_outside_by_hand():
    outside = Outside(2, fill=1.0)
    for count in (8, 4):
        for _ in range(4):
            assert outside.seconds == 0
            outside.update({0: (10 + 3 * (count + 1.0), count)})
    # Of 10 s so much is believed: 16 of 16 + 4.
    assert outside.seconds == pytest.approx(8)
    for _ in range(20):
        outside.update({0: (10 + 3 * 5.0, 4), 1: (1.0, 8)})
    assert outside.seconds == pytest.approx(8)


def test_a_replica_that_is_not_measured_keeps_what_was_known():
    rng, speeds = random.Random(SEED), ReplicaSpeeds(3)
    some = [{r: s for r, s in row.items() if r} for row in rows(rng, 5, counts=(8,) * 3)]
    assert run(speeds, some) == []
    assert not speeds.known
    with pytest.raises(BadInput, match=r"^replica 0: it has to be measured"):
        speeds.speeds()
    run(speeds, rows(rng, 30, {0: 2.0}, (8,) * 3))
    assert speeds.known
    for row in rows(rng, 20, counts=(8,) * 3):
        assert not speeds.update({r: s for r, s in row.items() if r})
    assert speeds.slow() == pytest.approx({0: 2.0}, rel=0.1)


def test_one_that_is_measured_alone_shows_nothing_of_who_is_slow():
    """It is as long as itself, however slow it is."""
    rng, speeds = random.Random(SEED), ReplicaSpeeds(2)
    run(speeds, rows(rng, 30, counts=(COUNT,) * 2))
    assert len(run(speeds, rows(rng, 20, {1: 2.0}, counts=(COUNT,) * 2))) == 1
    alone = [{1: row[1]} for row in rows(rng, 20, {1: 2.0}, counts=(COUNT,) * 2)]
    assert run(speeds, alone) == []
    assert speeds.slow() == pytest.approx({1: 2.0}, rel=0.1)


def test_what_is_left_of_slowness_is_too_little_to_be_slow():
    rng, speeds = random.Random(SEED), ReplicaSpeeds(4)
    run(speeds, rows(rng, 30))
    run(speeds, rows(rng, 20, {1: 2.0}))
    ((_, words),) = run(speeds, rows(rng, 20, {1: 1.15}))
    assert words == ["replica 1 has recovered"]


@pytest.mark.parametrize("seed", range(2))
def test_slowness_is_measured_from_where_a_replica_has_been_unnoticed(seed):
    """One that begins a bit slow, and then is a bit fast, is slow soon after it gets slow."""
    rng, speeds = random.Random(seed), ReplicaSpeeds(4)
    assert run(speeds, rows(rng, 15, {3: 1.16}, sigma=0.01)) == []
    assert run(speeds, rows(rng, 15, {3: 0.95}, sigma=0.01)) == []
    ((when, words),) = run(speeds, rows(rng, 10, {3: 1.3}, sigma=0.01))
    assert words == ["replica 3 takes 1.3 times as long as the others"]
    assert when <= 6


@pytest.mark.parametrize("seed", range(2))
def test_one_that_was_a_bit_slow_is_found_when_it_gets_slow_and_when_it_is_as_before(seed):
    """From 1.1 to 1.3 is less than from 1 to 1.2, but what is slow has another answer."""
    rng, speeds = random.Random(seed), ReplicaSpeeds(4)
    assert run(speeds, rows(rng, 40, {3: 1.1}, sigma=0.01)) == []
    ((when, words),) = run(speeds, rows(rng, 30, {3: 1.3}, sigma=0.01))
    assert words == ["replica 3 takes 1.3 times as long as the others"]
    assert when <= 12
    ((when, words),) = run(speeds, rows(rng, 30, {3: 1.1}, sigma=0.01))
    assert words == ["replica 3 has recovered"]
    assert when <= 12


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-3, 10)
samples = st.dictionaries(st.integers(0, 2), st.tuples(numbers, st.integers(-1, 9)), max_size=3)


@given(st.lists(samples, max_size=40), st.integers(1, 3))
def test_whatever_comes_speeds_are_seconds(given_rows, every):
    speeds = ReplicaSpeeds(3, 1.0)
    for i, row in enumerate(given_rows):
        speeds.update(row)
        if i % every == 0:
            speeds.accept()
            assert speeds.changes() == []
        speeds.note()
        speeds.alarms()
    if speeds.known:
        share_by_speed(speeds.speeds(), 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1,), "replicas 1: at least 2"),
        ((2, -1.0), "microbatches to fill a pipeline -1.0"),
        ((2, math.nan), "microbatches to fill a pipeline nan"),
    ],
)
def test_bad_input(arguments, words):
    with pytest.raises(BadInput) as caught:
        ReplicaSpeeds(*arguments)
    assert words in str(caught.value)
    with pytest.raises(BadInput, match=r"^replica 2: 0 to 1"):
        ReplicaSpeeds(2).update({2: (1.0, 8)})


# Milliseconds of a training's iterations 2 to 33: replica 3 is slow in 8 to 23, counts are
# 9, 9, 9, 5 from 15 on. When it is fast again the others differ by a fifth.
RECORDED = """
495 464 451 491 484 460 456 480 465 488 474 495 488 501 481 473 512 526 514 535 501 490 470 486
478 515 522 866 521 485 518 887 537 527 519 864 489 483 488 877 499 494 467 851 505 534 470 939
629 514 501 987 523 536 522 543 561 551 565 539 594 528 544 545 571 542 550 561 573 641 608 600
536 528 537 535 522 575 555 591 532 556 585 644 577 703 655 660 521 667 666 314 514 657 674 382
521 546 547 324 525 622 548 303 606 567 538 378 517 558 562 304 535 548 562 298 620 585 575 322
584 591 595 361 577 638 553 319
"""


def test_a_recorded_replica_that_is_fast_again_is_found_beside_others_that_differ() -> None:
    milliseconds = [int(word) for word in RECORDED.split()]
    speeds, found = ReplicaSpeeds(4), []
    for i in range(len(milliseconds) // 4):
        iteration = 2 + i
        counts = (8, 8, 8, 8) if iteration < 15 else (9, 9, 9, 5)
        row = [1e-3 * one for one in milliseconds[4 * i : 4 * i + 4]]
        if speeds.update(dict(enumerate(zip(row, counts, strict=True)))):
            found.append((iteration, sorted(speeds.slow())))
            speeds.accept()
    assert [slow for _, slow in found] == [[3], []]
    assert found[0][0] <= 14
    assert found[1][0] <= 24 + 7


# A busy machine from which other programs go in iteration 9, as a replica gets twice as slow.
QUIET_AT = 9
BUSY = """
436 426 530 562 361 316 278 291 356 354 292 243 214 244 159 179 209 250 87 176 80 174 110 168
77 152 78 159 73 145 75 144 75 149 82 153 78 148 76 151 76 148 76 152 77 149 79 150
"""

# Other programs come as replica 1 gets twice as slow, in iteration 8.
BUSY_FROM = 8
GETS_BUSY = """
82 81 77 82 81 83 79 82 79 79 80 81 83 81 75 74 79 148 194 236 110 187 109 163
92 294 126 201 116 198 107 184 86 191 110 204 334 348 235 318 155 216 103 161 117 160
"""


def recorded(text):
    """Of two replicas with four microbatches each."""
    milliseconds = [int(word) for word in text.split()]
    pairs = zip(milliseconds[::2], milliseconds[1::2], strict=True)
    return [{0: (1e-3 * a, 4), 1: (1e-3 * b, 4)} for a, b in pairs]


def test_recorded_of_two_replicas_one_gets_faster_by_less_than_the_other() -> None:
    """Both are faster than they were; beside each other one is slow."""
    ((i, words),) = run(ReplicaSpeeds(2, fill=1), recorded(BUSY))
    assert QUIET_AT < i <= QUIET_AT + 8
    assert "replica 1 takes 2" in words[0]


def test_recorded_of_a_replica_that_is_slow_on_a_machine_that_gets_busy() -> None:
    """By 1.5 to 3 times, so that hardly two iterations in a row agree."""
    ((i, words),) = run(ReplicaSpeeds(2, fill=1), recorded(GETS_BUSY))
    assert BUSY_FROM < i <= BUSY_FROM + 12
    assert words == ["replica 1 takes 1.7 times as long as the others"]
