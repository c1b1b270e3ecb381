"""A checkpoint's plan is taken where this job can run it, and refused in one line where not."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import both_ways
from megatron_adaptra.adapter.pipeline.resumed import Fits, Unfit, read_state
from megatron_adaptra.config import parse_budget
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.ir.op import Kind
from megatron_adaptra.ir.schedule import Schedule, warmup_line
from megatron_adaptra.plan import make_plan
from megatron_adaptra.plan.pipeline.fixed import interleaved_line
from megatron_adaptra.plan.pipeline.initial import recomputed, starting_schedule

STAGES, COUNT = 3, 6
FULL = {Kind.F, Kind.B}
HALVES = FULL | {Kind.I, Kind.W}
EVERYTHING = frozenset(Kind(kind) for kind in "FBIWR")


def starting(policy: str = "adaptive", chunks: int = 1) -> Schedule:
    return starting_schedule(policy, STAGES, COUNT, chunks, float("inf"), False)


def planned(**more: Any) -> Schedule:
    even = (0.01,) * STAGES
    return make_plan(Conditions(COUNT, even, even, even, both_ways({1: 0.05}), **more)).schedule


def deeper(*depths: int, count: int = COUNT) -> Schedule:
    return Schedule(tuple(warmup_line(depth, count) for depth in depths), count)


def interleaved(*more: int) -> Schedule:
    order = tuple(interleaved_line(s, STAGES, COUNT, 2, STAGES, m) for s, m in enumerate(more))
    return Schedule(order, COUNT, 2)


def fits(
    kinds: Any = FULL, free: bool = False, budget: str = "none", start: Schedule | None = None,
    adapts: bool = True,
) -> Fits:  # fmt: skip
    return Fits(start or starting(), adapts, kinds, free, parse_budget(budget))


def state(schedule: Schedule | str, delays: Any = None, **more: Any) -> dict[str, Any]:
    text = schedule if isinstance(schedule, str) else schedule.text()
    return {
        "format": 1,
        "schedule": text,
        "delays": {"1>2": 0.04} if delays is None else delays,
    } | more


NATIVE, EXECUTOR = fits(), fits(EVERYTHING, free=True)
HALVED = planned(activation_budget=(3.0,) * STAGES)
LIGHT = recomputed(deeper(5, 4, 2))
TWO = fits(start=starting(chunks=2))


@pytest.mark.parametrize(
    ("job", "schedule"),
    [
        (NATIVE, deeper(5, 4, 2)),
        (EXECUTOR, deeper(5, 4, 2)),  # of the other engine
        (EXECUTOR, HALVED),
        (EXECUTOR, LIGHT),
        (TWO, interleaved(2, 1, 0)),
        (fits(budget="5"), deeper(5, 4, 2)),
        (fits(budget="1MiB"), starting()),
        (fits(adapts=False, start=starting("zb-h1")), starting("zb-h1")),
    ],
)
def test_a_plan_that_fits_is_taken(job: Fits, schedule: Schedule) -> None:
    assert job.take(state(schedule)) == (schedule, {"1>2": 0.04})


def text_of(schedule: Schedule, old: str, new: str) -> str:
    assert old in schedule.text()
    return schedule.text().replace(old, new)


PLAIN = deeper(5, 4, 2)
HEAD = PLAIN.text().splitlines()[0]
UNFIT: dict[str, tuple[Fits, Any, str]] = {
    "halves for Megatron's schedule": (NATIVE, state(HALVED), "halves of backwards"),
    "halves where the model allows none": (fits(free=True), state(HALVED), "halves of backwards"),
    "recompute that is off": (fits(HALVES, free=True), state(LIGHT), "recompute"),
    "an order that is not Megatron's": (
        NATIVE, state(text_of(PLAIN, "2: F0 F1 B0 F2", "2: F0 F1 F2 B0")), "stage 2 runs an order"
    ),
    "two chunks for one": (NATIVE, state(interleaved(0, 0, 0)), "2 chunks"),
    "one chunk for two": (TWO, state(PLAIN), "1 chunks"),
    "chunks in an order of their own": (
        TWO, state(replace(interleaved(0, 0, 0), order=interleaved(0, 0, 0).order[::-1])),
        "an order",
    ),
    "fewer stages": (NATIVE, state(deeper(2, 1)), "2 stages"),
    "more microbatches": (NATIVE, state(deeper(3, 2, 1, count=8)), "8 microbatches"),
    "a fixed policy": (
        fits(adapts=False, start=starting("zb-h1")), state(PLAIN), "this job's policy is zb-h1"
    ),
    "too much memory": (fits(budget="4"), state(PLAIN), "stage 0 holds 5 microbatches, 4 are"),
    "memory in bytes": (fits(budget="auto"), state(PLAIN), "stage 0 holds 5 microbatches, 3 are"),
    "a microbatch twice": (EXECUTOR, state(text_of(PLAIN, "2: F0", "2: F0 F0")), "damaged"),
    "a microbatch left out": (EXECUTOR, state(text_of(PLAIN, "2: F0 F1 B0", "2: F1")), "damaged"),
    "forwards out of order": (
        EXECUTOR, state(text_of(PLAIN, "2: F0 F1 B0", "2: F1 F0 B0")), "out of their order"
    ),
    "gradients added in another order": (
        EXECUTOR, state(text_of(PLAIN, "2: F0 F1 B0 F2 B1", "2: F0 F1 B1 F2 B0")), "out of their"
    ),
    "a deadlock": (EXECUTOR, state(deeper(1, 2, 3)), "damaged: deadlock"),
    "ops of messages": (EXECUTOR, state(text_of(PLAIN, "2: F0", "2: PF0 F0")), "damaged"),
    "ops of a replica": (EXECUTOR, state(text_of(PLAIN, "2: F0", "2: F0@1")), "it has op F0@1"),
    "a number without an end": (EXECUTOR, state(text_of(PLAIN, "2: F0", "2: F" + "9" * 9999)), ""),
    "10^12 microbatches": (
        EXECUTOR, state(text_of(PLAIN, '"microbatches": 6', '"microbatches": 1000000000000')),
        "1000000000000 microbatches",
    ),
    "microbatches in words": (
        EXECUTOR, state(text_of(PLAIN, '"microbatches": 6', '"microbatches": "six"')), "'six'"
    ),
    "microbatches as a fraction": (
        EXECUTOR, state(text_of(PLAIN, '"microbatches": 6', '"microbatches": 6.0')), "6.0"
    ),
    "a policy without a name": (
        EXECUTOR, state(text_of(PLAIN, '"policy": ""', '"policy": [[]]')), "damaged"
    ),
    "no text": (EXECUTOR, {"format": 1, "schedule": 7, "delays": {}}, "damaged"),
    "nothing": (EXECUTOR, state(""), "damaged"),
    "a head alone": (EXECUTOR, state(HEAD), "damaged"),
    "a line cut off": (EXECUTOR, state(PLAIN.text()[:-5]), "damaged"),
    "no schedule": (EXECUTOR, {"format": 1, "delays": {}}, "damaged"),
    "no delays": (EXECUTOR, {"format": 1, "schedule": PLAIN.text()}, "damaged"),
    "delays as a list": (EXECUTOR, state(PLAIN, [0.1]), "of no links"),
    "a delay of a strange link": (EXECUTOR, state(PLAIN, {"2>7": 0.1}), "of no links"),
    "a delay in words": (EXECUTOR, state(PLAIN, {"0>1": "long"}), "no seconds"),
    "a delay below zero": (EXECUTOR, state(PLAIN, {"0>1": -1.0}), "no seconds"),
    "a delay that is not a number": (EXECUTOR, state(PLAIN, {"0>1": float("nan")}), "no seconds"),
    "a delay that is true": (EXECUTOR, state(PLAIN, {"0>1": True}), "no seconds"),
    "a delay of 10^400": (EXECUTOR, state(PLAIN, {"0>1": 10**400}), "no seconds"),
    "another format": (EXECUTOR, state(PLAIN, format=2), "not of format 1"),
    "a list": (EXECUTOR, [], "not of format 1"),
    "a file that cannot be read": (EXECUTOR, "x cannot be read: gone", "cannot be read: gone"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_a_plan_that_does_not_fit_is_refused_in_one_line(name: str) -> None:
    job, found, words = UNFIT[name]
    with pytest.raises(Unfit) as raised:
        job.take(found)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@given(st.data())
def test_a_damaged_file_is_refused_or_harmless(data: st.DataObject) -> None:
    """Whatever has happened to it, what is taken runs, in an order that keeps the bits."""
    job, schedule = data.draw(st.sampled_from([(NATIVE, PLAIN), (EXECUTOR, HALVED)]))
    text = json.dumps(state(schedule))
    for _ in range(data.draw(st.integers(1, 3))):
        at, end = sorted(data.draw(st.tuples(*2 * [st.integers(0, len(text))])))
        end = min(end, at + 8)
        text = text[:at] + data.draw(st.text('FBIWR019 .:,>"{}[]-e\\n', max_size=4)) + text[end:]
    try:
        found = json.loads(text)
    except ValueError:
        return
    try:
        taken, delays = job.take(found)
    except Unfit:
        return
    for line in taken.order:
        for kinds in ("F", "BI", "BW"):
            numbers = [op.microbatch for op in line if op.kind.value in kinds]
            assert numbers == list(range(COUNT))
    assert all(0 <= seconds < 1e10 for seconds in delays.values())


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    good, folder, pipe = (tmp_path / f"{name}.json" for name in ("good", "folder", "pipe"))
    good.write_text(json.dumps(state(PLAIN)))
    assert read_state(good) == state(PLAIN)
    assert read_state(tmp_path / "none") is None
    folder.mkdir()
    os.mkfifo(pipe)
    deep, binary, large = (tmp_path / f"{name}.json" for name in ("deep", "binary", "large"))
    deep.write_text("[" * 100_000)
    binary.write_bytes(b"\xff\x00")
    with large.open("wb") as file:
        file.truncate(2**26 + 1)
    for path in (folder, pipe, deep, binary, large):
        found = read_state(path)
        assert isinstance(found, str)
        assert str(path) in found
        assert "\n" not in found
