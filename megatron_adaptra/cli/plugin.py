"""Plans that the plugin runs for a job: the default one, and the flags for other policies."""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron_adaptra.adapt.schedules.policy import ReplanPolicy, executor_flags
from megatron_adaptra.base.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.plan import PLANNERS, Plan, evaluate
from megatron_adaptra.plan.pipeline.fixed import first_schedule

DEFAULT = "--adaptra"
STOCK = "none: stock Megatron"
NOTHING = "not run in training"
HEALTHY = "not run while links are healthy"
WARMUP = (
    "warmup depth: forwards before a stage's first backward, one more than Megatron's "
    "num_warmup_microbatches"
)
SPLITTING = ("zb-h1", "zb-h2")  # as in config, which takes too long to import
RULE = ReplanPolicy()

# (conditions, policy) -> plan
Make = Callable[[Conditions, str], Plan]


def flags_of(policy: str, conditions: Conditions) -> str:
    """The flags of a training that runs plans of `policy`, or why there are none."""
    if policy in ("warmup", "adaptive") and not _slow(conditions):
        return HEALTHY
    if policy == "warmup":
        return DEFAULT
    if policy == "adaptive" and conditions.chunks == 1:
        return f"{DEFAULT} {executor_flags(conditions.recompute)}"
    if policy in SPLITTING:
        return f"{DEFAULT} {executor_flags(recompute=False)} --adaptra-policy {policy}"
    return STOCK if policy in ("1f1b", "interleaved") else NOTHING


def flags_of_plan(plan: Plan, sends: str) -> str:
    """The flags of a training that adopts this `plan`, with the least gain where it gains little.

    `sends`: eager or rendezvous.
    """
    policy = plan.schedule.policy
    flags = flags_of(policy, plan.conditions)
    start = _start(plan.conditions, sends)
    planned = policy in ("warmup", "adaptive") and flags.startswith(DEFAULT)
    if not planned or start is None or RULE.gains(plan, start):
        return flags
    share = math.floor(100 * max(0.0, 1 - plan.predicted / start.predicted)) / 100
    return f"{flags} --adaptra-min-gain {share:g}"


def default_plan(conditions: Conditions, sends: str, make: Make) -> Plan | None:
    """Return the plan that `--adaptra` alone runs: native, warmup; None for a refused shape.

    A plan is made where a link is slow, and adopted where it saves as much as --adaptra-min-gain;
    else the job stays with the schedule that it begins with. `sends`: eager or rendezvous; `make`:
    how plans are made. Raises BadInput where these take longer than they may.
    """
    start = _start(conditions, sends)
    if start is None or not _slow(conditions):
        return start
    plan = make(conditions, "warmup")
    return plan if RULE.gains(plan, start) else start


def stays_stock(default: Plan | None, stock: Plan | None) -> bool:
    """Return whether the `default` plan of the plugin is what `stock` Megatron runs, as fast."""
    if default is None or stock is None or not default.schedule.same_as(stock.schedule):
        return False
    return math.isclose(default.predicted, stock.predicted)


def _start(conditions: Conditions, sends: str) -> Plan | None:
    """Return the plan that a job begins with; None for a shape that Megatron refuses."""
    budget = conditions.activation_budget
    try:
        if conditions.chunks > 1:
            first = PLANNERS["interleaved"](conditions, sends, None)
        else:
            first = first_schedule(conditions.stages, conditions.microbatches, budget)
    except BadInput:
        return None
    return evaluate(first, conditions, sends)


def _slow(conditions: Conditions) -> bool:
    links = conditions.links.values()
    return bool(conditions.ports) or any(link.delay or link.bandwidth < math.inf for link in links)


def kept_in_words(default: Plan | None) -> str:
    """Explain in a sentence why the default is no plan of policy warmup; empty where it is one."""
    if default is None:
        return "Megatron refuses this shape, so --adaptra has nothing to run"
    budgets = default.conditions.activation_budget
    if any(peak > most + 1e-9 for peak, most in zip(default.peak_in_flight, budgets, strict=True)):
        most = f"{max(default.peak_in_flight):g} microbatches"
        return f"--adaptra does not keep to this budget with several chunks: it holds {most}"
    if default.schedule.policy == "warmup":
        return ""
    if not _slow(default.conditions):
        return f"while links are healthy --adaptra stays with {default.schedule.policy}"
    gain = f"{100 * RULE.min_gain:g} %"
    return (
        f"--adaptra stays with {default.schedule.policy} here: a plan of policy warmup would not "
        f"save {gain} of the iteration (--adaptra-min-gain)"
    )
