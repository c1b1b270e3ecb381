"""Entries of summary.json for what was decided while training: all-reduces, and shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from megatron_adaptra.adapt.reductions.decisions import ReductionDecision
from megatron_adaptra.adapt.shares.remedy import ShareDecision
from megatron_adaptra.view.summary import AllReduce, Shares, entry


def reduction_entries(decisions: Iterable[ReductionDecision]) -> list[AllReduce]:
    """Return the summary's entry for each of `decisions`, in the order of their iterations.

    What is measured is the median of the samples after the first reduction.
    """
    return [
        entry(AllReduce, one, measured_ms=median(one.samples) if one.samples else None)
        for one in sorted(decisions, key=lambda one: (one.iteration, one.ranks))
    ]


def share_entries(
    decisions: Sequence[ShareDecision], iteration_ms: Sequence[float], ends: Iterable[int]
) -> list[Shares]:
    """Return the summary's entry for each of `decisions`, in order.

    `iteration_ms`: of each iteration that ran. `ends`: of the phases, each the iteration after its
    last: other replicas are slow in the next phase, which a prediction does not cover.
    """
    found, ends = list[Shares](), [*ends, len(iteration_ms)]
    for one, until in pairwise([*decisions, None]):
        assert one is not None
        end = min([end for end in ends if end > one.iteration], default=len(iteration_ms))
        end = end if until is None else min(end, until.iteration)
        times = iteration_ms[one.iteration + 1 : end]
        measured = median(times) if times else None
        found.append(entry(Shares, one, measured_ms=measured))
    return found
