"""Results of all-reduces that were chosen while training: words, figures, a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from megatron_adaptra.adapt.loop import Loop
from megatron_adaptra.adapt.reductions.decisions import ReductionDecision, ranks_in_words
from megatron_adaptra.adapt.reductions.remedy import ReductionRemedy
from megatron_adaptra.demo.options import DemoOptions
from megatron_adaptra.plan.reductions.choice import Choice
from megatron_adaptra.plan.reductions.figures import Figures
from megatron_adaptra.plan.reductions.simulated import NATIVE_CUT, by_gloo
from megatron_adaptra.sim.ports import run_on_ports
from megatron_adaptra.view.all_reduce import all_reduce_gantt
from megatron_adaptra.view.axis import number
from megatron_adaptra.view.bars import Gantt
from megatron_adaptra.view.findings import measured_too
from megatron_adaptra.view.report import Simulated
from megatron_adaptra.view.summary import AllReduce, entry


@dataclass(frozen=True)
class GroupReductions:
    """A record holds the all-reduces of a data-parallel group, as its first rank knows them.

    `ranks`: global. `decisions`: that came into force. `known`: the figures for the choice of an
    all-reduce at the end of the phase that the report is about; None where too little was measured.
    """

    ranks: tuple[int, ...]
    decisions: list[ReductionDecision]
    known: Figures | None

    @classmethod
    def of(
        cls, loops: Sequence[Loop[ReductionRemedy]], known: Sequence[Figures | None] | None
    ) -> list[GroupReductions]:
        """Return a record for each of `loops`, at the end of a run; `known`: see `known_now`."""
        for loop in loops:
            loop.drain()
        figures = known_now(loops) if known is None else known
        return [
            cls(tuple(loop.remedy.ranks), list(loop.log.in_force), one)
            for loop, one in zip(loops, figures, strict=True)
        ]


def known_now(loops: Iterable[Loop[ReductionRemedy]]) -> list[Figures | None]:
    """Return by loop the figures measured so far; None where too little was measured."""
    found = []
    for loop in loops:
        loop.drain()
        found.append(loop.remedy.known())
    return found


def entries(groups: Iterable[GroupReductions]) -> list[AllReduce]:
    """Return the summary's entry for each decision, in the order of their iterations."""
    decisions = [one for group in groups for one in group.decisions]
    return [
        entry(AllReduce, one, measured_ms=measured_ms(one))
        for one in sorted(decisions, key=lambda one: (one.iteration, one.ranks))
    ]


def measured_ms(decision: ReductionDecision) -> float | None:
    """Return the median ms from last arrival to end, of the samples after the first reduction."""
    return median(decision.samples) if decision.samples else None


def why_native(groups: Sequence[GroupReductions], options: DemoOptions) -> list[str]:
    """Explain, in a sentence per group, why a group has stayed with native all the time."""
    notes = []
    for group in groups:
        if group.decisions or group.known is None:
            continue
        known = group.known
        lateness = zip(group.ranks, known.lateness, strict=True)
        late = [(rank, ms) for rank, s in lateness if (ms := 1e3 * s) > 0]
        found = " and ".join(f"rank {rank} comes {number(ms)} ms late" for rank, ms in late)
        took = f", after which native takes {number(1e3 * known.native)} ms" if known.native else ""
        notes.append(
            f"Gradients of {ranks_in_words(group.ranks)} stayed with native: "
            f"{found or 'no rank was found to be late'}{took}, of an iteration of "
            f"{number(1e3 * known.iteration)} ms; no all-reduce would save enough of it."
        )
    if notes and not options.netlab:
        notes.append(
            "Between ranks of one machine messages are as fast as memory, and there is little to "
            "save in an all-reduce: with --netlab each rank has a host, with a port of its own."
        )
    return notes


def drawn_reduction(groups: Iterable[GroupReductions], phase: tuple[int, int]) -> Simulated | None:
    """Draw the all-reduce that most reductions of the `phase` ran in place of native; or None."""
    found: list[tuple[int, int, ReductionDecision]] = []
    for group in groups:
        for decision, until in pairwise([*group.decisions, None]):
            assert decision is not None
            end = phase[1] if until is None else min(until.iteration, phase[1])
            ran = end - max(decision.iteration, phase[0])
            if decision.after != "native" and decision.figures is not None:
                found.append((-ran, decision.iteration, decision))
    if not found:
        return None
    return reduction_of(min(found, key=lambda one: one[:2])[2])


def reduction_of(decision: ReductionDecision) -> Simulated:
    """Return the picture of a `decision`, from the figures that it was made from."""
    figures, chosen = Figures.from_json(decision.figures), Choice.from_json(decision.choice)
    gloo = replace(figures, ports=by_gloo(figures.ports))
    before = Choice(figures.ranks, "ring", NATIVE_CUT)
    gantts = {}
    for name, choice, known, measured in (
        ("native", before, gloo, None if figures.native is None else 1e3 * figures.native),
        (decision.after, chosen, figures, measured_ms(decision)),
    ):
        gantt, ms = _simulated(choice, known)
        words = f"{name}: {number(ms)} ms after the last arrival{measured_too(measured)}"
        gantts[words] = gantt
    note = (
        f"As simulated from what had been measured when it was chosen for iteration "
        f"{decision.iteration}, on one time scale. Rows are the ranks of one data-parallel group, "
        f"{ranks_in_words(decision.ranks)}: what the port of each sends (out), and what it "
        "receives (in)."
    )
    return Simulated("One reduction of gradients, native and ours", note, gantts, 13)


def _simulated(choice: Choice, figures: Figures) -> tuple[Gantt, float]:
    """Return the picture, and the milliseconds from the last arrival to the end."""
    plan = choice.plan()
    assert plan is not None, "native has no plan to be drawn"
    run = run_on_ports(plan, figures.nbytes, figures.ports, figures.lateness)
    return all_reduce_gantt(plan, run), 1e3 * run.after_arrival
