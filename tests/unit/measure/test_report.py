"""A stage's report goes through JSON and is what it was; anything else is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure.records import job, record, stock, stock_records

from megatron_adaptra.base.errors import BadMessage
from megatron_adaptra.measure.link_fit import Sample
from megatron_adaptra.measure.report import (
    VERSION,
    Collective,
    LinkSample,
    Memory,
    StageReport,
    Step,
    StockOp,
)

SECONDS = st.floats(-1e3, 1e3)
BY_KIND = st.dictionaries(st.sampled_from("FBIWR"), SECONDS)
MAYBE = st.none() | SECONDS
LINKS = st.dictionaries(
    st.integers(0, 999),
    st.builds(
        LinkSample, MAYBE, MAYBE, MAYBE, MAYBE, MAYBE,
        st.lists(st.builds(Sample, SECONDS, SECONDS)).map(tuple), st.text(max_size=20),
    ),
)  # fmt: skip
COLLECTIVES = st.builds(
    Collective, st.text(max_size=5), SECONDS, SECONDS, SECONDS,
    st.lists(st.integers(0, 9)).map(tuple), st.booleans(),
)  # fmt: skip
REPORTS = st.builds(
    StageReport,
    st.integers(0, 99), st.integers(0), BY_KIND, BY_KIND, SECONDS, LINKS, SECONDS,
    memory=st.none() | st.builds(
        Memory, SECONDS, st.none() | st.integers(0), st.integers(0), st.none() | st.integers(0),
        st.integers(0),
    ),
    ops=st.none() | st.lists(st.builds(
        StockOp, st.just("F0"), SECONDS, SECONDS, SECONDS, SECONDS)).map(tuple),
    step=st.none() | st.builds(Step, SECONDS, st.lists(COLLECTIVES).map(tuple)),
    seconds=st.none() | SECONDS,
)  # fmt: skip


def travelled(report: StageReport) -> Any:
    return json.loads(json.dumps(report.to_json()))


@given(REPORTS)
def test_a_report_is_what_it_was(report: StageReport) -> None:
    assert StageReport.from_json(travelled(report)) == report


def test_what_stages_report_is_what_it_was() -> None:
    before, now = (record(1, i, {0: 0.001, 2: 0.002}) for i in (6, 7))
    now.memory = Memory(2.0, 300, 100, None, 5)
    report = now.report(before)
    assert report.seconds == before.end - before.begin
    assert report.step == before.step
    theirs = [one.report() for one in stock_records(stock(job({(0, 1): 0.04}, 2)))]
    assert all(one.ops for one in theirs)
    for one in (report, *theirs):
        assert StageReport.from_json(travelled(one)) == one


def put(*path: Any) -> Callable[[Any], Any]:
    """The last of `path` is the value, the others are where."""

    def change(data: Any) -> Any:
        *where, last, value = path
        found = data
        for key in where:
            found = found[key]
        found[last] = value
        return data

    return change


def without(name: str) -> Callable[[Any], Any]:
    return lambda data: {key: value for key, value in data.items() if key != name}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("version", VERSION + 1), f"version {VERSION + 1}; this one reads {VERSION}"),
        (without("links"), "report lacks links"),
        (put("waited", 1.0), "report has 'waited', which is unknown here"),
        (put("worker", "1"), "worker of a report cannot be '1'"),
        (put("overhead", None), "overhead of a report cannot be None"),
        (put("overhead", math.nan), "overhead of a report cannot be nan"),
        (put("links", [1.0]), "links of a report cannot be [1.0]"),
        (put("links", {"-1": 1.0}), "links of a report cannot be '-1'"),
        (put("links", "0", 1.0), "links of a report cannot be 1.0"),
        (put("links", "0", "delay", "1"), "delay of a report cannot be '1'"),
        (put("links", "0", {"delay": 1.0}), "links lacks delay_p25"),
        (put("memory", "peak", "3"), "peak of a report cannot be '3'"),
        (put("memory", "peaks", 3), "memory has 'peaks'"),
        (put("ops", 0, 1, "soon"), "ops.start of a report cannot be 'soon'"),
        (put("step", "collectives", 0, 4, 7), "collectives.stages of a report cannot be 7"),
        (lambda data: [data], "a report is an object"),
    ],
)
def test_what_is_no_report_is_refused(change: Callable[[Any], Any], words: str) -> None:
    report = replace(
        record(1, 7, {0: 0.001}).report(),
        memory=Memory(2.0, 300), ops=(StockOp("F0", 1.0, 2.0, 0.5, 0.0),),
        step=Step(0.1, (Collective("all_reduce", 0.1, -1.0, 0.1, (0, 1), False),)), seconds=0.2,
    )  # fmt: skip
    assert StageReport.from_json(travelled(report)) == report
    with pytest.raises(BadMessage) as refused:
        StageReport.from_json(change(travelled(report)))
    assert words in str(refused.value)
