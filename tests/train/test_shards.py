"""The distributed optimizer's shards by plan: trained as by Megatron, up to summation's order."""

from __future__ import annotations

import types
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from test_gradients import trained

from megatron_adaptra.ir.collective import Goal
from megatron_adaptra.plan.reductions.builders import direct_reduce_scatter

QUICK = ("overlap", "gather")
SCATTER, GATHER, SUMS = "reduce-scatter", "all-gather", "all-reduce"
ALIKE = {  # which ranks have the same parameters
    "overlap": [{0, 1, 2, 3}],
    "gather": [{0, 1, 2, 3}],
    "bf16": [{0, 1, 2, 3}],
    "pipelines": [{0, 1}, {2, 3}],
    "instances": [{0, 1, 2, 3}],
    "instances in turn": [{0, 1, 2, 3}],
    "experts": [{0, 2}, {1, 3}],
}


@pytest.mark.timeout(700)
def test_losses_are_those_of_megatron(pytestconfig: pytest.Config) -> None:
    """A plan in a file does what its goal is; what none does is left to Megatron."""
    found, text = trained("shards", *(QUICK if pytestconfig.getoption("--quick") else ()))
    for case, rows in found.items():
        several = case.startswith("instances")  # each has all shards, which are added up
        for row in rows:
            native, ours = row["native"], row["direct"]
            calls = ours["calls"]
            if case.startswith("forced"):  # an all-reduce, of which each rank has all sums
                assert set(calls) == ({SUMS, GATHER} if "instances" in case else {GATHER})
                assert bits(ours) == bits(native), case
                continue
            assert min(calls[SCATTER], calls[GATHER]) > 0
            assert calls.get(SUMS, 0) == (calls[SCATTER] if several else 0)
            close = 1e-2 if case == "bf16" else 1e-5
            assert ours["losses"] == pytest.approx(native["losses"], rel=close), case
            assert ours["norms"] == pytest.approx(native["norms"], rel=close), case
            for way in {"again", "gloo", "late"}.intersection(row):  # whatever carries the bits
                assert row[way] == ours, (case, way)
            if "voted" in row:
                assert row["voted"] == ours, case
            for way in {"auto", "inactive", "stragglar", "sums.txt"}.intersection(row):
                assert row[way] == {**native, "calls": {}}, (case, way)
            files = {
                "overlap": ("scatter.txt", SCATTER, ours),
                "gather": ("gather.txt", GATHER, native),
            }
            if case in files:
                way, goal, like = files[case]
                assert set(row[way]["calls"]) == {goal}
                assert bits(row[way]) == bits(like)
            if case in ("pipelines", "instances"):  # of two each: one order
                assert bits(ours) == bits(native)
        for some in ALIKE.get(case, ()):
            assert len({rows[rank]["direct"]["parameters"] for rank in some}) == 1, case
    assert ("scatter.txt is for 4 ranks, here is 2" in text) == ("pipelines" in found)
    for line in (
        "parameters are gathered by Megatron: the plan of",
        "scatter.txt is of another goal: reduce-scatter",
        "sums.txt is of another goal: all-reduce",
    ):
        assert line in text
    for line in (
        "gradients are reduced by Megatron: stragglar has no reduce-scatter",
        "parameters are gathered by Megatron: stragglar has no all-gather",
    ):
        assert text.count(line) == 1  # at rank 0


def bits(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "calls"}


class Group:
    """What is looked at of torch's before anything starts."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


class Buckets(types.SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def buckets_of(ranks: int = 4, data: torch.Tensor | None = None, **settings: Any) -> Any:
    """A group of one bucket, with what is looked at before anything starts."""
    data = torch.ones(8) if data is None else data
    return Buckets(
        ddp_config=types.SimpleNamespace(**{"num_distributed_optimizer_instances": 1, **settings}),
        buckets=[types.SimpleNamespace(grad_data=data, param_data=data)],
        intra_distributed_optimizer_instance_group=Group(ranks),
        inter_distributed_optimizer_instance_group=Group(2),
    )


def why_not(goal: Goal, buckets: Any, allreduce: str = "direct", given: Any = None) -> str:
    """What is logged; "" where a plan does it."""
    from megatron_adaptra.adapter.step.gradients import ShardedReduction

    sharded: Any = ShardedReduction.__new__(ShardedReduction)
    sharded._config, sharded._given = types.SimpleNamespace(allreduce=allreduce), given
    ours: Any = object()
    sharded._open = lambda *_: ours
    sharded._groups, sharded._found, lines = {}, WeakKeyDictionary(), list[str]()
    sharded._say = lines.append
    between = goal is Goal.ALL_REDUCE
    find = sharded._between_instances if between else partial(sharded._in_instance, goal)
    found = find(buckets)
    assert found is (None if lines else ours)
    if not lines:
        buckets.buckets = [types.SimpleNamespace()]  # there is no second look at what is in them
        assert find(buckets) is ours
    return "".join(lines)


FP32 = {"reduce_scatter_with_fp32_accumulation": True}
MXFP8 = {"reuse_grad_buf_for_mxfp8_param_ag": True}


@pytest.mark.parametrize(
    ("settings", "reduces", "gathers"),
    [
        ({}, "", ""),
        ({"num_distributed_optimizer_instances": 2}, "", ""),
        (FP32, "adds in fp32 by a way of its own", ""),
        (MXFP8, "", "share their memory with gradients"),
        ({"ranks": 1}, "needs 2 ranks, here is 1", "needs 2 ranks, here is 1"),
        ({"data": torch.ones(8, device="meta")}, "on meta, not dense", "on meta, not dense"),
        ({"data": torch.ones(8).int()}, "torch.int32 with strides", "torch.int32 with strides"),
        ({"data": torch.ones(8)[::2]}, r"with strides (2,)", "with strides (2,)"),
    ],
    ids=lambda one: next(iter(one), "ours") if isinstance(one, dict) else "",
)
def test_why_megatron_does_it(settings: dict[str, Any], reduces: str, gathers: str) -> None:
    for goal, text in ((Goal.REDUCE_SCATTER, reduces), (Goal.ALL_GATHER, gathers)):
        reason = why_not(goal, buckets_of(**settings))
        assert text in reason
        assert bool(text) == bool(reason)


def test_why_megatron_adds_up_what_its_instances_have() -> None:
    several = {"num_distributed_optimizer_instances": 2}
    assert why_not(Goal.ALL_REDUCE, buckets_of(**several)) == ""
    whose = "gradients are reduced between optimizer instances by Megatron: "
    assert why_not(Goal.ALL_REDUCE, buckets_of(**several), "stragglar") == (
        f"{whose}stragglar needs 4 ranks, here is 2"
    )
    found = why_not(Goal.ALL_REDUCE, buckets_of(**several), "it.txt", direct_reduce_scatter(2))
    assert found == f"{whose}the plan of it.txt is of another goal: reduce-scatter"


def test_why_megatron_does_it_instead_of_a_plan_in_a_file() -> None:
    scatter, plan = Goal.REDUCE_SCATTER, direct_reduce_scatter(4)
    assert why_not(scatter, buckets_of(), "it.txt", plan) == ""
    reason = "the plan of it.txt is for 4 ranks, here is 3"
    assert why_not(scatter, buckets_of(3), "it.txt", plan).endswith(f"Megatron: {reason}")
    reason = "the plan of it.txt is of another goal: reduce-scatter"
    assert why_not(Goal.ALL_GATHER, buckets_of(), "it.txt", plan).endswith(f"Megatron: {reason}")
