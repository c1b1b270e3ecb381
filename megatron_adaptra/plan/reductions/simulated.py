"""Simulation of an all-reduce by the clock of ports: of a choice, and of gloo's, the native one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_adaptra.base.units import ten_digits
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Figures
from megatron_adaptra.sim.ports import Ports, run_on_ports

NATIVE_CUT = 2  # gloo's ring has two segments per rank
_AT_ONCE = 2  # collectives of a group that torch's gloo runs at a time: it has two threads


def simulated(choice: Choice, figures: Figures, most: int) -> float:
    """Return the seconds of a `choice`, not native, after the last arrival, to ten digits.

    Buffers wait for each other, or overlap with backwards. Then all of them go as one, into which
    no more than `most` pieces are cut: each message costs as much as those for which it stands.
    Buffers that become ready while others are reduced are hidden, but for the last one.
    """
    f, buffers = figures, figures.buffers
    if not buffers.overlap:
        first = _run(choice, f.mean_buffer, f.ports, f.lateness)
        more = buffers.count - 1
        return ten_digits(first + (more and more * _run(choice, f.mean_buffer, f.ports, ())))
    whole = as_one(choice, figures, most)
    messages = max(1, choice.pieces) * buffers.count / max(1, whole.pieces)
    seconds = _run(whole, f.nbytes, replace(f.ports, cost=messages * f.ports.cost), f.lateness)
    last = _run(choice, buffers.last, f.ports, f.lateness)
    return ten_digits(max(seconds - buffers.overlap, last))


def as_one(choice: Choice, figures: Figures, most: int) -> Choice:
    """Return the `choice` for all buffers in one, in `most` pieces at most, for `simulated`."""
    each, count = choice.pieces, figures.buffers.count
    return replace(choice, pieces=min(each * count, max(each, most))) if each else choice


def _run(choice: Choice, nbytes: int, ports: Ports, lateness: Sequence[float]) -> float:
    plan = choice.plan()
    assert plan is not None
    return run_on_ports(plan, nbytes, ports, lateness).after_arrival


def natively(figures: Figures, most: int) -> float:
    """Return the seconds of gloo's all-reduce after the last rank has arrived, to ten digits.

    `figures`, `most`: as of `simulated`. Buffers that overlap with backwards are reduced two at a
    time, so that each two of them cross their delays after the two before.
    """
    f, ring = figures, Choice(figures.ranks, "ring", NATIVE_CUT)
    gloo, buffers = replace(f, ports=by_gloo(f.ports)), f.buffers
    if not buffers.overlap:
        return simulated(ring, gloo, most)
    turns = -(-buffers.count // _AT_ONCE)
    each = replace(buffers, count=min(buffers.count, _AT_ONCE))
    turn = as_one(ring, replace(gloo, buffers=each), most)
    nbytes = f.nbytes // turns
    first = _run(turn, nbytes, gloo.ports, f.lateness)
    others = (turns - 1) * (turns > 1 and _run(turn, nbytes, gloo.ports, ()))
    last = _run(ring, buffers.last, gloo.ports, f.lateness)
    return ten_digits(max(first + others - buffers.overlap, last))


def by_gloo(ports: Ports) -> Ports:
    """Return `ports` as gloo, native on CPUs, meets them: with twice the delays.

    No message leaves before its receiver has reported to be ready. A rank does so in each step of a
    ring, so that a step crosses two delays (measured: docs/evidence/allreduce.md).
    """
    paths = {way: path._replace(delay=2 * path.delay) for way, path in ports.paths.items()}
    return replace(ports, delay=2 * ports.delay, paths=paths)
