"""Which ranks run the same order: by Megatron's own groups, and by what ops are seen to call.

All ranks of a job are played in turn by this process: torch's fake backend talks to nobody.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 8
FP8 = {"fp8": "hybrid", "fp8_recipe": SimpleNamespace(value="delayed")}
EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
GLOBAL = {
    "num_moe_experts": 4, "moe_aux_loss_coeff": [0.0, 0.1],
    "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
}  # fmt: skip
FSDP = SimpleNamespace(ddp_config=SimpleNamespace(use_megatron_fsdp=True))


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    """Imported where these tests run: all processes of pytest-xdist collect them."""
    global closed_groups, mpu, OpWatch, Tie
    from megatron.core import parallel_state as mpu

    from megatron_adaptra.adapter.compat import closed_groups
    from megatron_adaptra.adapter.compat.closed_groups import Tie
    from megatron_adaptra.adapter.pipeline.op_watch import OpWatch


@pytest.fixture
def nobody() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def become(rank: int, ranks: int = RANKS) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


def closed(
    config: dict[str, Any], models: list[Any], **sizes: int
) -> tuple[list[int], set[str], set[str]]:
    """Of each rank the lowest of its group; why groups have several replicas, and why ranks do."""
    own, others, alone = [], [], set[str]()
    for rank in range(RANKS):
        become(rank)
        mpu.initialize_model_parallel(
            pipeline_model_parallel_size=2, create_gloo_process_groups=False, **sizes
        )
        mine = closed_groups.own_ranks()
        theirs = closed_groups.configured(SimpleNamespace(**config), models)
        own += mine
        others += theirs
        alone.add(closed_groups.beyond(mine, theirs))
        mpu.destroy_model_parallel()
    groups, reasons = closed_groups.components(own, others, RANKS)
    return groups, set(reasons.values()), alone


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(
    ("sizes", "config", "models", "groups", "word"),
    [
        ({}, {}, [], [0, 1, 2, 3] * 2, ""),
        ({"tensor_model_parallel_size": 2}, {}, [], [0, 0, 2, 2] * 2, ""),
        ({"context_parallel_size": 4}, FP8, [], [0] * 8, ""),  # of one replica all the same
        ({}, FP8, [], [0] * 8, "FP8"),
        ({"tensor_model_parallel_size": 2}, FP8, [], [0] * 8, "FP8"),
        ({"tensor_model_parallel_size": 2}, {**FP8, "tp_only_amax_red": True}, [],
         [0, 0, 2, 2] * 2, ""),
        ({}, {**FP8, "fp8_recipe": "blockwise"}, [], [0, 1, 2, 3] * 2, ""),
        ({}, {"fp8": None, "fp8_recipe": "delayed"}, [], [0, 1, 2, 3] * 2, ""),
        (EXPERTS, {}, [], [0, 0, 2, 2] * 2, "experts"),
        ({**EXPERTS, "tensor_model_parallel_size": 2}, {}, [], [0, 0, 2, 2] * 2, ""),
        ({}, GLOBAL, [], [0] * 8, "global_aux_loss"),
        ({}, {**GLOBAL, "moe_aux_loss_coeff": [0.1, 0.0]}, [], [0, 1, 2, 3] * 2, ""),
        ({"tensor_model_parallel_size": 2}, {}, [FSDP], [0] * 8, "FSDP"),
        ({}, {"hybrid_context_parallel": True}, [], [0] * 8, "hybrid context"),
    ],
)  # fmt: skip
def test_megatrons_settings_join_replicas(
    sizes: dict[str, int], config: dict[str, Any], models: list[Any], groups: list[int], word: str
) -> None:
    found, reasons, alone = closed(config, models, **sizes)
    assert found == groups
    assert all(word in why for why in reasons | alone)
    assert bool(reasons) == bool(any(alone)) == bool(word)


@given(st.lists(st.sets(st.integers(0, 9), min_size=1), max_size=12), st.integers(0, 12))
def test_a_closed_group_holds_all_that_meet(sets: list[set[int]], known: int) -> None:
    ties = [Tie(tuple(one)) for one in sets]
    others = [tie._replace(why=f"tie {i}") for i, tie in enumerate(ties)][known:]
    groups, reasons = closed_groups.components(ties[:known], others, 10)
    assert all(groups[low] == low <= rank for rank, low in enumerate(groups))
    for tie in ties:  # who meets is in one group
        assert len({groups[rank] for rank in tie.ranks}) == 1
    for rank, low in enumerate(groups):  # and nobody else is
        reached = {rank}
        while more := set().union(*(one for one in sets if one & reached)) - reached:
            reached |= more
        assert low in reached
    apart, _ = closed_groups.components(ties[:known], [], 10)
    joined = {low for low in groups if len({apart[r] for r in range(10) if groups[r] == low}) > 1}
    assert set(reasons) == joined


class Layer(torch.autograd.Function):
    """Calls one function in forwards and another in backwards."""

    @staticmethod
    def forward(context: Any, given: torch.Tensor, first: Any, then: Any) -> torch.Tensor:
        context.then = then
        first()
        return given.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        context.then()
        return gradient, None, None


def nothing() -> None: ...


def within(module: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `module` that calls another `function`."""
    its: dict[str, Any] = {"__name__": module, "function": function}
    exec("def call(*args, **kwargs): return function(*args, **kwargs)", its)
    made: Callable[..., Any] = its["call"]
    return made


def meetings(group: Any) -> dict[str, Any]:
    one, many = torch.ones(2), torch.ones(4)
    bound = dist.all_reduce  # before anything is watched
    return {
        "all_reduce": lambda: bound(one, group=group),
        "all_gather": lambda: dist.all_gather([many, many.clone()], many, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(many, one, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one, many, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(one, one.clone(), group=group),
        "broadcast": lambda: dist.broadcast(one, group_src=0, group=group),
        "barrier": lambda: dist.barrier(group),
    }


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("name", list(meetings(None)))
@pytest.mark.parametrize("where", ["forward", "backward", "recomputed", "thread"])
def test_an_op_that_reaches_other_replicas_is_seen(name: str, where: str) -> None:
    become(0, 4)
    inside, outside = dist.new_group([0, 1]), dist.new_group([0, 2])
    watch = OpWatch({0, 1}, {0})
    for group, why in ((inside, ""), (outside, f"calls {name} over ranks 0, 2 in a ")):
        call = meetings(group)[name]
        first, then = (nothing, call) if where == "backward" else (call, nothing)
        given = torch.ones(1, requires_grad=True)
        with watch.watching():
            if where == "thread":
                thread = threading.Thread(target=call)
                thread.start()
                thread.join()
            elif where == "recomputed":
                with torch.no_grad():
                    kept = given.clone()
                Layer.apply(kept.requires_grad_(), nothing, first).sum().backward()
            else:
                Layer.apply(given, first, then).sum().backward()
        met = "" if watch.met is None else watch.met.why
        assert why in met
        assert bool(why) == bool(met)
    assert watch.met is not None
    assert watch.met.ranks == (0, 2)
    if where != "thread":
        assert watch.met.why.endswith("forward" if where == "forward" else "backward")
    watch.close()
    with contextlib.closing(OpWatch({0, 1}, {0})) as watch:
        meetings(outside)[name]()  # not in an iteration
        assert watch.met is None


@pytest.mark.usefixtures("nobody")
def test_gradients_that_go_round_once_are_no_meeting() -> None:
    """Reductions of Megatron's buckets, and what finalises gradients, come after all ops."""
    become(0, 4)
    outside = dist.new_group([0, 2])

    def finalize() -> None:
        dist.all_reduce(torch.ones(1), group=outside)

    watch = OpWatch({0, 1}, {0})
    with watch.watching(finalize):
        finalize()
        assert watch.met is None
    with watch.watching():
        for module in ("distributed.param_and_grad_buffer", "timers"):
            within(f"megatron.core.{module}", finalize)()
            assert watch.met is None
        finalize()
    assert watch.met is not None
    watch.close()


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(
    "module", ["adapter.step.planned_collectives", "execute.small.small_collectives"]
)
def test_what_stands_in_for_a_function_of_torchs_has_not_called_it(module: str) -> None:
    become(0, 4)
    outside, given = dist.new_group([0, 2]), torch.ones(1)
    stand_in = within(f"megatron_adaptra.{module}", dist.all_reduce)
    ours = within("megatron_adaptra.adapter.step.idle_losses", dist.all_reduce)
    with contextlib.closing(OpWatch({0, 1}, {0})) as watch, watch.watching():
        ours(given, group=outside)
        assert watch.met is None
        stand_in(given, group=outside)
    assert watch.met is not None
    assert watch.met.why.startswith(f"{__name__}.test_what_stands_in")


@pytest.mark.usefixtures("nobody")
def test_waits_for_other_replicas_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for ranks of one's own replica are part of an op."""
    become(0, 4)
    own, joined = dist.new_group([0, 1]), dist.new_group([0, 2])
    native, waits = dist.ProcessGroup.allreduce, list[float]()

    def late(*args: Any) -> Any:
        time.sleep(0.02)
        return native(*args)

    monkeypatch.setattr(dist.ProcessGroup, "allreduce", late)
    watch = OpWatch({0, 1, 2, 3}, {0, 1}, waits.append)
    for _ in range(2):
        with watch.watching():
            for group in (own, joined):
                dist.all_reduce(torch.ones(1), group=group)
                dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
    watch.close()
    assert watch.met is None
    assert len(waits) == 2
    assert all(wait >= 0.02 for wait in waits)
