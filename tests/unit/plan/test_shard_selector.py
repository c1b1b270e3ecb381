"""Which reduce-scatter `auto` takes: one delay instead of N - 1, where that gains enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.common import equal_ports
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.collective import Goal
from megatron_adaptra.ir.conditions import LinkState
from megatron_adaptra.plan.reductions.builders import sharded_plan
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Buffers, Figures
from megatron_adaptra.plan.reductions.shard_selector import choose_shards
from megatron_adaptra.plan.reductions.sized import shard_pieces
from megatron_adaptra.sim.ports import run_on_ports

MS, MB = 1e-3, 1_000_000


def figures(nbytes: int, delay: float, ranks: int = 8, **changed: object) -> Figures:
    ports = equal_ports([50e6] * ranks, delay, 0.1 * MS)
    return replace(Figures(nbytes, ports, (0.0,) * ranks, 0.2), **changed)  # type: ignore[arg-type]


def chosen(given: Figures, in_force: str = "native", min_gain: float = 0.05) -> str:
    pieces = 1 if in_force == "direct" else 0
    now = Choice(given.ranks, in_force, pieces, sharded=True)
    return choose_shards(given, now, min_gain).choice.algorithm


def test_a_long_delay_is_crossed_once_where_shards_are_small() -> None:
    """At 8 MB a shard takes as long as a delay, and a ring is as good (measured: docs/evidence)."""
    assert chosen(figures(1 * MB, 10 * MS)) == "direct"
    assert chosen(figures(8 * MB, 10 * MS)) == "native"
    assert chosen(figures(1 * MB, 0.1 * MS)) == "native"


def test_lateness_decides_nothing() -> None:
    """It has to send (N - 1)/N of the buffer after it has come, under any plan."""
    late = (0.0,) * 7 + (50 * MS,)
    assert chosen(figures(8 * MB, 0.1 * MS, lateness=late)) == "native"
    found = choose_shards(figures(1 * MB, 10 * MS), Choice(8, sharded=True), 0.05)
    same = choose_shards(figures(1 * MB, 10 * MS, lateness=late), Choice(8, sharded=True), 0.05)
    assert same.choice == found.choice
    assert found.seconds == pytest.approx(27.9 * MS, rel=0.03)  # 7/8 MB at 50 MB/s, one delay


def test_what_is_in_force_stays_until_half_of_the_gain_is_gone() -> None:
    one = figures(1 * MB, 10 * MS)
    ring, direct = (
        run_on_ports(
            sharded_plan(Goal.REDUCE_SCATTER, name, one.ranks, cut), one.nbytes, one.ports
        ).after_arrival
        for name, cut in sorted(shard_pieces(one.nbytes, one.ports).items(), reverse=True)
    )
    gain = 2 * (ring - direct) / one.iteration
    assert chosen(one, min_gain=1.01 * gain) == "native"
    assert chosen(one, min_gain=0.99 * gain) == "direct"
    assert chosen(one, "direct", min_gain=1.9 * gain) == "direct"
    assert chosen(one, "direct", min_gain=2.1 * gain) == "native"


def test_native_as_measured_may_be_faster_than_a_ring() -> None:
    assert chosen(figures(1 * MB, 10 * MS, native=20 * MS)) == "native"
    assert chosen(figures(1 * MB, 10 * MS, native=500 * MS)) == "direct"


def test_of_what_overlaps_with_a_backward_the_last_shards_count() -> None:
    """Their delays are crossed after it, whatever a bucket's rate is."""
    now, bucket = Choice(8, sharded=True), figures(1 * MB, 10 * MS)
    hidden = figures(8 * MB, 10 * MS, buffers=Buffers(8, 1.0, 1 * MB))
    assert chosen(hidden) == "direct"
    ours, alone = (choose_shards(one, now, 0.05) for one in (hidden, bucket))
    assert ours.native == alone.native
    assert ours.besides == pytest.approx(alone.besides, rel=0.05)
    assert ours.seconds == pytest.approx(alone.seconds, rel=0.05)  # in other pieces
    assert chosen(figures(8 * MB, 10 * MS, buffers=Buffers(1, 1.0, 8 * MB))) == "native"
    seen = choose_shards(replace(hidden, buffers=Buffers(8, 1.0, 1 * MB, gathers=8)), now, 0.05)
    assert seen.besides == pytest.approx(8 * ours.besides)
    buffers = Buffers(8, 1.0, 1 * MB, gathers=8, hides=1.0)
    assert choose_shards(replace(hidden, buffers=buffers), now, 0.05).besides == ours.besides
    # Forwards hide a plan's gathers whole, and so much of gloo's.
    buffers = replace(buffers, hides=60 * MS)
    part = choose_shards(replace(hidden, buffers=buffers), now, 0.05)
    assert ours.seconds < 60 * MS
    gloo = ours.besides + ours.seconds  # one of its gathers; ours takes as long as the scatter
    assert part.besides == pytest.approx(ours.besides + 7 * (gloo - 60 * MS), rel=0.05)
    in_turn = choose_shards(figures(8 * MB, 10 * MS, buffers=Buffers(8, gathers=8)), now, 0.05)
    assert in_turn.gain == pytest.approx(8 * alone.gain, rel=0.05)


def test_predicted_is_what_it_saves_over_gloo_in_both_collectives() -> None:
    """gloo's reduce-scatter and all-gather took 304 and 148 ms (measured: docs/evidence)."""
    given, now = figures(1 * MB, 10 * MS), Choice(8, sharded=True)
    found = choose_shards(given, now, 0.05)
    assert found.native == pytest.approx(304 * MS, rel=0.05)
    assert found.besides + found.seconds == pytest.approx(148 * MS, rel=0.05)  # direct is as long
    assert found.gain == found.native - found.seconds + found.besides
    slower = choose_shards(replace(given, native=519 * MS), now, 0.05)
    assert slower == found  # a busy machine's time does not count
    faster = choose_shards(replace(given, native=200 * MS), now, 0.05)
    assert faster.native == 200 * MS
    assert faster.besides + faster.seconds == pytest.approx(148 * 200 / 304 * MS, rel=0.05)
    assert choose_shards(figures(8 * MB, 10 * MS), now, 0.05).gain == 0


def test_predicted_over_a_slow_path_has_two_of_its_delays_per_crossing() -> None:
    """A chunk crosses it twice: with what is added up, and with the sum."""
    given, now = figures(1 * MB, 0.1 * MS), Choice(8, "direct", 1, sharded=True)
    far = given.ports.paths | {(2, 3): LinkState(delay=40 * MS)}
    given = replace(given, ports=replace(given.ports, paths=far))
    assert choose_shards(given, now, 0.0).native > 2 * 2 * 40 * MS


def test_bad_input() -> None:
    with pytest.raises(BadInput, match="a reduce-scatter of 8 ranks"):
        choose_shards(figures(1 * MB, 10 * MS), Choice(8), 0.05)
    with pytest.raises(BadInput, match="a reduce-scatter of 8 ranks"):
        choose_shards(figures(1 * MB, 10 * MS), Choice(4, sharded=True), 0.05)
    with pytest.raises(BadInput, match="min_gain"):
        choose_shards(figures(1 * MB, 10 * MS), Choice(8, sharded=True), -1.0)
    for wrong in ({"algorithm": "stragglar", "late": (1,), "pieces": 1}, {"shares": (1,) * 8}):
        with pytest.raises(BadInput):
            Choice(8, **{"algorithm": "direct", "pieces": 1, "sharded": True, **wrong})  # type: ignore[arg-type]
