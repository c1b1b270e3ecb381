"""Planners: Conditions -> Schedule. Importing the package registers them."""

from megatron_adaptra.plan import adaptive as _adaptive
from megatron_adaptra.plan import one_f_one_b as _one_f_one_b
from megatron_adaptra.plan.base import PLANNERS, Plan, evaluate, make_plan

del _adaptive, _one_f_one_b
__all__ = ["PLANNERS", "Plan", "evaluate", "make_plan"]
