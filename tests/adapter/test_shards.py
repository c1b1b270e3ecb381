"""The distributed optimizer's shards by plan: trained as by Megatron, up to summation's order."""

from __future__ import annotations

import functools
import json
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from running import zygote

from megatron_adaptra.adapter.step.sharded_gradients import ShardedReduction
from megatron_adaptra.ir.collective import Goal
from megatron_adaptra.plan.collectives.sharded import direct_reduce_scatter

RANKS = 4
SCATTER, GATHER = "reduce-scatter", "all-gather"


@functools.cache
def trained() -> tuple[dict[str, list[dict[str, Any]]], str]:
    """By case, what each rank has found; and all that was printed."""
    with tempfile.TemporaryDirectory() as folder:
        words = [str(Path(__file__).with_name("shards_script.py")), folder]
        done = zygote(False).run(Path(folder), words, ranks=RANKS, timeout=400)
    assert done.status == 0, done.text[-4000:]
    found = [json.loads(line[5:]) for line in done.texts[0].splitlines() if line[:5] == "CASE "]
    return {rows[0]["case"]: rows for rows in found}, done.text


@pytest.mark.timeout(500)
@pytest.mark.parametrize("case", ["overlap", "gather", "in turn", "bf16", "pipelines"])
def test_losses_are_those_of_megatron(case: str) -> None:
    rows = trained()[0][case]
    for row in rows:
        native, ours = row["native"], row["direct"]
        assert ours["calls"][SCATTER] > 0
        assert ours["calls"][GATHER] > 0
        close = 1e-2 if case == "bf16" else 1e-5
        assert ours["losses"] == pytest.approx(native["losses"], rel=close)
        assert ours["norms"] == pytest.approx(native["norms"], rel=close)
        for way in {"again", "gloo"}.intersection(row):  # the same bits, whatever carries them
            assert row[way] == ours
        if case == "pipelines":  # of two replicas: one order
            assert {**ours, "calls": 0} == {**native, "calls": 0}
    replicas = [{0, 1, 2, 3}] if case != "pipelines" else [{0, 1}, {2, 3}]
    for some in replicas:
        assert len({rows[rank]["direct"]["parameters"] for rank in some}) == 1


def bits(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "calls"}


@pytest.mark.timeout(500)
def test_a_plan_in_a_file_does_what_its_goal_is() -> None:
    found, text = trained()
    for row in found["overlap"]:
        assert bits(row["scatter.txt"]) == bits(row["direct"])
        assert set(row["scatter.txt"]["calls"]) == {SCATTER}
        assert row["sums.txt"] == {**row["native"], "calls": {}}
    for row in found["gather"]:
        assert bits(row["gather.txt"]) == bits(row["native"])
        assert set(row["gather.txt"]["calls"]) == {GATHER}
    assert "parameters are gathered by Megatron: the plan of" in text
    assert "scatter.txt is of another goal: reduce-scatter" in text
    assert "sums.txt is of another goal: all-reduce" in text
    assert "scatter.txt is for 4 ranks, here is 2" in text


@pytest.mark.timeout(500)
def test_what_a_plan_does_not_do_is_left_to_megatron() -> None:
    found, text = trained()
    for row in found["native"]:
        assert row["stragglar"] == {**row["native"], "calls": {}}
    for row in found["forced"]:  # an all-reduce, of which each rank has all sums
        assert set(row["direct"]["calls"]) == {GATHER}
        assert bits(row["direct"]) == bits(row["native"])
    for line in (
        "gradients are reduced by Megatron: stragglar has no reduce-scatter",
        "parameters are gathered by Megatron: stragglar has no all-gather",
    ):
        assert text.count(line) == 1  # at rank 0


def buckets_of(ranks: int = 4, data: torch.Tensor | None = None, **settings: Any) -> Any:
    """A group of one bucket, with what is looked at before anything starts."""
    data = torch.ones(8) if data is None else data
    return types.SimpleNamespace(
        ddp_config=types.SimpleNamespace(**{"num_distributed_optimizer_instances": 1, **settings}),
        buckets=[types.SimpleNamespace(grad_data=data, param_data=data)],
        intra_distributed_optimizer_instance_size=ranks,
    )


def why_not(goal: Goal, buckets: Any, allreduce: str = "direct", given: Any = None) -> str:
    sharded: Any = ShardedReduction.__new__(ShardedReduction)
    sharded._config, sharded._given = types.SimpleNamespace(allreduce=allreduce), given
    reason: str = sharded._not_ours(goal, buckets)
    return reason


FP32 = {"reduce_scatter_with_fp32_accumulation": True}
MXFP8 = {"reuse_grad_buf_for_mxfp8_param_ag": True}


@pytest.mark.parametrize(
    ("settings", "reduces", "gathers"),
    [
        ({}, "", ""),
        ({"num_distributed_optimizer_instances": 2}, "several instances", "several instances"),
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


def test_why_megatron_does_it_instead_of_a_plan_in_a_file() -> None:
    scatter, plan = Goal.REDUCE_SCATTER, direct_reduce_scatter(4)
    assert why_not(scatter, buckets_of(), "it.txt", plan) == ""
    reason = "the plan of it.txt is for 4 ranks, here is 3"
    assert why_not(scatter, buckets_of(3), "it.txt", plan) == reason
    reason = "the plan of it.txt is of another goal: reduce-scatter"
    assert why_not(Goal.ALL_GATHER, buckets_of(), "it.txt", plan) == reason
