"""One rank of test_shards.py: small models with the distributed optimizer, by Megatron or by plan.

Prints a JSON line, from rank 0: of all ranks. Arguments: a folder for the dataset, and a case.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rank_of_job import begin, of_all_ranks, show  # noqa: E402

from megatron_adaptra.adapter.baseline import gpt  # noqa: E402
from megatron_adaptra.adapter.compat.patch_attr import find  # noqa: E402
from megatron_adaptra.adapter.compat.patches import PATCHES  # noqa: E402
from megatron_adaptra.adapter.entry.activate import activate  # noqa: E402
from megatron_adaptra.adapter.step.sharded_gradients import ShardedReduction  # noqa: E402
from megatron_adaptra.config import AdaptraConfig  # noqa: E402
from megatron_adaptra.ir.collective import Goal  # noqa: E402
from megatron_adaptra.plan.collectives.choice import Choice  # noqa: E402
from megatron_adaptra.plan.collectives.direct import direct  # noqa: E402
from megatron_adaptra.plan.collectives.sharded import (  # noqa: E402
    direct_reduce_scatter,
    ring_all_gather,
)
from megatron_adaptra.runtime.all_reduce import group  # noqa: E402

SMALL: dict[str, Any] = {
    "microbatches": 2, "hidden": 32, "seq_length": 32, "layers": 2, "distributed_optimizer": True,
}  # fmt: skip
PLANS = {
    "scatter.txt": direct_reduce_scatter(4, 3), "gather.txt": ring_all_gather(4, 2),
    "sums.txt": direct([1] * 4, 2),
}  # fmt: skip
# What is trained, and the ways in which its shards are reduced and gathered.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "overlap": ({"stages": 1}, ("direct", "again", "gloo", "auto", "voted", *PLANS)),
    "gather": ({"stages": 1, "overlap_gather": True}, ("direct", "gather.txt", "auto", "voted")),
    "in turn": ({"stages": 1}, ("direct", "inactive")),
    "bf16": ({"stages": 1, "precision": "bf16", "overlap_gather": True}, ("direct", "gloo")),
    "pipelines": ({"stages": 2, "overlap_gather": True}, ("direct", "scatter.txt")),
    "native": ({"stages": 1}, ("stragglar",)),
    "instances": (
        {"stages": 1, "instances": 2}, ("direct", "again", "gloo", "auto", "voted", "late"),
    ),
    "instances in turn": ({"stages": 1, "instances": 2, "average": True}, ("direct",)),
    "experts": (
        {"stages": 1, "experts": 4, "expert_parallel": 2, "overlap_gather": True},
        ("direct", "auto", "voted"),
    ),
    "forced": ({"stages": 1}, ("direct",)),
    "forced instances": ({"stages": 1, "instances": 2}, ("direct",)),
}  # fmt: skip


def train(case: str, shape: gpt.GPTShape, dataset: Any) -> dict[str, Any]:
    arm, losses, norms = gpt.Arm.build(shape, dataset), [], []
    if case.endswith("in turn"):
        for model in arm.models:
            model.ddp_config.overlap_grad_reduce = False
        arm.config.grad_sync_func = None
    for _ in range(3):  # the later ones with buffers that were used before
        arm.begin()
        function = gpt.forward_backward_function()
        if case.startswith("forced"):
            losses += [loss.item() for loss in arm.forward_backward(forced(arm, function))]
        else:
            losses += [loss.item() for loss in arm.forward_backward(function)]
        norms.append(float(arm.optimizer.step()[1]))
        arm.end()
    if shape.overlap_gather:  # the last parameters are on their way
        for model in arm.models:
            model.disable_forward_pre_hook()
    return {"losses": losses, "norms": norms, "parameters": arm.digest()}


def forced(arm: gpt.Arm, function: Any) -> Any:
    """As with `--save-wgrads-interval`: gradients are all-reduced in that iteration."""

    def call(**arguments: Any) -> Any:
        for model in arm.models:
            model.force_all_reduce = True
        return function(**arguments, force_all_reduce=True)

    return call


def voted(ranks: int, sharded: bool) -> Choice:
    return Choice(ranks, "direct", 2, () if sharded else (1,) * ranks, sharded=sharded)


def counted() -> Counter[str]:
    """How many collectives have begun by plan, by goal."""
    calls: Counter[str] = Counter()
    begun = ShardedReduction._begun

    def count(self: Any, goal: Goal, whole: Any, op: Any, group: Any) -> bool:
        ours = begun(self, goal, whole, op, group)
        calls.update([goal.value] * ours)
        return ours

    ShardedReduction._begun = count  # type: ignore[method-assign]
    return calls


def main() -> None:
    prefix = begin(Path(sys.argv[1]))
    if dist.get_rank() == 0:
        for name, plan in PLANS.items():
            (Path(sys.argv[1]) / name).write_text(plan.text())
    dist.barrier()
    calls = counted()
    targets = [find(target) for target in PATCHES["shards"].targets]
    before = [vars(owner)[name] for owner, name in targets]
    case = sys.argv[2]
    settings, ways = CASES[case]
    shape = gpt.GPTShape(**SMALL, **settings)
    gpt.initialize(shape, timeout=60)
    dataset = gpt.build_dataset(prefix, shape, 32)
    summed = replace(shape, average=False)  # gloo has no average
    row: dict[str, Any] = {"case": case, "native": train(case, summed, dataset)}
    for way in ways:
        algorithm = {"stragglar": way, "auto": way, "voted": "auto"}.get(way, "direct")
        if way in PLANS:
            algorithm = str(Path(sys.argv[1]) / way)
        calls.clear()
        config = AdaptraConfig(
            allreduce=algorithm,
            late_ranks="1" if way in ("stragglar", "late") else "",
            transport="gloo" if way == "gloo" else "auto",
            timeout=60.0,
        )
        with pytest.MonkeyPatch.context() as patched:
            if way == "voted":  # as if it had been voted on
                patched.setattr(group, "Choice", voted)
            activation = activate(config)
            for one in activation.reductions:
                one.active = way != "inactive"
            row[way] = {**train(case, shape, dataset), "calls": dict(calls)}
            activation.undo()
        assert [vars(owner)[name] for owner, name in targets] == before
    show("CASE", of_all_ranks(row))
    dist.barrier()


if __name__ == "__main__":
    main()
