"""One rank of test_gradients.py and test_shards.py: trains small models by Megatron, and by plans.

Each case is trained by Megatron, and once in each of the ways in which a plan reduces for it.
Prints a JSON line for each, from rank 0: of all ranks. Arguments: a folder, a key of PARTS, and
names of its cases; all of it where no name is given.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from rank_of_job import begin, of_all_ranks, show  # noqa: E402

from megatron_adaptra.adapter.baseline import gpt  # noqa: E402
from megatron_adaptra.adapter.compat.patch_attr import find  # noqa: E402
from megatron_adaptra.adapter.compat.patches import PATCHES  # noqa: E402
from megatron_adaptra.adapter.entry import activate  # noqa: E402
from megatron_adaptra.adapter.step.gradients import (  # noqa: E402
    GradientReduction,
    ShardedReduction,
)
from megatron_adaptra.adapter.step.planned_groups import PlannedGroup  # noqa: E402
from megatron_adaptra.config import AdaptraConfig  # noqa: E402
from megatron_adaptra.execute.planned import measured  # noqa: E402
from megatron_adaptra.execute.planned.measured import MeasuredReductions  # noqa: E402
from megatron_adaptra.ir.collective import Goal  # noqa: E402
from megatron_adaptra.plan.reductions.builders import (  # noqa: E402
    direct,
    direct_reduce_scatter,
    ring_all_gather,
)
from megatron_adaptra.plan.reductions.choice import Choice  # noqa: E402

Function = Callable[..., Any]  # Megatron's forward_backward
Shape = partial(gpt.GPTShape, microbatches=2, hidden=32, seq_length=32, layers=2)


class Plan(Protocol):
    def text(self) -> str: ...


# What reduces, and which ranks are late, as in AdaptraConfig; a name of a plan stands for a file
# with that. `gloo` carries messages by torch, `voted` runs as if that had been voted on, `inactive`
# has all plans switched off.
WAYS = {
    **dict.fromkeys(("direct", "again", "inactive"), ("direct", "")), "gloo": ("direct", "1"),
    "late": ("direct", "1"), "stragglar": ("stragglar", "1"), "auto": ("auto", ""),
    "voted": ("auto", ""),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What reduces or gathers, and is taken back as `patch`; its plans by files' names; of its
    cases by name, what is trained, and in which ways."""

    patch: str
    reduction: type[Any]
    key: Callable[[Goal, Any], Any]  # by which calls are counted
    plans: Mapping[str, Plan]
    cases: Mapping[str, tuple[gpt.GPTShape, tuple[str, ...]]]
    voted: Callable[[int, bool], Choice]


GRADIENTS = Part(
    "gradients", GradientReduction, lambda goal, group: group.size(),
    {"plan.txt": direct([3, 1, 1, 0], 5), "half.txt": direct_reduce_scatter(4)},
    {
        "replicas": (
            Shape(1),
            ("direct", "late", "gloo", "stragglar", "plan.txt", "half.txt", "auto", "voted"),
        ),
        "overlap": (Shape(1, overlap_reduce=True), ("direct", "stragglar", "auto", "voted")),
        "bf16": (
            Shape(1, precision="bf16", overlap_reduce=True), ("direct", "late", "stragglar")
        ),
        "pipelines": (Shape(2), ("direct", "gloo", "stragglar", "plan.txt")),
        "average": (Shape(1, average=True), ("direct", "stragglar")),
        "experts": (
            Shape(1, experts=4, expert_parallel=2, overlap_reduce=True),
            ("direct", "late", "stragglar", "auto", "voted"),
        ),
    },
    lambda ranks, sharded: Choice(ranks, "direct", 2, (1,) * ranks),
)  # fmt: skip
SHARDS = Part(
    "shards", ShardedReduction, lambda goal, group: goal.value,
    {
        "scatter.txt": direct_reduce_scatter(4, 3), "gather.txt": ring_all_gather(4, 2),
        "sums.txt": direct([1] * 4, 2),
    },
    {
        "overlap": (
            Shape(1),
            ("direct", "again", "gloo", "inactive", "stragglar", "auto", "voted", "scatter.txt",
             "sums.txt"),
        ),
        "gather": (Shape(1, overlap_gather=True), ("direct", "gather.txt", "auto", "voted")),
        "bf16": (Shape(1, precision="bf16", overlap_gather=True), ("direct", "gloo")),
        "pipelines": (Shape(2, overlap_gather=True), ("direct", "scatter.txt")),
        "instances": (
            Shape(1, instances=2), ("direct", "again", "gloo", "auto", "voted", "late"),
        ),
        "instances in turn": (Shape(1, instances=2, average=True), ("direct",)),
        "experts": (
            Shape(1, experts=4, expert_parallel=2, overlap_gather=True),
            ("direct", "auto", "voted"),
        ),
        "forced": (Shape(1), ("direct",)),
        "forced instances": (Shape(1, instances=2), ("direct",)),
    },
    lambda ranks, sharded: Choice(
        ranks, "direct", 2, () if sharded else (1,) * ranks, sharded=sharded
    ),
)  # fmt: skip
PARTS = {one.patch: one for one in (GRADIENTS, SHARDS)}


def counted(part: Part) -> Counter[Any]:
    """How many of its collectives have begun by plan."""
    calls: Counter[Any] = Counter()
    begun = part.reduction._begun

    def count(self: Any, goal: Goal, whole: Any, op: Any, group: Any) -> bool:
        ours = bool(begun(self, goal, whole, op, group))
        calls.update([part.key(goal, group)] * ours)
        return ours

    part.reduction._begun = count
    return calls


def train(part: Part, case: str, shape: gpt.GPTShape, dataset: Any) -> dict[str, Any]:
    """Three iterations: those after the first with buffers that were used before."""
    sharded = part is SHARDS
    arm = gpt.Arm.build(replace(shape, distributed_optimizer=sharded), dataset)
    if case.endswith("in turn"):
        for model in arm.models:
            model.ddp_config.overlap_grad_reduce = False
        arm.config.grad_sync_func = None
    losses, norms = [], []
    for _ in range(3):
        arm.begin()
        function = gpt.forward_backward_function()
        if case.startswith("forced"):
            function = forced(arm, function)
        losses += [loss.item() for loss in arm.forward_backward(function)]
        norms.append(float(arm.optimizer.step()[1]))
        arm.end()
    for one in measuring():
        assert one._now.over, "also what overlaps with a backward is timed"
        if sharded and not case.startswith("forced"):
            scatters = one.value.choice.sharded
            assert one._now.expected_gathers or not scatters, (
                "it knows when its shards are gathered"
            )
            hides = scatters and shape.overlap_gather
            assert bool(one._now.hides) == hides, "it knows what forwards hide"
    if shape.overlap_gather:  # the last parameters are on their way
        for model in arm.models:
            model.disable_forward_pre_hook()
    return {"losses": losses, "norms": norms, "parameters": arm.digest()}


def forced(arm: gpt.Arm, function: Function) -> Function:
    """As with `--save-wgrads-interval`: gradients are all-reduced in that iteration."""

    def call(**arguments: Any) -> Any:
        for model in arm.models:
            model.force_all_reduce = True
        return function(**arguments, force_all_reduce=True)

    return call


def measuring() -> Iterator[MeasuredReductions]:
    """What measures reductions here now."""
    for activation in activate._active:
        for reduction in activation.reductions:
            groups = (one for one in reduction._groups.values() if isinstance(one, PlannedGroup))
            yield from (one.adaptive for one in groups if one.adaptive is not None)


def show_case(part: Part, case: str, folder: Path, prefix: Path, calls: Counter[Any]) -> None:
    """Rank 0 shows what all ranks have found in a `case`; the patch is undone after each way."""
    targets = [find(target) for target in PATCHES[part.patch].targets]
    native = [vars(owner)[name] for owner, name in targets]
    shape, ways = part.cases[case]
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    gpt.initialize(shape, timeout=60)
    dataset = gpt.build_dataset(prefix, shape, 32)
    summed = replace(shape, average=False)  # gloo has no average
    row: dict[str, Any] = {"case": case, "native": train(part, case, summed, dataset)}
    for way in ways:
        allreduce, late = WAYS.get(way, (str(folder / way), ""))
        transport = "gloo" if way == "gloo" else "auto"
        config = AdaptraConfig(
            allreduce=allreduce, late_ranks=late, transport=transport, timeout=60.0
        )
        calls.clear()
        with pytest.MonkeyPatch.context() as patched:
            if way == "voted":
                patched.setattr(measured, "Choice", part.voted)
            activation = activate.activate(config)
            for one in activation.reductions:
                one.active = way != "inactive"
            row[way] = {**train(part, case, shape, dataset), "calls": dict(calls)}
            activation.undo()
        assert [vars(owner)[name] for owner, name in targets] == native
    show("CASE", of_all_ranks(row))


def main() -> None:
    folder, part = Path(sys.argv[1]), PARTS[sys.argv[2]]
    prefix = begin(folder)
    if dist.get_rank() == 0:
        for name, plan in part.plans.items():
            (folder / name).write_text(plan.text())
    dist.barrier()
    calls = counted(part)
    for case in sys.argv[3:] or part.cases:
        show_case(part, case, folder, prefix, calls)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
