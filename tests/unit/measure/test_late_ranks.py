"""Late ranks are named soon and rightly; slow paths, slow ports and chance are no late ranks."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure.late_ranks import messages

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.measure import late_ranks
from megatron_adaptra.measure.arrivals import arrivals, by_path
from megatron_adaptra.measure.late_ranks import LateRanks

BUFFER = 0.16
MS = 1e-3
SEED = 20251126  # fixed: a rate of false alarms is never quite zero


def run(late_ranks, count, late, **more):
    """What is decided in so many iterations, from 1 on: iteration, words."""
    found = []
    for i in range(1, count + 1):
        now = late(i) if callable(late) else late
        if late_ranks.update(messages(late_ranks.ranks, now, **more), BUFFER):
            found.append((i, late_ranks.changes(range(late_ranks.ranks))))
            late_ranks.accept()
            assert late_ranks.changes(range(late_ranks.ranks)) == []
    return found


@pytest.fixture(params=[2, 3, 4, 8])
def ranks(request):
    return request.param


def healthy(ranks, count=20):
    late_ranks = LateRanks(ranks)
    assert run(late_ranks, count, {}) == []
    return late_ranks


@pytest.mark.parametrize("delay", [0.3 * MS, 20 * MS])
def test_arrivals_of_one_iteration(ranks, delay):
    """No clock is compared, and lateness is no delay."""
    seen = messages(ranks, {1: 80 * MS}, delay=delay)
    found = arrivals(by_path(seen, ranks), np.full((ranks, ranks), np.inf))
    assert found.late == pytest.approx({r: 80 * MS * (r == 1) for r in range(ranks)})
    none = np.diag([math.nan] * ranks)  # of a rank to itself
    assert found.delays == pytest.approx(none + delay, nan_ok=True)
    assert found.round_trips == pytest.approx(none + 2 * delay, nan_ok=True)


def test_a_late_rank_is_named_and_is_in_time_again(ranks):
    late_ranks = healthy(ranks)
    ((i, words),) = run(late_ranks, 20, {1: 80 * MS})
    assert (words, i <= 8) == (["rank 1 comes 80 ms late"], True)
    assert late_ranks.late() == pytest.approx([80 * MS * (r == 1) for r in range(ranks)])
    ((i, words),) = run(late_ranks, 20, {})
    assert (words, i <= 8) == (["rank 1 comes in time"], True)
    assert late_ranks.late() == (0.0,) * ranks
    assert late_ranks.slow_paths() == {}


def test_a_rank_that_is_late_from_the_start(ranks):
    late_ranks = LateRanks(ranks)
    assert [words for _, words in run(late_ranks, 12, {0: 0.1})] == [["rank 0 comes 100 ms late"]]


def test_lateness_that_moves_to_another_rank_in_mid_run():
    late_ranks = healthy(4)
    run(late_ranks, 30, {2: 60 * MS})
    found = run(late_ranks, 30, {0: 60 * MS})
    assert found[-1][0] <= 10
    assert sorted(word for _, words in found for word in words) == [
        "rank 0 comes 60 ms late", "rank 2 comes in time",
    ]  # fmt: skip
    assert late_ranks.late() == pytest.approx([60 * MS, 0, 0, 0])
    assert late_ranks.note() is None


def test_what_a_rank_is_late_because_it_ended_later_is_not_its_own():
    """As a ring ends: later at the late rank and at the one after it than elsewhere."""
    late_ranks = healthy(4)
    seen = messages(4, {0: 20 * MS, 2: 155 * MS, 3: 40 * MS})
    between = {0: 0.5, 1: 0.5, 2: 0.615, 3: 0.5}
    for _ in range(10):
        if late_ranks.update(seen, BUFFER, between):
            late_ranks.accept()
    assert late_ranks.late() == pytest.approx([0, 0, 115 * MS, 0])


CASES = [(True, 0.12), (True, 0.0), (False, 0.12), (False, 0.0)]


@pytest.mark.parametrize(("free", "own"), CASES)
def test_what_is_a_rank_s_own_whatever_runs(free, own):
    """Under a ring rank 2 ends later; under a plan it ends before the others, at first by far."""
    late_ranks = healthy(4)
    ends = [0.0] * 4

    def train(count, ended):
        nonlocal ends
        for _ in range(count):
            came = [(end if free else max(ends)) + own * (r == 2) for r, end in enumerate(ends)]
            between = {r: 0.5 + came[r] - end for r, end in enumerate(ends)}
            seen = messages(4, dict(enumerate(came)))
            if late_ranks.update(seen, BUFFER, between):
                late_ranks.accept()
            ends = ended(came)

    train(3, lambda came: [0.0] * 4)
    train(12, lambda came: [20 * MS, 0.0, 40 * MS * (own > 0), 40 * MS])
    assert late_ranks.late() == pytest.approx([0, 0, own, 0])
    train(10, lambda came: [0.11, 0.11, 0.0, 0.11])
    assert late_ranks.late() == pytest.approx([0, 0, own, 0], abs=1e-9)
    train(10, lambda came: [0.0] * 4)
    assert late_ranks.late() == pytest.approx([0, 0, own, 0])


@pytest.mark.parametrize(
    ("longer", "delay"), [(0.13, 0.15), (0.04, 0.3 * MS)], ids=["by much", "by little"]
)
def test_an_iteration_short_of_cores_shows_nothing_of_what_a_program_does(longer, delay):
    """A rank computes longer, and messages wait, so that it does not seem to come later."""
    late_ranks = healthy(4)
    own = 0.13

    def train(count, came, delay=0.3 * MS, more=0.0):
        between = {rank: 0.5 + own * (rank == 2) + more * (rank == 1) for rank in range(4)}
        for _ in range(count):
            if late_ranks.update(messages(4, came, delay=delay), BUFFER, between):
                late_ranks.accept()

    train(10, {2: own})  # a ring, that ends everywhere at once
    train(10, {})  # a plan, by which rank 2 ends before the others
    assert late_ranks.late() == pytest.approx([0, 0, own, 0])
    train(1, {1: longer if delay > longer else 0.0}, delay, longer)
    train(10, {})
    assert late_ranks.late() == pytest.approx([0, 0, own, 0])


def test_two_late_ranks():
    late_ranks = healthy(8)
    run(late_ranks, 10, {2: 60 * MS, 5: 0.3})
    expected = [{2: 60 * MS, 5: 0.3}.get(rank, 0.0) for rank in range(8)]
    assert late_ranks.late() == pytest.approx(expected)


@pytest.mark.parametrize(("factor", "named"), [(0.15, False), (0.25, True)])
def test_what_is_too_little_for_a_buffer_is_not_named(ranks, factor, named):
    late_ranks = healthy(ranks)
    assert bool(run(late_ranks, 30, {1: factor * BUFFER})) == named


def test_a_slow_path_is_no_late_rank():
    late_ranks = healthy(4)
    found = run(late_ranks, 20, {}, slow={(2, 3): 50 * MS})
    assert [words for _, words in found] == [["path 2>3 takes 50 ms more than others"]]
    assert late_ranks.late() == (0.0,) * 4
    assert late_ranks.slow_paths() == pytest.approx({(2, 3): 50 * MS})
    found = run(late_ranks, 20, {})
    assert [words for _, words in found] == [["path 2>3 takes as long as others"]]
    assert late_ranks.slow_paths() == {}


def test_a_late_rank_behind_a_slow_path():
    late_ranks = healthy(4)
    run(late_ranks, 20, {3: 80 * MS}, slow={(2, 3): 50 * MS, (3, 2): 50 * MS})
    assert late_ranks.late() == pytest.approx([0, 0, 0, 80 * MS], abs=MS)
    assert late_ranks.slow_paths() == pytest.approx({(2, 3): 50 * MS, (3, 2): 50 * MS}, abs=MS)


def test_whose_messages_all_take_longer_is_not_late():
    """Half of that would be lateness if nobody remembered what round trips took before."""
    late_ranks = healthy(4)
    slow = {(2, rank): 80 * MS for rank in (0, 1, 3)}
    run(late_ranks, 30, {}, slow=slow)
    assert late_ranks.late() == (0.0,) * 4
    assert set(late_ranks.slow_paths()) == set(slow)
    # It may be late as well; what is beyond doubt is named.
    run(late_ranks, 30, {2: 200 * MS}, slow=slow)
    assert 150 * MS < late_ranks.late()[2] <= 240 * MS


def test_delays_of_a_wide_network_hide_no_lateness():
    """20 ms between two sites, from the start."""
    far = {(a, b): 20 * MS for a in range(4) for b in range(4) if (a < 2) != (b < 2)}
    late_ranks = LateRanks(4)
    run(late_ranks, 20, {}, slow=far)
    run(late_ranks, 20, {3: 50 * MS}, slow=far)
    assert late_ranks.late() == pytest.approx([0, 0, 0, 50 * MS], abs=MS)


def test_what_waits_for_a_core_is_no_delay(ranks):
    """Of a busy machine's iterations few show what a message takes; a path that is longer stays."""
    late_ranks = LateRanks(ranks)
    for i in range(24):
        late_ranks.update(messages(ranks, {}, delay=0.3 * MS if i % 8 == 5 else 8 * MS), BUFFER)
    assert late_ranks.delay() <= 0.3 * MS
    run(late_ranks, 8, {}, delay=8 * MS)
    assert late_ranks.delay() == pytest.approx(8 * MS)


@pytest.mark.parametrize("ranks", [4, 8])  # of two there is one pair, which may show anything
def test_trips_that_differ_much_show_no_delay_and_those_of_a_network_do(ranks):
    """Ranks that share cores take milliseconds in all iterations, by chance; a network as long."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for network, least, most in ((0.0, 0.0, 0.6), (10.0, 9.0, 11.5)):
        late_ranks = LateRanks(ranks)
        for _ in range(12):
            seen = messages(ranks, {}, delay=network * MS)
            row = {
                t: {s: x + rng.expovariate(1 / MS) for s, x in of.items()} for t, of in seen.items()
            }
            late_ranks.update(row, BUFFER)
        assert least * MS <= late_ranks.delay() <= most * MS


@pytest.mark.parametrize("draws", [False, True])
def test_rotating_lateness_is_nobodys_and_is_noted_once(ranks, draws):
    """One rank after the other, or by chance."""
    print(f"seed {SEED}")
    rng, late_ranks, notes = random.Random(SEED), LateRanks(ranks), []
    decided = 0
    for i in range(400):
        late = {rng.randrange(ranks) if draws else i % ranks: 0.2}
        if late_ranks.update(messages(ranks, late), BUFFER):
            decided += 1
            late_ranks.accept()
        if (note := late_ranks.note()) is not None:
            notes.append(note)
    assert len(notes) == 1
    assert "another rank is late in each iteration" in notes[0]
    assert decided <= (12 if draws and ranks == 2 else 4 if draws else 0)


def test_a_rank_that_is_late_most_of_the_time_is_named_and_kept():
    """In the log that StragglAR's authors publish one rank is the last in 77 to 95 % of steps."""
    print(f"seed {SEED}")
    rng, late_ranks = random.Random(SEED), healthy(4)
    found = run(late_ranks, 200, lambda i: {2 if rng.random() < 0.85 else 0: 80 * MS})
    assert found[0][1] == ["rank 2 comes 80 ms late"]
    assert found[0][0] <= 20
    assert len(found) <= 3  # another rank may be late six times of eight by chance


def test_once_it_stays_with_one_rank_rotating_lateness_is_named():
    late_ranks = LateRanks(4)
    run(late_ranks, 60, lambda i: {i % 4: 0.2})
    assert late_ranks.rotation.rotating
    ((i, words),) = run(late_ranks, 30, {1: 0.2})
    assert (words, i <= 16) == (["rank 1 comes 200 ms late"], True)


@pytest.mark.parametrize("noise", [2 * MS, 15 * MS])
def test_noise_is_no_late_rank(ranks, noise):
    """Up to a tenth of a buffer, and in one iteration of thirty one rank is very late."""
    print(f"seed {SEED}")
    rng, late_ranks = random.Random(SEED), LateRanks(ranks)

    def late(_):
        return {rng.randrange(ranks): 0.3} if rng.random() < 1 / 30 else {}

    found = run(late_ranks, 1000, late, rng=rng, noise=noise)
    print(found)
    assert len(found) <= 1


@pytest.mark.parametrize("late", [50 * MS, 0.3])
def test_a_late_rank_in_noise_is_named_within_ten_iterations(ranks, late):
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    firsts = []
    for _ in range(20):
        late_ranks = LateRanks(ranks)
        run(late_ranks, 30, {}, rng=rng, noise=5 * MS)
        found = run(late_ranks, 30, {1: late}, rng=rng, noise=5 * MS)
        firsts.append(found[0][0])
        assert late_ranks.late()[1] == pytest.approx(late, abs=15 * MS)
    assert sorted(firsts)[-2] <= 10


def test_a_rank_that_receives_nothing_is_known_by_what_it_sends():
    """As under a plan in which a late rank owns nothing, so that no part comes to it."""
    late_ranks = healthy(4)
    for _ in range(20):
        seen = messages(4, {3: 80 * MS})
        del seen[3]
        if late_ranks.update(seen, BUFFER):
            late_ranks.accept()
    assert late_ranks.late() == pytest.approx([0, 0, 0, 80 * MS])


def test_a_silent_rank_keeps_what_was_known():
    late_ranks = healthy(4)
    run(late_ranks, 20, {3: 80 * MS})
    for _ in range(20):
        seen = {t: {s: x for s, x in row.items() if s != 3} for t, row in messages(4, {}).items()}
        del seen[3]
        assert not late_ranks.update(seen, BUFFER)
    assert late_ranks.late() == pytest.approx([0, 0, 0, 80 * MS])


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-1, 1)


@given(
    st.lists(
        st.dictionaries(
            st.integers(-1, 4), st.dictionaries(st.integers(-1, 4), numbers, max_size=4), max_size=4
        ),
        max_size=20,
    ),
    st.integers(1, 3),
)
def test_whatever_comes_lateness_is_seconds(rows, every):
    late_ranks = LateRanks(3)
    for i, seen in enumerate(rows):
        late_ranks.update(seen, BUFFER)
        if i % every == 0:
            late_ranks.accept()
            assert late_ranks.changes(range(late_ranks.ranks)) == []
        late_ranks.note()
        assert all(0 <= late < math.inf for late in late_ranks.late())
        assert all(0 < more < math.inf for more in late_ranks.slow_paths().values())


def test_bad_input():
    with pytest.raises(BadInput, match=r"^ranks 1: at least 2"):
        LateRanks(1)
    with pytest.raises(BadInput, match=r"^seconds of a buffer 0"):
        LateRanks(2).update({}, 0.0)


def test_of_a_large_group_paths_are_watched_by_turns(monkeypatch):
    """An iteration costs the leader no more charts than those of 16 ranks."""
    counts = []
    watched = late_ranks.Watched

    def counted(self, *args):
        counts[-1] += 1
        return update(self, *args)

    update = watched.update
    monkeypatch.setattr(watched, "update", counted)
    ranks, slow = 24, {(2, 4): 50 * MS}
    group, found = LateRanks(ranks), []
    for iteration in range(60):
        counts.append(0)
        seen = messages(ranks, {}, slow=slow if iteration >= 20 else {})
        if group.update(seen, BUFFER):
            found.append(group.changes(range(ranks)))
            group.accept()
    assert found == [["path 2>4 takes 50 ms more than others"]]
    assert max(counts) <= ranks + 256
    assert group.slow_paths() == pytest.approx(slow)
