"""One rank of test_gradients.py: small models whose gradients Megatron or a plan reduces.

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
from megatron_adaptra.adapter.step.gradients import GradientReduction  # noqa: E402
from megatron_adaptra.config import AdaptraConfig  # noqa: E402
from megatron_adaptra.plan.collectives.choice import Choice  # noqa: E402
from megatron_adaptra.plan.collectives.direct import direct  # noqa: E402
from megatron_adaptra.plan.collectives.sharded import direct_reduce_scatter  # noqa: E402
from megatron_adaptra.runtime.all_reduce import group  # noqa: E402

SMALL: dict[str, Any] = {"microbatches": 2, "hidden": 32, "seq_length": 32, "layers": 2}
WAYS = {
    "direct": ("direct", ""), "late": ("direct", "1"), "gloo": ("direct", "1"),
    "stragglar": ("stragglar", "1"), "file": ("plan.txt", ""), "half": ("half.txt", ""),
    "auto": ("auto", ""), "voted": ("auto", ""),
}  # fmt: skip
OWNERS = {ranks: Choice(ranks, "direct", 2, (1,) * ranks) for ranks in (2, 4)}
# What is trained, and the ways in which its gradients are reduced.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "replicas": (
        {"stages": 1}, ("direct", "late", "gloo", "stragglar", "file", "half", "auto", "voted"),
    ),
    "overlap": ({"stages": 1, "overlap_reduce": True}, ("direct", "stragglar", "auto", "voted")),
    "bf16": (
        {"stages": 1, "precision": "bf16", "overlap_reduce": True}, ("direct", "late", "stragglar")
    ),
    "pipelines": ({"stages": 2}, ("direct", "gloo", "stragglar", "file")),
    "average": ({"stages": 1, "average": True}, ("direct", "late", "stragglar")),
    "experts": (
        {"stages": 1, "experts": 4, "expert_parallel": 2, "overlap_reduce": True},
        ("direct", "late", "stragglar", "auto", "voted"),
    ),
}  # fmt: skip


def train(shape: gpt.GPTShape, dataset: Any) -> dict[str, Any]:
    arm, losses, norms = gpt.Arm.build(shape, dataset), [], []
    for _ in range(2):  # the second with buffers that were used before
        arm.begin()
        losses += [loss.item() for loss in arm.forward_backward(gpt.forward_backward_function())]
        norms.append(float(arm.optimizer.step()[1]))
        arm.end()
    return {"losses": losses, "norms": norms, "parameters": arm.digest()}


def counted() -> Counter[int]:
    """How many all-reduces have begun by plan, by the number of ranks."""
    calls: Counter[int] = Counter()
    begun = GradientReduction._begun

    def count(self: Any, goal: Any, whole: Any, op: Any, group: Any) -> bool:
        ours = begun(self, goal, whole, op, group)
        calls.update([group.size()] * ours)
        return ours

    GradientReduction._begun = count  # type: ignore[method-assign]
    return calls


def main() -> None:
    prefix = begin(Path(sys.argv[1]))
    if dist.get_rank() == 0:
        (Path(sys.argv[1]) / "plan.txt").write_text(direct([3, 1, 1, 0], 5).text())
        (Path(sys.argv[1]) / "half.txt").write_text(direct_reduce_scatter(4).text())
    dist.barrier()
    calls = counted()
    (target,) = PATCHES["gradients"].targets
    owner, name = find(target)
    native = vars(owner)[name]
    case = sys.argv[2]
    settings, ways = CASES[case]
    shape = gpt.GPTShape(**SMALL, **settings)
    gpt.initialize(shape, timeout=60)
    dataset = gpt.build_dataset(prefix, shape, 32)
    summed = replace(shape, average=False)  # gloo has no average
    row: dict[str, Any] = {"case": case, "native": train(summed, dataset)}
    for way in ways:
        algorithm, late = WAYS[way]
        calls.clear()
        transport = "gloo" if way == "gloo" else "auto"
        if algorithm.endswith(".txt"):
            algorithm = str(Path(sys.argv[1]) / algorithm)
        config = AdaptraConfig(
            allreduce=algorithm, late_ranks=late, transport=transport, timeout=60.0
        )
        with pytest.MonkeyPatch.context() as patched:
            if way == "voted":  # as if it had been voted on
                patched.setattr(group, "Choice", lambda ranks, sharded: OWNERS[ranks])
            activation = activate(config)
            row[way] = {**train(shape, dataset), "calls": dict(calls)}
            activation.undo()
        assert vars(owner)[name] is native
    show("CASE", of_all_ranks(row))
    dist.barrier()


if __name__ == "__main__":
    main()
