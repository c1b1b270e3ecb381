"""What test_schedules.py trains: models, and the schedules that they are trained under."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

from pairwise import Row, cover, pairs, rows

from megatron_adaptra.adapter.baseline.shape import GPTShape
from megatron_adaptra.ir.conditions import Conditions, LinkState
from megatron_adaptra.ir.schedule import Schedule, warmup_line
from megatron_adaptra.plan import make_plan
from megatron_adaptra.plan.pipeline.fixed import interleaved_line

# How it is run: by the executor under a policy, or by Megatron's own functions, with its warmup
# and with deeper ones.
POLICIES = ("1f1b", "adaptive", "zb-h1", "zb-h2", "interleaved")
NATIVE = ("native", "stock interleaved", *(f"native interleaved {i}" for i in range(3)))


@dataclass(frozen=True)
class Case:
    """`schedule`: to run in place of the policy's own, in text form."""

    name: str
    shape: GPTShape
    policy: str = "1f1b"
    recompute: bool = False
    schedule: str = ""
    engine: str = "executor"

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, data: dict[str, Any]) -> Case:
        return cls(**{**data, "shape": GPTShape(**data["shape"])})


# A layer per stage and chunk; two for two stages in float32, and for experts, as Megatron counts
# those of the first model that a process trains.
Shape = partial(GPTShape, microbatches=8, layers=4, hidden=32, seq_length=16)
_two = partial(Shape, 2, layers=2, microbatches=6)  # two stages
# Layout -> ranks, and what is trained there.
LAYOUTS: dict[str, tuple[int, dict[str, GPTShape]]] = {
    "pp2": (2, {
        "fp32": _two(layers=4),
        "bf16": _two(precision="bf16"),
        "experts": _two(experts=4, layers=4),
        "no dropout": _two(dropout=0.0),
    }),
    "pp3": (3, {
        "fp32": Shape(3, layers=3, microbatches=6),
    }),
    "pp4": (4, {
        "fp32": Shape(4),
        "bf16": Shape(4, precision="bf16"),
        "fp16": Shape(4, precision="fp16"),
        "experts": Shape(4, experts=4, layers=8),
        "untied": Shape(4, tied=False),
        "fused": Shape(4, fused=True),
        "two microbatches": Shape(4, microbatches=2),
        "one microbatch": Shape(4, microbatches=1),
    }),
    "dp2pp2": (4, {
        "fp32": _two(),
        "buckets": _two(overlap_reduce=True),
        "distributed": _two(distributed_optimizer=True),
        "distributed bf16": _two(distributed_optimizer=True, precision="bf16"),
        "experts": _two(experts=4, layers=4),
    }),
    "tp2pp2": (4, {
        "fp32": _two(tensor_parallel=2),
        "bf16": _two(tensor_parallel=2, precision="bf16"),
    }),
}  # fmt: skip


@cache
def planned(stages: int, microbatches: int, recompute: bool) -> str:
    """An adaptive plan for a slow last link, with halves of backwards, in little memory."""
    even = (0.01,) * stages
    slow = dict.fromkeys([(stages - 2, stages - 1), (stages - 1, stages - 2)], LinkState(0.05))
    budget = (float(stages),) * stages
    conditions = Conditions(
        microbatches, even, even, even, slow, activation_budget=budget, recompute=recompute
    )
    return make_plan(conditions).schedule.text()


AXES = {
    "layout": tuple(LAYOUTS),
    "shape": tuple(dict.fromkeys(name for _, shapes in LAYOUTS.values() for name in shapes)),
    "schedule": (*POLICIES, *NATIVE),
    "recompute": (False, True),
}


def possible(row: Row) -> bool:
    """Whether there is such a case. Chunks need a multiple of the stages as microbatches."""
    shape = LAYOUTS[row["layout"]][1].get(row["shape"])
    schedule, recompute = row["schedule"], row["recompute"]
    if shape is None or (recompute and schedule in NATIVE):
        return False
    if recompute and shape.microbatches == 1:
        return False  # its backward follows at once: there is nothing to recompute
    if "interleaved" in schedule and shape.microbatches % shape.stages:
        return False
    if schedule == "adaptive" and shape.microbatches < shape.stages:
        return False  # the plan would be 1F1B
    if schedule in NATIVE[1:]:
        return row["layout"] in ("pp2", "pp4") and row["shape"] in ("fp32", "bf16")
    return True


@cache  # adaptive plans take their time
def chosen(most: str) -> list[tuple[str, Case]]:
    """Layout and case: "all", or those in which every pair of values is, or each "value" once."""
    found = list(rows(AXES, possible))
    if most != "all":
        found = cover(found, pairs if most == "pairs" else lambda row: set(row.items()))
    return [(row["layout"], case(row)) for row in found]


def matrix(layout: str) -> list[Case]:
    """A layout's cases of our executor, for scripts/gpu_check.sh."""
    axes = {**AXES, "layout": (layout,), "schedule": POLICIES}
    return [case(row) for row in rows(axes, possible)]


def case(row: Row) -> Case:
    shape: GPTShape = LAYOUTS[row["layout"]][1][row["shape"]]
    schedule, recompute = row["schedule"], row["recompute"]
    title = f"{row['layout']} {row['shape']}, {schedule}{', recompute' if recompute else ''}"
    stages, count = shape.stages, shape.microbatches
    chunked = replace(shape, chunks=2, layers=2 * shape.stages)
    if schedule == "stock interleaved":
        # Before 0.18 stock Megatron would send garbage here: the plugin has it run otherwise.
        overlapped = replace(chunked, overlapped=True)
        return Case(title, overlapped, "interleaved", engine="stock")
    if schedule.startswith("native interleaved"):
        text = deeper_interleaved(stages, count, int(schedule[-1]))
        return Case(title, chunked, "interleaved", False, text, "native")
    if schedule == "native":
        lines = tuple(warmup_line(min(stages - s + 2, count), count) for s in range(stages))
        text = Schedule(lines, count, policy="1f1b", why="deeper").text()
        return Case(title, shape, "1f1b", False, text, "native")
    if schedule == "interleaved":
        return Case(title, chunked, schedule, recompute)
    if schedule == "adaptive":
        return Case(title, shape, "1f1b", recompute, planned(stages, count, recompute))
    return Case(title, shape, schedule, recompute)


def deeper_interleaved(stages: int, microbatches: int, which: int) -> str:
    """Not much deeper: what the first stage needs for a second chunk comes from the last stage,
    which cannot go on without gradients."""
    extra = [(0,) * stages, (2, *(1,) * (stages - 2), 0), (3, *(1,) * (stages - 1))][which]
    order = tuple(
        interleaved_line(s, stages, microbatches, 2, stages, extra[s]) for s in range(stages)
    )
    return Schedule(order, microbatches, 2, "interleaved", "deeper").text()
