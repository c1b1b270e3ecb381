"""Activations held, against values worked out by hand."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ir.strategies import of_depths, random_depths, random_schedule, seeds

from megatron_adaptra.ir.schedule import Line, in_flight, parse_line, peak_in_flight
from megatron_adaptra.ir.timeline import Span, Timeline


def line_of(row: str) -> Line:
    return parse_line(row.split())


@pytest.mark.parametrize(
    ("row", "held"),
    [
        ("F0 B0", [1, 0]),
        ("F0 F1 B0 F2 B1 B2", [1, 2, 1, 2, 1, 0]),
        ("F0 I0 W0", [1, 0.5, 0]),
        ("F0 I0 F1 I1 W0 W1", [1, 0.5, 1.5, 1, 0.5, 0]),
        ("F0 R0 B0", [0.05, 1, 0]),
        ("F0 F1 R0 B0 B1", [0.05, 1.05, 2, 1, 0]),
        ("F0 F1 F2 R1 I1 W1 B0 B2", [1, 1.05, 2.05, 3, 2.5, 2, 1, 0]),
        ("PF0 F0 SF0 PB0 B0 T0", [0, 1, 1, 1, 0, 0]),
        ("", []),
    ],
)
def test_by_hand(row, held):
    line = line_of(row)
    assert in_flight(line) == held
    assert peak_in_flight(line) == max(held, default=0)


def test_a_chunk_is_a_share_of_its_stage():
    line = line_of("F0 F0.1 F1 B0.1 B0 F1.1 B1.1 B1")
    assert in_flight(line, chunks=2) == [0.5, 1, 1.5, 1, 0.5, 1, 0.5, 0]


@given(seeds, st.integers(1, 5), st.integers(1, 9))
def test_the_warmup_depth_is_the_peak(seed, stages, count):
    depths = random_depths(random.Random(seed), stages, count)
    order = of_depths(depths, count).order
    assert tuple(map(peak_in_flight, order)) == depths
    assert of_depths(depths, count).warmup == depths


@given(seeds)
def test_everything_is_given_back(seed):
    s = random_schedule(random.Random(seed), 3, 4, 2, split=0.5, again=0.5)
    assert [in_flight(line, s.chunks)[-1] for line in s.order] == [0, 0, 0]


def test_a_timeline_counts_in_the_order_of_starting():
    line = line_of("F0 F1 B0 B1")
    spans = [Span(0, op, t, t + 1) for t, op in enumerate(line)]
    assert Timeline(tuple(reversed(spans))).peak_in_flight() == (2,)
    # A backward that takes no time ends before the forward that starts at its moment.
    instant = [Span(0, op, 0.0, 0.0) for op in line_of("F0")]
    instant += [Span(0, op, 1.0, 2.0) for op in line_of("F1")]
    instant += [Span(0, op, 1.0, 1.0) for op in line_of("B0")]
    assert Timeline(tuple(instant)).peak_in_flight() == (1,)


def test_a_timeline_with_chunks():
    line = line_of("F0 F0.1 B0.1 B0")
    spans = tuple(Span(0, op, t, t + 1) for t, op in enumerate(line))
    assert Timeline(spans).peak_in_flight() == (1,)
