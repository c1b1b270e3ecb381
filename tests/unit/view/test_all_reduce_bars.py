"""An all-reduce as bars: each message in its port and its time."""

from __future__ import annotations

import random
from itertools import pairwise

from seeding import new_seed

from megatron_adaptra.plan.reductions.builders import halving_doubling, ring
from megatron_adaptra.sim.ports import Ports, run_on_ports
from megatron_adaptra.view.all_reduce import all_reduce_gantt


def test_a_bar_names_the_piece_and_the_other_rank():
    run = run_on_ports(halving_doubling(4), 100_000, Ports.equal([1e6] * 4), [0, 0, 0, 0.1])
    bars = all_reduce_gantt(halving_doubling(4), run).bars
    assert [b.label for b in sorted(bars, key=lambda b: b.start) if b.row == 6] == [
        "late", "P0-1>1", "P2>2", "S3>2", "S2-3>1"
    ]  # fmt: skip
    assert [b.label for b in sorted(bars, key=lambda b: b.start) if b.row == 7] == [
        "A2-3<1", "A3<2", "R2<2", "R0-1<1"
    ]  # fmt: skip


def test_bars_are_the_messages_whole_and_in_their_time():
    """Nothing is lost or moved where short messages are one bar; bars of a port do not overlap."""
    rng = random.Random(new_seed())
    for _ in range(10):
        ranks = rng.randint(2, 9)
        plan = ring(ranks, rng.choice([1, 4, 16]))
        came = [rng.choice([0.0, 0.02]) for _ in range(ranks)]
        run = run_on_ports(plan, 100_000, Ports.equal([1e6] * ranks, 1e-3, 1e-4), came)
        bars = all_reduce_gantt(plan, run).bars
        for row in range(2 * ranks):
            out = row % 2 == 0
            mine = sorted(b.start for b in bars if b.row == row and b.label != "late")
            times = [
                (t.sent, t.left) if out else (t.began, t.arrived)
                for t in run.transfers
                if (t.source if out else t.target) == row // 2
            ]
            shown = [b for b in bars if b.row == row and b.label != "late"]
            assert sum(b.details["messages"] for b in shown) == len(times)
            assert {b.start for b in shown} <= {start for start, _ in times}
            assert {b.end for b in shown} <= {end for _, end in times}
            shown.sort(key=lambda b: b.start)
            assert [b.start for b in shown] == mine
            assert all(a.end <= b.start + 1e-9 for a, b in pairwise(shown))
            for start, end in times:
                assert any(b.start <= start and end <= b.end for b in shown)
