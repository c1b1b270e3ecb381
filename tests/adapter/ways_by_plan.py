"""Trains a small model by Megatron, and once in each of the ways in which a plan reduces for it.

Import it after `cpu.install()`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch.distributed as dist
from rank_of_job import begin, of_all_ranks, show

from megatron_adaptra.adapter.baseline import gpt
from megatron_adaptra.adapter.compat.patch_attr import find
from megatron_adaptra.adapter.compat.patches import PATCHES
from megatron_adaptra.adapter.entry import activate
from megatron_adaptra.adapter.step.planned_groups import PlannedGroup
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.ir.collective import Goal
from megatron_adaptra.plan.collectives.choice import Choice
from megatron_adaptra.runtime.all_reduce import group
from megatron_adaptra.runtime.all_reduce.group import AdaptiveAllReduce

SMALL: dict[str, Any] = {"microbatches": 2, "hidden": 32, "seq_length": 32, "layers": 2}
# Of cases by name: what is trained beside SMALL, and in which ways.
Cases = Mapping[str, tuple[dict[str, Any], tuple[str, ...]]]
Function = Callable[..., Any]  # Megatron's forward_backward


class Plan(Protocol):
    def text(self) -> str: ...


def counted(reduction: type[Any], key: Callable[[Goal, Any], Any]) -> Counter[Any]:
    """How many collectives of `reduction` have begun by plan, by `key` of a goal and a group."""
    calls: Counter[Any] = Counter()
    begun = reduction._begun

    def count(self: Any, goal: Goal, whole: Any, op: Any, group: Any) -> bool:
        ours = bool(begun(self, goal, whole, op, group))
        calls.update([key(goal, group)] * ours)
        return ours

    reduction._begun = count
    return calls


def trained(
    arm: gpt.Arm, iterations: int, around: Callable[[Function], Function] = lambda native: native
) -> dict[str, Any]:
    """By so many `iterations` of `arm`, whose forward_backward is one `around` Megatron's."""
    losses, norms = [], []
    for _ in range(iterations):  # those after the first with buffers that were used before
        arm.begin()
        function = around(gpt.forward_backward_function())
        losses += [loss.item() for loss in arm.forward_backward(function)]
        norms.append(float(arm.optimizer.step()[1]))
        arm.end()
    assert all(one._reported for one in measuring()), "also what overlaps with a backward is timed"
    if arm.shape.overlap_gather:  # the last parameters are on their way
        for model in arm.models:
            model.disable_forward_pre_hook()
    return {"losses": losses, "norms": norms, "parameters": arm.digest()}


def measuring() -> Iterator[AdaptiveAllReduce]:
    """What measures reductions here now."""
    for activation in activate._active:
        for reduction in activation.reductions:
            groups = (one for one in reduction._groups.values() if isinstance(one, PlannedGroup))
            yield from (one.adaptive for one in groups if one.adaptive is not None)


def show_case(
    patch: str,
    cases: Cases,
    ways: Mapping[str, tuple[str, str]],
    plans: Mapping[str, Plan],
    calls: Counter[Any],
    voted: Callable[..., Choice],
    train: Callable[[str, gpt.GPTShape, Any], dict[str, Any]],
) -> None:
    """The main program: rank 0 shows what all ranks have found in the case that sys.argv names.

    Each of `ways`: what reduces, and which ranks are late, as in AdaptraConfig; a name of `plans`
    stands for a file with that plan. `gloo` carries messages by torch, `voted` runs as if `voted`
    had been voted on, `inactive` has all plans switched off. `patch`: undone after each.
    """
    folder, case = Path(sys.argv[1]), sys.argv[2]
    prefix = begin(folder)
    if dist.get_rank() == 0:
        for name, plan in plans.items():
            (folder / name).write_text(plan.text())
    dist.barrier()
    targets = [find(target) for target in PATCHES[patch].targets]
    native = [vars(owner)[name] for owner, name in targets]
    settings, of_case = cases[case]
    shape = gpt.GPTShape(**SMALL, **settings)
    gpt.initialize(shape, timeout=60)
    dataset = gpt.build_dataset(prefix, shape, 32)
    summed = replace(shape, average=False)  # gloo has no average
    row: dict[str, Any] = {"case": case, "native": train(case, summed, dataset)}
    for way in of_case:
        allreduce, late = ways[way]
        config = AdaptraConfig(
            allreduce=str(folder / allreduce) if allreduce in plans else allreduce,
            late_ranks=late,
            transport="gloo" if way == "gloo" else "auto",
            timeout=60.0,
        )
        calls.clear()
        with pytest.MonkeyPatch.context() as patched:
            if way == "voted":
                patched.setattr(group, "Choice", voted)
            activation = activate.activate(config)
            for one in activation.reductions:
                one.active = way != "inactive"
            row[way] = {**train(case, shape, dataset), "calls": dict(calls)}
            activation.undo()
        assert [vars(owner)[name] for owner, name in targets] == native
    show("CASE", of_all_ranks(row))
    dist.barrier()
