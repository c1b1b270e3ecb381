"""One rank of test_gradients.py: small models whose gradients Megatron or a plan reduces.

Prints a JSON line, from rank 0: of all ranks. Arguments: a folder for the dataset, and a case.
"""

from __future__ import annotations

from typing import Any

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

from ways_by_plan import Cases, counted, show_case, trained  # noqa: E402

from megatron_adaptra.adapter.baseline import gpt  # noqa: E402
from megatron_adaptra.adapter.step.gradients import GradientReduction  # noqa: E402
from megatron_adaptra.plan.collectives.choice import Choice  # noqa: E402
from megatron_adaptra.plan.collectives.direct import direct  # noqa: E402
from megatron_adaptra.plan.collectives.sharded import direct_reduce_scatter  # noqa: E402

PLANS = {"plan.txt": direct([3, 1, 1, 0], 5), "half.txt": direct_reduce_scatter(4)}
WAYS = {
    "direct": ("direct", ""), "late": ("direct", "1"), "gloo": ("direct", "1"),
    "stragglar": ("stragglar", "1"), "file": ("plan.txt", ""), "half": ("half.txt", ""),
    "auto": ("auto", ""), "voted": ("auto", ""),
}  # fmt: skip
OWNERS = {ranks: Choice(ranks, "direct", 2, (1,) * ranks) for ranks in (2, 4)}
# What is trained, and the ways in which its gradients are reduced.
CASES: Cases = {
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


def train(case: str, shape: gpt.GPTShape, dataset: Any) -> dict[str, Any]:
    return trained(gpt.Arm.build(shape, dataset), 2)


def main() -> None:
    calls = counted(GradientReduction, lambda goal, group: group.size())
    show_case("gradients", CASES, WAYS, PLANS, calls, lambda ranks, sharded: OWNERS[ranks], train)


if __name__ == "__main__":
    main()
