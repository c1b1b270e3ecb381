"""Which jobs can have routes, and what a last stage without a microbatch returns; one process."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_adaptra.adapter.step import idle_losses
from megatron_adaptra.adapter.step.idle_losses import IdleLosses
from megatron_adaptra.agree.bundle import scheduled
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.ir.schedule import Schedule, warmup_line
from megatron_adaptra.plan.pipeline.fixed import first_schedule

START = first_schedule(2, 3, float("inf")).replicated(2)
ON = AdaptraConfig(engine="executor", reroute="auto")


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    """Imported where these tests run: all processes of pytest-xdist collect them."""
    global Run, home_random, limits, mpu, run_setup
    from megatron.core import parallel_state as mpu

    from megatron_adaptra.adapter import limits
    from megatron_adaptra.adapter.pipeline import home_random, run_setup
    from megatron_adaptra.adapter.pipeline.run import Run


def exchanged(one: int, other: int) -> Schedule:
    """Two workers have each other's work."""
    lines = list(START.order)
    lines[one], lines[other] = lines[other], lines[one]
    return replace(START, order=tuple(lines), policy="swap")


def shifted() -> Schedule:
    """Replica 0 runs microbatch 2 of replica 1, too."""
    lines = [list(line) for line in START.order]
    for one, other in ((0, 2), (1, 3)):
        lines[one] += [op for op in lines[other] if op.microbatch == 2]
        lines[other] = [op for op in lines[other] if op.microbatch != 2]
    return replace(START, order=tuple(map(tuple, lines)), policy="shift")


def test_a_mode_allows_what_keeps_the_order() -> None:
    line = tuple(op._replace(home=0) for op in warmup_line(3, 3))
    deeper = replace(START, order=(line, *START.order[1:]))
    rows = {"home": START, "deeper": deeper, "swapped": exchanged(1, 3), "shifted": shifted()}
    allowed = {
        m: {n for n, one in rows.items() if run_setup.allows(m, one)}
        for m in ("alike", "none", "swap", "auto")
    }
    assert allowed == {
        "alike": {"home"}, "none": {"home", "deeper"}, "swap": {"home", "deeper", "swapped"},
        "auto": set(rows),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "found", "executes", "mode"),
    [
        ("auto", {}, True, "auto"),
        ("auto", {}, False, "swap"),
        ("auto", {"MOVED": "dropout"}, True, "swap"),
        ("swap", {}, True, "swap"),
        ("auto", {"ROUTES": "data", "MOVED": "dropout"}, True, "none"),
        ("swap", {"ROUTES": "data"}, False, "none"),
        ("auto", {"ROUTES": "FP8", "APART": "FP8"}, True, "alike"),
    ],
)
def test_limits_of_any_rank_decide(
    asked: str, found: dict[str, str], executes: bool, mode: str
) -> None:
    reasons = {getattr(limits, name): why for name, why in found.items()}
    assert run_setup.mode_of(asked, reasons, executes) == mode


SIZES = {"data": 2, "pipeline": 2, "virtual": None, "experts": 1}


@pytest.mark.parametrize(
    ("config", "sizes", "on_device", "words"),
    [
        (ON, {}, False, ""),
        (ON, {"data": 1}, False, "there is one replica"),
        (ON, {"pipeline": 1}, False, "there is one stage"),
        (ON, {"virtual": 2}, False, "virtual stages"),
        (ON, {"experts": 2}, False, "share experts"),
        (ON, {}, True, "on GPUs"),
        (replace(ON, engine="stock"), {}, False, "--adaptra-engine stock"),
        (replace(ON, policy="zb-h1"), {}, False, "--adaptra-policy zb-h1"),
    ],
)
def test_replicas_are_planned_apart_for_a_reason(
    config: AdaptraConfig, sizes: dict[str, Any], on_device: bool, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    names = {
        "data": "get_data_parallel_world_size",
        "pipeline": "get_pipeline_model_parallel_world_size",
        "virtual": "get_virtual_pipeline_model_parallel_world_size",
        "experts": "get_expert_model_parallel_world_size",
    }
    for name, size in {**SIZES, **sizes}.items():
        monkeypatch.setattr(mpu, names[name], lambda size=size: size)
    why = limits.why_not(limits.TOGETHER, limits.Case(config, on_device=on_device))
    assert words in why
    assert bool(words) == bool(why)


def test_a_reason_stands_once_in_the_table() -> None:
    reasons = [row.reason for row in limits.ROWS if row.reason != "{}"]
    again = {reason for reason in reasons if reasons.count(reason) > 1}
    assert not again, again


class Model(torch.nn.Module):
    def __init__(self, hidden: float, inside: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_dropout=hidden, attention_dropout=0.0)
        self.part = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(inside))


@pytest.mark.parametrize(
    ("hidden", "inside", "words"),
    [(0.0, 0.0, ""), (0.1, 0.0, "hidden_dropout draws"), (0.0, 0.1, "nn.Dropout draws")],
)
@pytest.mark.parametrize("why", ["", "its generators are held by CUDA graphs"])
def test_dropout_keeps_microbatches_in_their_order_where_it_has_no_states_by_home(
    hidden: float, inside: float, words: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "no_states", lambda: why)
    found = limits.why_not(limits.MOVED, limits.Case(ON, {"model": Model(hidden, inside)}))
    assert found == (f"{words} random numbers, and {why}" if words and why else "")


def test_a_generator_of_its_own_keeps_microbatches_in_their_order() -> None:
    model = Model(0.0, 0.0)
    model.part[0].generator = torch.Generator()  # type: ignore[assignment]
    found = limits.why_not(limits.MOVED, limits.Case(ON, {"model": model}))
    assert found == "Linear draws from a generator of its own, in the order of ops"


@pytest.mark.parametrize(
    ("schedule", "by_home"), [(START, False), (exchanged(1, 3), False), (shifted(), True)]
)
def test_random_numbers_go_by_home_only_where_microbatches_move(
    schedule: Schedule, by_home: bool
) -> None:
    run = object.__new__(Run)
    run._schedule = schedule
    assert run.by_home is by_home


@pytest.mark.parametrize("other", ["same", "another"])
def test_random_states_have_to_be_those_of_the_peers(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pipeline_model_parallel", "tensor_model_parallel", "context_parallel"):
        monkeypatch.setattr(mpu, f"get_{name}_rank", lambda: 0)
    states = torch.get_rng_state(), torch.zeros(8, dtype=torch.uint8), {"a": torch.ones(2)}
    monkeypatch.setattr(home_random.random, "_get_all_rng_states", lambda: states)

    def gathered(mine: Any) -> list[Any]:
        place, digest = mine
        changed = digest if other == "same" else digest[::-1]
        return [mine, ((1, 0, 0), "of another stage"), (place, changed)]

    monkeypatch.setattr(home_random, "from_all_ranks", gathered)
    assert bool(home_random.differing()) == (other == "another")


def test_a_last_stage_without_losses_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gathers = []

    def peers(mine: Any, group: Any) -> list[Any]:
        gathers.append(mine)
        return [None, theirs]

    monkeypatch.setattr(idle_losses, "gather", peers)
    theirs = {"lm loss": torch.tensor([7.0, 2.0]), "more": torch.tensor([3.0, 1.0])}
    idle = IdleLosses(None)
    for _ in range(3):
        (one,) = idle.filled([])
        assert {name: value.tolist() for name, value in one.items()} == {
            "lm loss": [0.0, 0.0], "more": [0.0, 0.0],
        }  # fmt: skip
        one["lm loss"] += 1  # whatever is done with it
    assert idle.filled([theirs]) == [theirs]
    assert gathers == [None], "asked once, as it never changes"

    theirs, ratios = {"lm loss": torch.tensor([3.5])}, IdleLosses(None)
    assert [ratios.filled([])[0]["lm loss"].item() for _ in range(2)] == [3.5, 3.5]
    assert len(gathers) == 3, "asked each time, as it changes"


def test_routes_are_part_of_what_ranks_agree_on() -> None:
    one, other = scheduled(exchanged(1, 3)), scheduled(exchanged(0, 2))
    assert one.text.replace("@0", "").replace("@1", "") == (
        other.text.replace("@0", "").replace("@1", "")
    )
    assert one.digest != other.digest
