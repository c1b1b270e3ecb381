"""Collective plans: their text, where pieces begin, and what the check refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import Action, CollectiveOp, CollectivePlan


def made(*lines: str, weights: tuple[int, ...] = (1,)) -> CollectivePlan:
    order = tuple(tuple(CollectiveOp.parse(op) for op in line.split()) for line in lines)
    return CollectivePlan(order, weights, "by hand", "a test")


OWNER = ("P0>1 R0<1", "A0=0+1+2 S0>0,2", "P0>1 R0<1")
SWAP = ("P0>1 A0=0+1", "P0>0 A0=0+1")
ops = st.builds(
    CollectiveOp,
    st.sampled_from([Action.PART, Action.SUM, Action.ADD]),
    st.integers(0, 999),
    st.lists(st.integers(0, 999), min_size=1, max_size=5).map(tuple),
    st.integers(1, 99),
)


@given(ops)
def test_an_op_of_a_collective_reads_back(op):
    assert CollectiveOp.parse(str(op)) == op


@pytest.mark.parametrize(
    "text",
    ["", "P", "P0", "P0>", "P0<1", "A0>1", "A0=0,1", "P0>1+2", "P00>1", "S0>01", "R0=1", "P0>1,",
     "P3-3>1", "P3-2>1", "P3->1", "P-1>0", "P0>-1", "Q0>1", "P0>1 ", "P0>١", "P0>" + "9" * 5000],
)  # fmt: skip
def test_what_is_no_op_of_a_collective_is_refused(text):
    with pytest.raises(BadInput, match=r"^op of a collective "):
        CollectiveOp.parse(text)


@pytest.mark.parametrize("lines", [OWNER, SWAP, ("",)])
def test_a_collective_plan_reads_back(lines):
    plan = made(*lines)
    again = CollectivePlan.parse(plan.text(), plan.ranks)
    assert (again, again.digest()) == (plan, plan.digest())
    assert CollectivePlan.parse(plan.text()) == plan


def test_any_difference_is_another_digest():
    plan = made(*OWNER)
    others = [
        made(*OWNER, weights=(2,)),
        made("P0>1 R0<1", "A0=1+0+2 S0>0,2", "P0>1 R0<1"),
        made("P0>1 R0<1", "A0=0+1+2 S0>2,0", "P0>1 R0<1"),
    ]
    assert len({plan.digest(), *(other.digest() for other in others)}) == 4


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(0, 2000))
def test_pieces_are_their_shares_rounded(weights, elements):
    plan = CollectivePlan(((),), tuple(weights))
    bounds = plan.bounds(elements)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, elements, len(weights) + 1)
    done = 0
    for end, weight in zip(bounds[1:], weights, strict=True):
        done += weight
        assert abs(end - elements * done / sum(weights)) <= 0.5
    assert list(bounds) == sorted(bounds)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("A0=0+1 S0>1", "P0>0,0 R0<0"), r"P0>0,0 of rank 1, piece 0.*names one rank twice"),
        (("P0>1 R0<1", "A0=0+1 A0=0+1 S0>0"), r"A0=0\+1 of rank 1.* a second time"),
        (("P0>1 A0=0+1 ", "P0>0 A0=0+1 P0>0"), r"P0>0 of rank 1.* a second time"),
        (
            ("P0>1,2 A0=0+1", "P0>0 A0=0+1 P0>2 R0<2", "A0=0+1+2 S0>1"),
            r"A0=0\+1\+2 of rank 2, piece 0.* adds the part of rank 0 twice",
        ),
        (
            ("P0>1 R0<1", "A0=0+1 S0>0 A0=1+2 S0>2", "P0>1 R0<1"),
            r"S0>0 of rank 1, piece 0.* not the sum yet, without the part of rank 2",
        ),
        (("P0>1 R0<1", "A0=0+1 P0>0"), r"P0>0 of rank 1.*rank 0 does not receive it"),
        (("P0>1 A0=0+1", "P0>0 A0=0+1 S0>2", "R0<1"), r"S0>2 of rank 1.*the part of rank 2"),
        (("P0>1", "A0=0+1"), r"piece 0 of rank 0.*ends without the part of rank 1"),
        (("P0>1 R0<1", "S0>0 A0=0+1"), r"S0>0 of rank 1.*without the part of rank 0"),
        (("A0=0+1 P0>1", "A0=0+1 P0>0"), r"hangs under eager and rendezvous sends: rank 1 does"),
        (("R0<1 P0>1", "A0=0+1 S0>0"), r"R0<1 of rank 0.*hangs under eager and rendez"),
        (("P0>1 R0<1", "A0=1 S0>0"), r"A0=1 of rank 1.*what rank 1 holds and what it receives"),
        (("P0>0", ""), r"P0>0 of rank 0.*sends nothing to itself"),
        (("P1>1", ""), r"P1>1 of rank 0, piece 1.*pieces are 0 to 0"),
        (("P0>2", ""), r"P0>2 of rank 0.*ranks are 0 to 1"),
        (("P0>1 R0<1", "A0=0+1"), r"R0<1 of rank 0.*rank 1 does not send it"),
        (("P0>1 A0=0+1 S0>1", "P0>0 A0=0+1 R0<0"), r"R0<0 of rank 1.*has the sum already"),
        (
            ("P0>1,2 A0=0+1+2", "P0>0,2 A0=1+2+0", "P0>0,1 A0=0+1+2"),
            r"piece 0 of rank 1.*another order than on rank 0",
        ),
    ],
)
def test_what_is_no_all_reduce_is_refused_in_words(lines, message):
    with pytest.raises(BadInput, match=message):
        made(*lines)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("P0-1>1 R0-1<1", "A0=0+1 S0>0"), r"P0-1>1 of rank 0.*receives other pieces, A0=0\+1"),
        (("P0-2>1", ""), r"P0-2>1 of rank 0.*pieces are 0 to 1"),
        (
            ("P0-1>1 R0-1<1", "A0-1=0+1 S0-1>0 A0-1=1+2 S0-1>2", "P0-1>1 R0-1<1"),
            r"S0-1>0 of rank 1, piece 0.*without the part of rank 2",
        ),
        (
            ("P0-1>1 P1>2 R0-1<2", "A0-1=0+1 P0-1>2 R0-1<2", "A0-1=1+2 A1=0+2 S0-1>0,1"),
            r"A1=0\+2 of rank 2, piece 1.* part of rank 0 twice",
        ),
        (
            ("P0-1>1 R0<1 P1>2", "A0-1=0+1 S0>0", ""),
            r"P1>2 of rank 0, piece 1.* rank 2 does not receive it",
        ),
    ],
)
def test_several_pieces_in_one_message(lines, message):
    with pytest.raises(BadInput, match=message):
        made(*lines, weights=(1, 1))


def test_a_hang_under_rendezvous_alone():
    """What is being sent must not change, and its receive stands after what waits for it."""
    first = "P0>1 A0=0+1 P1>1 R1<1"
    second = "P0>0 A1=0+1 S1>0 A0=0+1"
    with pytest.raises(BadInput, match="hangs under rendezvous sends: rank 1 does not get to the"):
        made(first, second, weights=(1, 1))


def test_an_op_that_waits_until_its_piece_has_left_goes_on():
    """Rank 0 has sent piece 0 to rank 1, which first waits for rank 2."""
    made(
        "P1>1 P0>1 A0=0+1 A0=0+2 S0>1,2 R1<1",
        "P0>0 A1=0+1+2 A0=0+1 S1>0,2 R0<0",
        "P1>1 P0>0 R1<1 R0<0",
        weights=(1, 1),
    )


@pytest.mark.parametrize(
    "text",
    ["", "collective", "schedule {}", "collective {}\n0:", "collective []\n0:",
     'collective {"name": "", "weights": 1, "why": ""}\n0:\n',
     'collective {"name": "", "weights": [], "why": ""}\n0:\n',
     'collective {"name": "", "weights": [0], "why": ""}\n0:\n',
     'collective {"name": "", "weights": [1.5], "why": ""}\n0:\n',
     'collective {"name": 1, "weights": [1], "why": ""}\n0:\n',
     'collective {"name": "", "weights": [1], "why": ""}\n1:\n',
     'collective {"name": "", "weights": [1], "why": ""}\n'],
)  # fmt: skip
def test_a_damaged_plan_is_refused(text):
    with pytest.raises(BadInput, match="collective"):
        CollectivePlan.parse(text)


def test_a_plan_for_another_number_of_ranks_is_refused():
    with pytest.raises(BadInput, match=r"for 3 ranks.*there are 4"):
        CollectivePlan.parse(made(*OWNER).text(), 4)


@given(st.data())
def test_every_cut_or_changed_text_is_refused_or_is_a_proven_plan(data):
    text = made(*OWNER).text()
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.sampled_from("0123PSAR<>=+,: \n")) + text[at + 1 :]
    for one in (text[:at], changed):
        try:
            plan = CollectivePlan.parse(one, 3)
        except BadInput:
            continue
        assert plan.ranks == 3
