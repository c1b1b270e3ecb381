"""Decisions in one sentence each, for people."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_adaptra.plan.base import Plan
from megatron_adaptra.runtime.decisions import Decision


def sentence(decision: Decision) -> str:
    """A decision in force, for the log of the training."""
    return (  # Megatron's log counts from one
        f"from iteration {decision.iteration + 1} on, {decision.why}; an iteration is expected to "
        f"take {decision.predicted_ms:.4g} ms, without {decision.predicted_without_ms:.4g}"
    )


def why_swap(
    before: Mapping[tuple[int, int], float],
    now: Mapping[tuple[int, int], float],
    current: Plan,
    plan: Plan,
    back: bool,
) -> str:
    """The decision in one sentence, for people."""
    links = ", ".join(
        f"{a}->{b} takes {1e3 * now[a, b]:.3g} ms, "
        + (f"before {1e3 * old:.3g} ms" if old else "from the start")
        for (a, b), old in before.items()
    )
    what = "back to 1F1B" if back else "a deeper warmup hides it"
    return f"link {links}: {what} ({warmups(current, plan)})"


def warmups(current: Plan, plan: Plan) -> str:
    old, new = (",".join(map(str, p.schedule.warmup)) for p in (current, plan))
    return f"warmup {old} -> {new}"
