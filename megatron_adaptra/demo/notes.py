"""Sentences of a report: what interrupted it, who used the machine, why predictions are off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_adaptra.adapt.schedules.decisions import PlanDecision
from megatron_adaptra.demo.comparison import BUSY, Comparison, Ran, conditions_of, why_off
from megatron_adaptra.demo.cpu_load import Sample, load_of
from megatron_adaptra.demo.options import DemoOptions
from megatron_adaptra.view.report import ArmReport
from megatron_adaptra.view.summary import Machine


def of_the_run(options: DemoOptions, interrupted: str, ran: int, machine: Machine) -> list[str]:
    """Sentences: whether the run is whole, and whether the machine was busy.

    `interrupted`: by which signal, or empty, after `ran` iterations. `machine`: as the summary has
    it.
    """
    notes = []
    if interrupted:
        notes.append(
            f"Interrupted by {interrupted} after {ran} of {options.iterations} iterations: "
            f"all figures are of these."
        )
    if options.op_times > 1:
        notes.append(
            f"{options.world} ranks have no core each, and replicas that wait for a core are "
            f"equally slow. So each op takes {options.op_times:g} times as long as it computes, by "
            f"waiting, as if a GPU ran it."
        )
    others = {name: load["others"] for name, load in machine["cpu_share"].items()}
    others.pop("compared", None)
    busy = {name: share for name, share in others.items() if share > BUSY}
    if busy:
        phases = ", ".join(f"{100 * share:.0f} % ({name})" for name, share in busy.items())
        notes.append(
            f"The machine was busy: other processes used {phases} of the CPU time of its "
            f"{machine['cores']} cores; load average {machine['load_average'][0]:.1f}. Iterations "
            f"take longer, and differ more, than on an idle machine."
        )
    return notes


def of_predictions(
    decisions: Sequence[PlanDecision],
    lived: Mapping[int, range],
    samples: Sequence[Sequence[Sample]],
    kernels: Sequence[str],
    comparison: Comparison | None,
    arms: Sequence[ArmReport],
    delays: Mapping[int, Mapping[str, float]],
) -> list[str]:
    """Sentences: which plan is compared if not the last, and why predictions are off.

    `decisions`: on plans in force. `lived`: the whole iterations of each plan in its phase, by its
    first iteration. `samples`, `kernels`: by rank, see RankResult. `comparison` of both `arms`, or
    None. `delays`: see `why_off`.
    """
    notes, judged = [], list[Ran]()
    if comparison is not None:
        notes.append(comparison.why_not_the_last)
        judged += [comparison.ran(arm.name, arm.measured) for arm in arms]
    for d in decisions:
        whole = lived[d.iteration]
        if d.measured_ms is None or (comparison is not None and comparison.iterations == whole):
            continue
        who = f"The plan of iteration {d.iteration}"
        judged.append(Ran(who, whole, d.predicted_ms, d.measured_ms, conditions_of(d)))
    for one in judged:
        load = load_of(samples, kernels, one.iterations.start, one.iterations.stop)
        notes.append(why_off(one, delays, load))
    return [note for note in notes if note]
