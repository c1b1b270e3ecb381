"""The selector of `auto` for shards: a reduce-scatter across one delay, where it gains enough.

A late rank sends (N - 1)/N of the buffer after it has come under any plan, so that lateness decides
nothing here: a plan can only save delays, of which a ring crosses N - 1. An iteration has two such
collectives, the all-gather of parameters being as long as the reduce-scatter of gradients.

Gradients that become ready while others are reduced hide all but the last of them. The seconds of
all-gathers that forwards hide are measured, and do not count.

A plan has to save enough over a ring of our own, so that delays alone decide, and bits stay as they
are without delays. The prediction compares it with native, over which it saves more: native is
gloo's, whose reduce-scatter is an all-reduce and a copy.
"""

from __future__ import annotations

from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.base.units import ten_digits
from megatron_adaptra.ir.collective import Goal
from megatron_adaptra.plan.reductions.builders import sharded_plan
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Figures
from megatron_adaptra.plan.reductions.selector import MOST_RANKS, Chosen
from megatron_adaptra.plan.reductions.simulated import NATIVE_CUT, by_gloo, natively, simulated
from megatron_adaptra.plan.reductions.sized import shard_pieces
from megatron_adaptra.sim.ports import run_on_ports

# The share that `direct` has to gain over a ring: the clock flatters it by as much, as messages of
# all to all do not disturb each other in a receiver's queue there (docs/evidence/allreduce.md).
CERTAIN = 0.1
COLLECTIVES = 2  # of an iteration, that gain alike over a ring


def choose_shards(figures: Figures, in_force: Choice, min_gain: float) -> Chosen:
    """Choose the reduce-scatter to run from now on; `in_force` if no other is clearly better.

    Args:
        figures: what is known; `native`: of a reduce-scatter.
        in_force: what runs now.
        min_gain: share of an iteration's seconds that a plan has to save over a ring. The one in
            force goes, for native, once it saves less than half of that.

    Raises:
        BadInput: `in_force` is no choice for shards of so many ranks, or `min_gain` is below 0.
    """
    ranks = figures.ranks
    if not in_force.sharded or in_force.ranks != ranks:
        raise BadInput("in force", str(in_force), f"a reduce-scatter of {ranks} ranks")
    if not min_gain >= 0:
        raise BadInput("min_gain", min_gain, "at least 0")
    native = Choice(ranks, sharded=True)
    if not 1 < ranks <= MOST_RANKS:
        return Chosen(native, 0.0, 0.0)
    f = figures.rounded()
    found = {
        name: Choice(ranks, name, cut, sharded=True)
        for name, cut in shard_pieces(f.mean_buffer, f.ports).items()
    }
    most = shard_pieces(f.nbytes, f.ports)
    ring, direct = (simulated(found[name], f, most[name]) for name in ("ring", "direct"))
    # A busy machine is slow for our plans, too: it does not count against native alone.
    by_native = ring if f.native is None else min(ring, f.native)
    part = 1.0 if in_force.native else 0.5
    saves, enough = COLLECTIVES * (by_native - direct), part * min_gain * f.iteration
    if by_native > (1 + part * CERTAIN) * direct and saves >= enough:
        chosen = in_force
        if in_force.algorithm != "direct":
            chosen = found["direct"]
        return _saves_over_gloo(chosen, f, direct)
    return Chosen(native, by_native, by_native)


def _saves_over_gloo(choice: Choice, figures: Figures, seconds: float) -> Chosen:
    """Return what a `choice`, with a reduce-scatter of so many `seconds`, saves over gloo's own."""
    f, ranks, ports = figures, figures.ranks, by_gloo(figures.ports)
    reduces = natively(f, NATIVE_CUT)  # gloo's reduce-scatter is an all-reduce
    native = reduces if f.native is None else min(reduces, f.native)
    gathering = choice.gathering()
    assert gathering is not None
    # All ranks begin it together: each has waited for the others in the reduce-scatter.
    ours = run_on_ports(gathering, f.mean_buffer, f.ports).after_arrival
    plan = sharded_plan(Goal.ALL_GATHER, "ring", ranks, NATIVE_CUT)
    theirs = run_on_ports(plan, f.mean_buffer, ports).after_arrival
    theirs *= native / reduces if reduces else 0.0  # as measured of the other one
    besides = f.buffers.exposed(theirs) - f.buffers.exposed(ours)
    return Chosen(choice, seconds, ten_digits(native), ten_digits(besides))
