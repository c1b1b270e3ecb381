"""Planners: Conditions -> Schedule. Importing the package registers them."""

from megatron_adaptra.plan.pipeline import adaptive as _adaptive
from megatron_adaptra.plan.pipeline import warmup as _warmup
from megatron_adaptra.plan.pipeline.base import PLANNERS, Plan, evaluate, make_plan
from megatron_adaptra.plan.pipeline.fixed import baselines as _baselines
from megatron_adaptra.plan.pipeline.fixed import interleaved as _interleaved
from megatron_adaptra.plan.pipeline.fixed import zero_bubble as _zero_bubble

del _adaptive, _baselines, _interleaved, _warmup, _zero_bubble
__all__ = ["PLANNERS", "Plan", "evaluate", "make_plan"]
