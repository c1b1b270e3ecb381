"""Durations and rates as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import (
    brief,
    number,
    parse_bytes,
    parse_rate,
    parse_seconds,
    size,
    whole,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("40ms", 0.04), ("1.5s", 1.5), ("200us", 2e-4), (" 3 ms ", 0.003), (".5s", 0.5), ("0s", 0.0),
     ("1e-3s", 0.001), ("2e2ms", 0.2)],
)  # fmt: skip
def test_durations(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("10MB/s", 1e7), ("1GB/s", 1e9), ("3kB/s", 3e3), ("7B/s", 7.0), ("1Gbit/s", 1.25e8),
     ("100Mbit/s", 1.25e7), ("8kbit/s", 1e3), ("8bit/s", 1.0)],
)  # fmt: skip
def test_rates(text, rate):
    assert parse_rate(text) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["", "ms", "40", 40, "-1ms", "1 min", "1MS", "1,5s", "nan s", "inf s", "1e999s", "1s1s"]
)
def test_no_duration(text):
    with pytest.raises(BadInput) as bad:
        parse_seconds(text, "delay")
    assert (bad.value.field, bad.value.value) == ("delay", text)
    assert "such as 40ms" in str(bad.value)


@pytest.mark.parametrize("text", ["", "10", "10MB", "10mb/s", "10 Mb/s", "-1MB/s", "10ms"])
def test_no_rate(text):
    with pytest.raises(BadInput, match="such as 10MB/s"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["1_000", "٤", "", "1" * 31, "0x10", "1.0", "one"])
def test_whole_numbers_are_plain_digits(text):
    with pytest.raises(ValueError, match=text or "^$"):
        whole(text)


@pytest.mark.parametrize("text", ["1_0", "٤", "", "." * 70, "1" * 61, "1e", "0x1p3", "infinit"])
def test_numbers_are_plain_digits(text):
    with pytest.raises(ValueError, match="^" + text.replace(".", r"\.") + "$"):
        number(text)


@given(st.integers(-(10**29), 10**29), st.floats())
def test_a_number_that_is_printed_is_read(count, value):
    assert whole(str(count)) == count
    assert number(repr(value)) == pytest.approx(value, rel=0, nan_ok=True)


@given(st.just(0.0) | st.floats(1e-3, 1e9), st.sampled_from(["s", "ms", "us"]))
def test_what_is_printed_is_read(value, unit):
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
    assert parse_seconds(f"{value!r}{unit}".replace("e+", "e")) == value * scale


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([4, 3, 2.5, 1], "4,3,2.5,1"),
        ([26] * 64, "26 x 64"),
        ([26] * 64 + [12] * 3 + [1], "26 x 64, 12 x 3, 1"),
        (range(100, 0, -1), "100, 99, 98, 97, 96, 95, 94, 93, ..., 1"),
        ([], ""),
    ],
)
def test_many_values_are_brief(values, text):
    assert brief(values) == text


@given(st.lists(st.integers(0, 10**6), max_size=300))
def test_what_is_brief_is_short(values):
    assert len(brief(values)) <= 60


@given(st.floats(1.0, 1e15), st.sampled_from(["", "B", "kB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_a_size_that_is_read_again_is_no_less_and_hardly_more(nbytes, unit):
    again = parse_bytes(size(nbytes, unit).replace("e+", "e"))
    assert nbytes * (1 - 1e-9) <= again <= max(1.002 * nbytes, nbytes + 1)
