"""`auto`: near the best builder, never slower than native, and the same on all ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from plan.all_reduce_patterns import KINDS, count_near, native, seconds_of

from benchmarks.common import equal_ports
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import LinkState
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Buffers, Figures
from megatron_adaptra.plan.reductions.selector import CERTAIN, MOST_RANKS, choose_all_reduce
from megatron_adaptra.sim.ports import Ports

BUFFER = 0.16


def figures(*late, ranks=8, rates=None, paths=None, delay=0.3e-3, iteration=1.0, measured=None):
    """Eight hosts of 20 MB/s, 160 ms of each; `late`: buffers of lateness of the last ranks."""
    ports = equal_ports(rates or [20e6] * ranks, delay, 0.1e-3, paths=paths)
    lateness = [0.0] * (ranks - len(late)) + [each * BUFFER for each in late]
    return Figures(3_200_000, ports, tuple(lateness), iteration, measured)


def chosen(given, in_force=None, min_gain=0.02):
    return choose_all_reduce(given, in_force or Choice(given.ranks), min_gain)


@pytest.mark.long
def test_twelve_patterns():
    """Within 10 % of the best builder in ten of them, and in none slower than native."""

    def choose(rng, kind, given):
        found = chosen(given, min_gain=0.0)
        assert found.choice.native or found.seconds == pytest.approx(
            seconds_of(found.choice, given)
        )
        assert kind != "none" or found.choice.native
        return found.choice

    assert count_near(KINDS, choose) >= 10


@pytest.mark.parametrize(
    ("given", "owns_nothing", "gain"),
    [
        (figures(1.0), {7}, 1.5),
        (figures(2.0, 2.0), {6, 7}, 1.3),
        (figures(rates=[*[20e6] * 7, 10e6]), {7}, 1.4),
    ],
)
def test_who_owns_nothing(given, owns_nothing, gain):
    found = chosen(given)
    assert found.choice.algorithm == "direct"
    shares = found.choice.shares
    mean = sum(shares) / len(shares)
    assert {rank for rank, share in enumerate(shares) if share < mean / 4} == owns_nothing
    assert found.native / seconds_of(found.choice, given) > gain


@pytest.mark.parametrize(
    ("late", "owns_nothing"),
    [
        ((1.1,), {5}),
        ((1.99, 2.02), {4, 5}),  # together
        ((1.5, 2.4), {5}),  # the other one has time for its share before the last one comes
    ],
)
def test_who_comes_last_and_very_late_owns_nothing(late, owns_nothing):
    """Although by the clock it might own a little."""
    given = figures(*late, ranks=6, delay=3e-3)
    assert set(given.very_late) == owns_nothing
    found = chosen(given).choice
    assert found.algorithm == "direct"
    assert all(found.shares[rank] == 0 for rank in owns_nothing)
    assert all(found.shares[rank] > 0 for rank in range(6) if rank not in owns_nothing)


def test_the_rank_that_is_late_matters_and_not_its_number():
    """The second one has the lateness of the first, moved on by three ranks."""
    for late in ((0.5,), (1.0, 0.4), (2.5,)):
        first = figures(*late, ranks=5)
        moved = replace(first, lateness=first.lateness[2:] + first.lateness[:2])
        one, other = chosen(first), chosen(moved)
        assert one.choice.algorithm == other.choice.algorithm
        assert one.choice.shares[2:] + one.choice.shares[:2] == other.choice.shares
        assert one.seconds == pytest.approx(other.seconds, rel=0.02)


def test_those_in_time_may_all_have_the_slowest_port():
    """So that what they have to spare over the slowest is nothing."""
    given = figures(2.0, 2.0, rates=[10e6, 10e6, 20e6, 20e6], ranks=4)
    assert chosen(given).seconds <= chosen(given).native


def test_a_slow_path_is_gone_round():
    """At a fifth of the rate; its two ends own little, so that little crosses it."""
    slow = LinkState(0.0, 4e6)
    given = figures(paths={(2, 3): slow, (3, 2): slow})
    found = chosen(given)
    assert found.choice.algorithm == "direct"
    assert {2, 3} == {r for r, s in enumerate(found.choice.shares) if s < max(found.choice.shares)}
    assert found.native > 2 * seconds_of(found.choice, given)


@pytest.mark.parametrize("delay", [0.3e-3, 40e-3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_nobody_late_is_native(ranks, delay):
    given = figures(ranks=ranks, delay=delay)
    assert chosen(given, min_gain=0.0).choice.native
    noisy = replace(given, lateness=tuple(0.05 * BUFFER * (r % 2) for r in range(ranks)))
    assert chosen(noisy, min_gain=0.0).choice.native
    by_hand = Choice(ranks, "ring", 4)
    assert chosen(noisy, by_hand, 0.0).choice.native


def test_a_gain_has_to_be_material():
    given = figures(1.0)
    gain = chosen(given).gain
    assert gain == pytest.approx(0.1, rel=0.2)  # seconds, of an iteration of 1 s
    assert not chosen(given, min_gain=0.99 * gain).choice.native
    assert chosen(given, min_gain=1.01 * gain).choice.native


def test_what_native_was_measured_to_take():
    """A native that is faster than its model is what a plan has to beat; a slow one is no gain."""
    given = figures(1.0)
    found = chosen(given)
    quick = replace(given, native=found.seconds / (1 - CERTAIN / 2))
    assert chosen(quick, min_gain=0.0).choice.native
    assert chosen(replace(given, native=10 * found.native)).native == found.native


def test_what_overlaps_with_a_backward_gains_nothing():
    """A late rank's other gradients are reduced by the time its last ones are ready."""
    late, last = figures(1.0), 3_200_000 // 8
    whole = chosen(late)
    part = chosen(replace(late, buffers=Buffers(1, BUFFER / 2, last)))
    assert part.choice.algorithm == whole.choice.algorithm == "direct"
    assert part.native == pytest.approx(whole.native - BUFFER / 2)
    hidden = chosen(replace(late, buffers=Buffers(1, 10 * BUFFER, last)))
    assert hidden.choice.native
    assert hidden.native == pytest.approx(chosen(replace(late, nbytes=last)).native, rel=0.1)


def test_each_of_many_buffers_is_cut_into_fewer_pieces():
    """Each piece costs a message, so many buffers as one, in as many pieces, cost as much."""
    one, given = chosen(figures(1.0)), replace(figures(1.0), buffers=Buffers(20, 1e-9))
    many = chosen(given)
    assert many.choice.algorithm == one.choice.algorithm == "direct"
    assert one.choice.pieces / 20 < many.choice.pieces < one.choice.pieces
    alike = replace(many.choice, pieces=20 * many.choice.pieces)
    assert many.seconds == pytest.approx(seconds_of(alike, figures(1.0)), rel=0.1)
    assert many.seconds > one.seconds


def test_buffers_that_wait_for_each_other_take_as_long_as_each():
    """A rank is late for the first one alone."""
    given = replace(figures(1.0), buffers=Buffers(2))
    found, each = chosen(given), replace(figures(1.0), nbytes=1_600_000)
    in_time = replace(each, lateness=(0.0,) * 8)
    assert found.choice.algorithm == "direct"
    assert found.seconds == pytest.approx(
        seconds_of(found.choice, each) + seconds_of(found.choice, in_time)
    )
    assert found.native == pytest.approx(native(each) + native(in_time))


def test_hysteresis():
    """What is in force stays until it saves less than half, and goes when lateness has passed."""
    first = chosen(figures(1.0))
    gain = first.gain
    held = chosen(figures(1.0), first.choice, 1.5 * gain)  # too little to begin with
    assert held.choice == first.choice
    assert chosen(figures(1.0), first.choice, 2.1 * gain).choice.native
    # A little more or less lateness is no reason for another plan.
    for late in (0.9, 1.1, 1.5):
        assert chosen(figures(late), first.choice).choice == first.choice
    # Another rank is.
    moved = replace(figures(1.0), lateness=(BUFFER, *[0.0] * 7))
    found = chosen(moved, first.choice).choice
    assert found.shares[0] < found.shares[7]
    assert chosen(figures(), first.choice).choice.native


def test_more_ranks_than_can_be_judged_are_left_to_native():
    given = figures(2.0, ranks=MOST_RANKS + 1)
    assert chosen(given).choice.native


small = st.integers(2, 6)


@st.composite
def any_figures(draw):
    ranks = draw(small)
    rate = st.floats(1e5, 1e9)
    rates = [draw(st.lists(rate, min_size=ranks, max_size=ranks)) for _ in range(2)]
    seconds = st.floats(0, 0.1)
    ways = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    paths = draw(
        st.dictionaries(st.sampled_from(ways), st.builds(LinkState, seconds, rate), max_size=3)
    )
    ports = Ports(
        tuple(rates[0]), tuple(rates[1]), draw(seconds), draw(st.floats(0, 1e-3)), paths=paths
    )
    late = draw(st.lists(st.floats(0, 2), min_size=ranks, max_size=ranks))
    native = draw(st.none() | st.floats(0, 2))
    iteration = draw(st.floats(1e-3, 10))
    nbytes = draw(st.integers(0, 1 << 20))
    overlap, last = draw(st.just(0.0) | st.floats(0, 1)), draw(st.integers(0, nbytes))
    return Figures(nbytes, ports, tuple(late), iteration, native, Buffers(1, overlap, last))


@given(any_figures(), st.sampled_from([0.0, 0.01, 0.15]))
@examples(30)
def test_whatever_the_figures_no_choice_is_slower_than_native(given, min_gain):
    found = choose_all_reduce(given, Choice(given.ranks), min_gain)
    assert found.seconds <= found.native
    if found.native:  # else nothing stands out
        known = min(native(given), given.native if given.native is not None else math.inf)
        assert found.native == pytest.approx(known, rel=1e-6)
    if not found.choice.native:
        assert found.gain >= max(min_gain * given.iteration, CERTAIN * found.native) * (1 - 1e-9)
        assert found.seconds == pytest.approx(seconds_of(found.choice, given), rel=1e-6)
    assert Choice.from_json(found.choice.to_json()) == found.choice
    if found.choice.shares:
        assert all(found.choice.shares[rank] == 0 for rank in given.rounded().very_late)
    again = choose_all_reduce(given, found.choice, min_gain)
    assert again.choice == found.choice


@given(any_figures(), st.floats(-1e-13, 1e-13))
@examples(20)
def test_figures_that_differ_in_the_last_bits_have_the_same_plan(given, by):
    """As when another machine has added them in another order."""

    def nearly(row):
        return tuple(value * (1 + by) for value in row)

    ports = replace(given.ports, out=nearly(given.ports.out), into=nearly(given.ports.into))
    other = replace(given, ports=ports, lateness=nearly(given.lateness))
    one, two = (choose_all_reduce(each, Choice(given.ranks), 0.0).choice for each in (given, other))
    assert one == two
    assert one.native or one.plan().digest() == two.plan().digest()


@pytest.mark.parametrize(
    "choice",
    [
        Choice(3), Choice(3, "ring", 2), Choice(5, "halving-doubling"),
        Choice(4, "direct", 3, (16, 0, 4, 16)), Choice(4, "stragglar", 2, late=(1,)),
        Choice(3, "sorted-chain", 4, late=(2, 0)),
    ],
    ids=str,
)  # fmt: skip
def test_plans_of_choices(choice):
    assert Choice.from_json(choice.to_json()) == choice
    plan = choice.plan()
    if choice.native:
        assert plan is None
        return
    assert (plan.name, plan.ranks) == (choice.algorithm, choice.ranks)
    sent = sum(len(op.ranks) for line in plan.order for op in line if op.action.sends)
    assert sent <= 1.5 * choice.transfers()


def test_in_words():
    assert str(Choice(4)) == "native"
    assert (
        str(Choice(4, "direct", 3, (16, 0, 4, 16))) == "direct, nothing owned by 1, less by 2 (25%)"
    )
    assert str(Choice(2, "direct", 3, (1, 1))) == "direct, equal shares"
    assert str(Choice(4, "stragglar", 2, late=(1,))) == "stragglar, late rank 1"
    assert str(Choice(3, "sorted-chain", 4, late=(2, 0))) == "sorted-chain, late ranks 2, 0"


GOOD = Choice(4, "direct", 3, (1, 0, 1, 1)).to_json()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "^all-reduce is missing: .*to_json"),
        (GOOD | {"more": 1}, "^all-reduce"),
        (GOOD | {"ranks": 0}, "^ranks 0: "),
        (GOOD | {"algorithm": "magic"}, "^algorithm 'magic': .* native, ring"),
        (GOOD | {"pieces": 1 << 30}, "^choice .* no number above"),
        (GOOD | {"shares": [1, 1]}, r"^shares \[1, 1\]: direct has one per rank"),
        (GOOD | {"shares": [0, 0, 0, 0]}, "^shares .*: at least one above 0"),
        (GOOD | {"late": [1]}, r"^late ranks \[1\]: direct has none"),
        (Choice(3, "sorted-chain", 1).to_json() | {"late": [1, 1]}, "^late ranks .*: each once"),
        (Choice(4, "stragglar", 1, late=(1,)).to_json() | {"late": []}, "stragglar needs one"),
    ],
)  # fmt: skip
def test_damaged_choices_are_refused(data, message):
    with pytest.raises(BadInput, match=message):
        Choice.from_json(data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(figures(), lateness=(0.0,)), "^lateness 1: one per rank: 8"),
        (lambda: figures(math.inf), "^lateness .*seconds of at least 0"),
        (lambda: figures(iteration=0.0), "^seconds of an iteration 0.0"),
        (lambda: replace(figures(), buffers=Buffers(0)), "^buffers 0: at least 1"),
        (lambda: replace(figures(), buffers=Buffers(last=9**9)), "^last bytes .*: 0 to 3200000"),
        (lambda: figures(rates=[math.inf] * 8), "^rate of a port inf: .*as measured"),
        (lambda: chosen(figures(), Choice(3)), "^all-reduce in force 'for 3 ranks': here are 8"),
        (lambda: chosen(figures(), min_gain=math.nan), "^min_gain nan"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(BadInput, match=message):
        make()
