"""Times of iterations by phase: before a plan was found for what is slow, and adapted to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from megatron_adaptra.demo.comparison import WARM_UP
from megatron_adaptra.view.findings import key_phase
from megatron_adaptra.view.gain import ADAPTED, NOT_YET
from megatron_adaptra.view.summary import Times

_ERRORS = 2.0  # standard errors of a median that chance explains
# Of a median, in median deviations of normal samples over the root of their number.
_ERROR = 1.4826 * 1.2533
_ALONE = 0.1  # share by which one iteration may differ, whatever has changed


def phase_times(
    phases: Mapping[str, tuple[int, int]],
    iteration_ms: Mapping[str, Sequence[float]],
    onset: int,
    changes: Sequence[int] | None,
) -> list[Times]:
    """Return what iterations take in each of `phases`, the one that a report is about in parts.

    Args:
        phases: by name, the first iteration and the one after the last.
        iteration_ms: by arm.
        onset: the first iteration in which something is slow.
        changes: first iterations of plans for what is slow; None where none is looked for.
    """
    key, found = key_phase(phases), list[Times]()
    for phase, (first, end) in phases.items():
        parts = {"": range(first, end)}
        if changes is not None and phase == key and phase != "healthy":
            parts = _parts(range(first, end), onset, changes)
        found += [
            _times(phase, what, iterations, iteration_ms)
            for what, iterations in parts.items()
            if iterations
        ]
    return found


def _parts(span: range, onset: int, changes: Sequence[int]) -> dict[str, range]:
    """Return the iterations before the first of `changes`, and those under the last one.

    The first iteration on a plan is not whole, and in neither.
    """
    inside = sorted(one for one in changes if one < span.stop)
    whole = [one for one in inside if one + 1 < span.stop]
    if not whole:
        return {NOT_YET: range(onset, inside[0] if inside else span.stop)}
    adapted = range(max(span.start, whole[-1] + 1), span.stop)
    return {NOT_YET: range(onset, whole[0]), ADAPTED: adapted}


def _times(
    phase: str, what: str, iterations: range, iteration_ms: Mapping[str, Sequence[float]]
) -> Times:
    warm = range(max(iterations.start, WARM_UP), iterations.stop) or iterations
    stock, ours = (iteration_ms[arm][warm.start : warm.stop] for arm in ("stock", "adaptra"))
    return {
        "phase": phase, "what": what,
        "first_iteration": iterations.start, "last_iteration": iterations.stop - 1,
        "stock_ms": median(stock), "adaptra_ms": median(ours), "noise": noise(stock, ours),
    }  # fmt: skip


def noise(stock: Sequence[float], ours: Sequence[float]) -> float:
    """Return the share by which chance may move the ratio of the medians of `stock` and `ours`.

    Both run each iteration in turns, so that what holds up one iteration of both is no noise.
    """
    ratios = [a / b for a, b in zip(stock, ours, strict=True)]
    middle = median(ratios)
    spread = median(abs(one - middle) for one in ratios) / middle
    return max(_ERRORS * _ERROR * spread / math.sqrt(len(ratios)), _ALONE / len(ratios))
