"""Planners: Conditions -> Schedule. Importing the package registers them."""

from megatron_adaptra.plan import adaptive as _adaptive
from megatron_adaptra.plan import exact as _exact
from megatron_adaptra.plan import gpipe as _gpipe
from megatron_adaptra.plan import interleaved as _interleaved
from megatron_adaptra.plan import one_f_one_b as _one_f_one_b
from megatron_adaptra.plan import warmup as _warmup
from megatron_adaptra.plan import zero_bubble as _zero_bubble
from megatron_adaptra.plan.base import PLANNERS, Plan, evaluate, make_plan

del _adaptive, _exact, _gpipe, _interleaved, _one_f_one_b, _warmup, _zero_bubble
__all__ = ["PLANNERS", "Plan", "evaluate", "make_plan"]
