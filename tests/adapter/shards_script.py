"""One rank of test_shards.py: small models with the distributed optimizer, by Megatron or by plan.

Prints a JSON line, from rank 0: of all ranks. Arguments: a folder for the dataset, and a case.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from megatron_adaptra.adapter.baseline import cpu

cpu.install()

from ways_by_plan import Cases, counted, measuring, show_case, trained  # noqa: E402

from megatron_adaptra.adapter.baseline import gpt  # noqa: E402
from megatron_adaptra.adapter.step.sharded_gradients import ShardedReduction  # noqa: E402
from megatron_adaptra.plan.collectives.choice import Choice  # noqa: E402
from megatron_adaptra.plan.collectives.direct import direct  # noqa: E402
from megatron_adaptra.plan.collectives.sharded import (  # noqa: E402
    direct_reduce_scatter,
    ring_all_gather,
)

PLANS = {
    "scatter.txt": direct_reduce_scatter(4, 3), "gather.txt": ring_all_gather(4, 2),
    "sums.txt": direct([1] * 4, 2),
}  # fmt: skip
WAYS = {
    **dict.fromkeys(("direct", "again", "gloo", "inactive"), ("direct", "")),
    "late": ("direct", "1"), "stragglar": ("stragglar", "1"), "auto": ("auto", ""),
    "voted": ("auto", ""), **{name: (name, "") for name in PLANS},
}  # fmt: skip
# What is trained, and the ways in which its shards are reduced and gathered.
CASES: Cases = {
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
    arm = gpt.Arm.build(replace(shape, distributed_optimizer=True), dataset)
    if case.endswith("in turn"):
        for model in arm.models:
            model.ddp_config.overlap_grad_reduce = False
        arm.config.grad_sync_func = None
    if case.startswith("forced"):
        return trained(arm, 3, partial(forced, arm))
    found = trained(arm, 3)
    for one in measuring():
        sharded = one.value.choice.sharded
        assert one._expected_gathers or not sharded, "it knows when its shards are gathered"
        hides = sharded and shape.overlap_gather
        assert bool(one._hides) == hides, "it knows what forwards hide"
    return found


def forced(arm: gpt.Arm, function: Any) -> Any:
    """As with `--save-wgrads-interval`: gradients are all-reduced in that iteration."""

    def call(**arguments: Any) -> Any:
        for model in arm.models:
            model.force_all_reduce = True
        return function(**arguments, force_all_reduce=True)

    return call


def voted(ranks: int, sharded: bool) -> Choice:
    return Choice(ranks, "direct", 2, () if sharded else (1,) * ranks, sharded=sharded)


def main() -> None:
    calls = counted(ShardedReduction, lambda goal, group: goal.value)
    show_case("shards", CASES, WAYS, PLANS, calls, voted, train)


if __name__ == "__main__":
    main()
