"""Planners: Conditions -> Schedule. Importing the package registers them."""

from megatron_adaptra.plan.pipeline import adaptive as _adaptive
from megatron_adaptra.plan.pipeline import fixed as _fixed
from megatron_adaptra.plan.pipeline import warmup as _warmup
from megatron_adaptra.plan.pipeline.base import PLANNERS, Plan, evaluate, make_plan

del _adaptive, _fixed, _warmup
__all__ = ["PLANNERS", "Plan", "evaluate", "make_plan"]
