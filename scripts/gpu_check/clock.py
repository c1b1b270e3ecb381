"""Part `clock`: moments of a stream on the host's clock, and what it costs to take them.

On an idle stream a mark is passed between two looks at the host's clock: how far outside of them
its moment lies is the clock's error. Over seconds, with and without anchors, that is the drift.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_check.rank_fixture import RankFixture
from gpu_check.ranks import Deadline, run_ranks
from gpu_check.result import Result, ms
from gpu_check.target import CPU, FAKE, GPU, Target

SECONDS, SHORT = 5.0, 1.0  # with anchors, and as long without; of a rehearsal
EVERY = 0.1  # seconds between anchors, as between iterations
LOOKS = 0.01  # seconds between marks
# Seconds of error in the middle, and at most: a link's delay is measured in milliseconds. A
# rehearsal shares its cores with whatever else runs there.
MOST = {GPU: (1e-3, 5e-3), FAKE: (5e-3, 5e-2)}
WRONG = {GPU: 0.05, FAKE: 0.2}  # of an op's time
OP, TRIES = 0.1, 3  # seconds of an op; the host may be late to see its end
MARKS = 2000
PLANTED = 0.1  # seconds by which the clock is off


def run(found: Result, target: Target, work: Path, deadline: Deadline, options: Any) -> None:
    if target.kind == CPU:
        found.why_not = "torch has no CUDA build here, and the CPU has one clock"
        return
    seconds = SHORT if target.kind == FAKE else SECONDS
    machine = {"kernel_us": 500} if target.kind == FAKE else {}
    given = {"seconds": seconds, "plant": options.plant}
    (one,) = run_ranks(target, "clock", work, deadline, options=given, queues=32, **machine)
    error, late = one["with anchors"], one["without"]
    for name, row in (("with anchors", error), (f"{seconds:g} s after the last anchor", late)):
        for what, most in zip(("median", "worst"), MOST[target.kind], strict=True):
            found.check(row[what] <= most, f"{name}: a mark is off by {ms(row[what])} ({what}), "
                        f"more than {ms(most)}")  # fmt: skip
    op = one["op"]
    off = abs(op["span"] / op["took"] - 1)
    found.check(
        off <= WRONG[target.kind], f"an op of {ms(op['took'])} takes {ms(op['span'])} by its marks"
    )
    found.check(abs(op["began"] - op["behind"]) <= WRONG[target.kind] * OP, f"an op that begins "
                f"{ms(op['behind'])} after its launch, behind other work, begins after "
                f"{ms(op['began'])} by its mark")  # fmt: skip
    cost = one["cost"]
    found.figures += [
        f"off by {ms(error['median'])}, at most {ms(error['worst'])} (looks {ms(error['width'])} "
        "apart)",
        f"without anchors {ms(late['worst'])} after {seconds:g} s, {late['ppm']:+.1f} ppm",
        f"a mark takes {1e6 * cost['host']:.1f} us of the host, {1e6 * cost['stream']:.2f} us of "
        "the stream",
        f"an op launched in {ms(op['launching'])} takes {ms(op['span'])}",
    ]
    found.table("The clock", ("what", "median", "worst", "ppm", "marks"), [
        [name, ms(row["median"]), ms(row["worst"]), f"{row['ppm']:+.2f}", str(row["count"])]
        for name, row in (("with anchors", error), ("without", late))
    ])  # fmt: skip
    found.table("An op of the device", ("launched in", "took", "by its marks",
                "behind other work: began after", "by its mark"),
                [[ms(op["launching"]), ms(op["took"]), ms(op["span"]), ms(op["behind"]),
                  ms(op["began"])]])  # fmt: skip


# On a rank.


def on_rank(fixture: RankFixture, seconds: float, plant: bool) -> dict[str, Any]:
    off = PLANTED if plant else 0.0
    fixture.gpu.anchor()
    fixture.finish()
    time.sleep(LOOKS)  # an anchor is there when a thread has seen it
    return {
        "with anchors": _errors(fixture, seconds, True, off),
        "without": _errors(fixture, seconds, False, off),
        "cost": _cost(fixture),
        "op": min((_op(fixture, off) for _ in range(TRIES)), key=_amiss),
    }


def _errors(fixture: RankFixture, seconds: float, anchors: bool, off: float) -> dict[str, float]:
    errors, middles, times, widths = [], [], [], []
    begin = last = time.monotonic()
    while (now := time.monotonic()) < begin + seconds:
        if anchors and now > last + EVERY:
            fixture.gpu.anchor()
            last = now
        fixture.finish()
        before = time.monotonic()
        mark = fixture.gpu.mark()
        fixture.finish()
        after = time.monotonic()
        at = fixture.passed(mark) + off
        errors.append(max(0.0, before - at, at - after))
        middles.append(at - (before + after) / 2)
        times.append(before - begin)
        widths.append(after - before)
        time.sleep(LOOKS)
    narrow = sorted(range(len(widths)), key=widths.__getitem__)[: max(8, len(widths) // 2)]
    return {"median": median(errors), "worst": max(errors), "width": median(widths),
            "ppm": 1e6 * _slope([times[i] for i in narrow], [middles[i] for i in narrow]),
            "count": len(errors)}  # fmt: skip


def _slope(x: list[float], y: list[float]) -> float:
    """By least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    square = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / max(1e-9, square)


def _cost(fixture: RankFixture) -> dict[str, float]:
    """Of one mark: seconds of the calling thread, and of the stream."""
    for _ in range(2):  # events are made once, and used again
        begin = time.perf_counter()
        marks = [fixture.gpu.mark() for _ in range(MARKS)]
        host = (time.perf_counter() - begin) / MARKS
        fixture.finish()
        for mark in marks:
            fixture.passed(mark)
    # With a queue of other work before them all are launched when the first one is passed.
    spans = []
    for marked in (False, True):
        fixture.busy(OP / 2)
        start = fixture.gpu.mark()
        marks = []
        for _ in range(MARKS // 10):
            torch.cuda._sleep(1)
            if marked:
                marks.append(fixture.gpu.mark())
        end = fixture.gpu.mark()
        fixture.finish()
        spans.append(fixture.passed(end) - fixture.passed(start))
        for mark in marks:
            fixture.passed(mark)
    return {"host": host, "stream": (spans[1] - spans[0]) / (MARKS // 10)}


def _op(fixture: RankFixture, off: float) -> dict[str, float]:
    """An op alone, and one behind other work: its span is when it ran, not when it was launched."""
    fixture.calibrate()
    fixture.finish()
    begin = time.monotonic()
    first, last = fixture.busy(OP)
    launching = time.monotonic() - begin
    fixture.finish()
    took = time.monotonic() - begin
    span = fixture.passed(last) - fixture.passed(first)
    fixture.busy(OP)
    launched = time.monotonic()
    mine, _ = fixture.busy(OP / 10)
    fixture.finish()
    ended = time.monotonic()
    return {"took": took, "launching": launching, "span": span,
            "began": fixture.passed(mine) + off - launched,
            "behind": ended - OP / 10 - launched}  # fmt: skip


def _amiss(op: dict[str, float]) -> float:
    return abs(op["span"] - op["took"]) + abs(op["began"] - op["behind"])
