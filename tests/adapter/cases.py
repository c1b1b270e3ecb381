"""What test_schedules.py trains: models, and the schedules that they are trained under."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_adaptra.ir.conditions import Conditions, both_ways
from megatron_adaptra.ir.schedule import Schedule
from megatron_adaptra.plan import make_plan
from megatron_adaptra.plan.interleaved import interleaved_line

POLICIES = ("1f1b", "adaptive", "zb-h1", "zb-h2", "interleaved")


@dataclass(frozen=True)
class Case:
    """`shape`: a GPTShape. `schedule`: to run in place of the policy's own, in text form."""

    name: str
    shape: Any
    policy: str = "1f1b"
    recompute: bool = False
    schedule: str = ""
    engine: str = "executor"

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, data: dict[str, Any]) -> Case:
        from megatron_adaptra.adapter.baseline.gpt import GPTShape

        return cls(**{**data, "shape": GPTShape(**data["shape"])})


@dataclass(frozen=True)
class Shape:
    """GPTShape without its imports: cases are made where Megatron is not."""

    stages: int
    chunks: int = 1
    overlapped: bool = False
    tensor_parallel: int = 1
    microbatches: int = 8
    layers: int = 8
    hidden: int = 32
    seq_length: int = 16
    dropout: float = 0.1
    precision: str = "fp32"
    tied: bool = True
    fused: bool = False
    experts: int = 0
    overlap_reduce: bool = False
    distributed_optimizer: bool = False


# Layout -> ranks, and what is trained there.
LAYOUTS: dict[str, tuple[int, dict[str, Shape]]] = {
    "pp2": (2, {
        "fp32": Shape(2),
        "bf16": Shape(2, precision="bf16"),
        "experts": Shape(2, experts=4),
    }),
    "pp4": (4, {
        "fp32": Shape(4),
        "bf16": Shape(4, precision="bf16"),
        "fp16": Shape(4, precision="fp16"),
        "experts": Shape(4, experts=4),
        "untied": Shape(4, tied=False),
        "fused": Shape(4, fused=True),
    }),
    "dp2pp2": (4, {
        "fp32": Shape(2),
        "buckets": Shape(2, overlap_reduce=True),
        "distributed": Shape(2, distributed_optimizer=True),
        "distributed bf16": Shape(2, distributed_optimizer=True, precision="bf16"),
        "experts": Shape(2, experts=4),
    }),
    "tp2pp2": (4, {
        "fp32": Shape(2, tensor_parallel=2),
        "bf16": Shape(2, tensor_parallel=2, precision="bf16"),
    }),
}  # fmt: skip


def planned(stages: int, microbatches: int, recompute: bool) -> str:
    """An adaptive plan for a slow last link, with halves of backwards, in little memory."""
    even = (0.01,) * stages
    slow = both_ways({stages - 2: 0.05})
    budget = (float(stages),) * stages
    conditions = Conditions(
        microbatches, even, even, even, slow, activation_budget=budget, recompute=recompute
    )
    return make_plan(conditions).schedule.text()


def cases_of(layout: str) -> list[Case]:
    native = natively(layout) if layout in ("pp2", "pp4") else ()
    return [*matrix(layout), *native]


def natively(layout: str) -> Iterator[Case]:
    """Megatron's own interleaved schedule over our messages, with its warmup and with deeper ones.

    Not much deeper: what the first stage needs for a second chunk comes from the last stage, which
    cannot go on without gradients.
    """
    _, shapes = LAYOUTS[layout]
    for name in ("fp32", "bf16"):
        shape = replace(shapes[name], chunks=2)
        stages = shape.stages
        extras = [(0,) * stages, (2, *(1,) * (stages - 2), 0), (3, *(1,) * (stages - 1))]
        # Before 0.18 stock Megatron would send garbage here: the plugin has it run otherwise.
        title = f"{layout} {name}, stock interleaved with overlapped messages"
        yield Case(title, replace(shape, overlapped=True), "interleaved", engine="stock")
        for extra in extras:
            order = tuple(
                interleaved_line(s, stages, shape.microbatches, 2, stages, extra[s])
                for s in range(stages)
            )
            schedule = Schedule(order, shape.microbatches, 2, "interleaved", "deeper").text()
            title = f"{layout} {name}, native interleaved + {','.join(map(str, extra))}"
            yield Case(title, shape, "interleaved", False, schedule, "native")


def matrix(layout: str) -> Iterator[Case]:
    """Every policy, with recompute and without, for every shape. Chunks are for interleaved."""
    _, shapes = LAYOUTS[layout]
    for policy in POLICIES:
        for recompute in (False, True):
            for name, shape in shapes.items():
                title = f"{layout} {name}, {policy}{', recompute' if recompute else ''}"
                if policy == "interleaved":
                    yield Case(title, replace(shape, chunks=2), policy, recompute)
                elif policy == "adaptive":
                    text = planned(shape.stages, shape.microbatches, recompute)
                    yield Case(title, shape, "1f1b", recompute, text)
                else:
                    yield Case(title, shape, policy, recompute)
