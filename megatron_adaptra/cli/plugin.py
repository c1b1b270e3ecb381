"""What the plugin runs of a planned job: by default, and with which flags another policy."""

from __future__ import annotations

from collections.abc import Callable

from megatron_adaptra.errors import BadInput
from megatron_adaptra.ir.conditions import Conditions
from megatron_adaptra.plan import PLANNERS, Plan, evaluate
from megatron_adaptra.plan.fixed.baselines import first_schedule
from megatron_adaptra.runtime.replan_policy import ReplanPolicy

DEFAULT = "--adaptra"
EXECUTOR = f"{DEFAULT} --adaptra-engine executor"
STOCK = "none: stock Megatron"
NOTHING = "not run in training"
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
    if policy == "warmup":
        return DEFAULT
    if policy == "adaptive" and conditions.chunks == 1:
        return EXECUTOR + " --adaptra-recompute" * conditions.recompute
    if policy in SPLITTING:
        return f"{EXECUTOR} --adaptra-policy {policy}"
    return STOCK if policy in ("1f1b", "interleaved") else NOTHING


def default_plan(conditions: Conditions, sends: str, make: Make) -> Plan | None:
    """What `--adaptra` alone comes to: engine native, policy warmup; None for shapes it refuses.

    A plan is adopted where it saves as much as --adaptra-min-gain; else the job stays with the
    schedule that it begins with. `sends`: eager or rendezvous; `make`: how plans are made.
    """
    try:
        plan = make(conditions, "warmup")
        if conditions.chunks > 1:
            first = PLANNERS["interleaved"](conditions, sends, None)
        else:
            budget = conditions.activation_budget
            first = first_schedule(conditions.stages, conditions.microbatches, budget)
    except BadInput as error:
        if error.field == "--time-limit":
            raise
        return None
    start = evaluate(first, conditions, sends)
    return plan if RULE.gains(plan, start) else start


def kept_in_words(default: Plan | None) -> str:
    """What is unexpected of the default, in a sentence; empty for a plan of policy warmup."""
    if default is None:
        return "Megatron refuses this shape, so --adaptra has nothing to run"
    budgets = default.conditions.activation_budget
    if any(peak > most + 1e-9 for peak, most in zip(default.peak_in_flight, budgets, strict=True)):
        most = f"{max(default.peak_in_flight):g} microbatches"
        return f"--adaptra does not keep to this budget with several chunks: it holds {most}"
    if default.schedule.policy == "warmup":
        return ""
    gain = f"{100 * RULE.min_gain:g} %"
    return (
        f"--adaptra stays with {default.schedule.policy} here: a plan of policy warmup would not "
        f"save {gain} of the iteration (--adaptra-min-gain)"
    )
