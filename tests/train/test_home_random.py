"""Random states by home: the same on any worker, others for anything else; one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_adaptra.ir.op import Op

TRACKED = "model-parallel-rng"
F3 = Op.parse("F3@2")


DEVICE = torch.Generator()  # that of the device, apart from the CPU's


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    """Imported where these tests run: all processes of pytest-xdist collect them."""
    global HomeRandom, home_random, no_states, own_generator, random, rerun_state_machine
    from megatron.core import rerun_state_machine
    from megatron.core.tensor_parallel import random

    from megatron_adaptra.adapter.limits import no_states, own_generator
    from megatron_adaptra.adapter.pipeline import home_random
    from megatron_adaptra.adapter.pipeline.home_random import HomeRandom


@pytest.fixture(autouse=True)
def a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With a generator of its own; what other tests in this process draw stays as it is."""
    for name, value in {
        "current_device": lambda: 0, "default_generators": (DEVICE,),
        "manual_seed": DEVICE.manual_seed, "get_rng_state": lambda *_, **__: DEVICE.get_state(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.random, "get_rng_state", torch.cuda.get_rng_state)
    monkeypatch.setattr(random, "_lazy_call", lambda call: call())
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER", None)
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


def draw(generator: torch.Generator = DEVICE, count: int = 3) -> list[float]:
    return torch.rand(count, generator=generator).tolist()


def worker(seed: int = 7, tensor: int = 0, drawn: int = 0) -> None:
    """This process is now a rank with Megatron's seeds, which has drawn some numbers already."""
    random.model_parallel_cuda_manual_seed(seed, tp_rank=tensor, ep_rank=0, etp_rank=0)
    torch.default_generator.manual_seed(seed)
    draw(DEVICE, drawn)
    draw(torch.default_generator, drawn)
    with random.get_cuda_rng_tracker().fork(TRACKED):
        draw(DEVICE, drawn)


def states() -> list[torch.Tensor]:
    cpu, device, tracked = random._get_all_rng_states()
    return [cpu.clone(), device.clone(), *(tracked[name].clone() for name in sorted(tracked))]


def numbers(op: Op = F3, position: int = 1, iteration: int = 5) -> dict[str, list[float]]:
    """What a forward draws from each generator."""
    home = HomeRandom()
    home.begin(iteration)
    tracker, found = random.get_cuda_rng_tracker(), {}
    with home.of(op, position):
        found["cpu"], found["device"] = draw(torch.default_generator), draw()
        for name in tracker.get_states():
            with tracker.fork(name):
                found[name] = draw()
    return found


def test_any_worker_draws_what_the_home_draws() -> None:
    worker()
    home = numbers()
    worker(drawn=1000)
    assert numbers() == home
    assert len(home) >= 4
    assert len({tuple(row) for row in home.values()}) == len(home), "each generator its own"


@pytest.mark.parametrize(
    "other",
    [
        {"op": Op.parse("F3@1")},
        {"op": Op.parse("F2@2")},
        {"position": 0},
        {"iteration": 6},
        {"seed": 8},
    ],
)
def test_anything_else_draws_other_numbers(other: dict[str, Any]) -> None:
    worker()
    home = numbers()
    worker(seed=other.pop("seed", 7))
    found = numbers(**other)
    assert all(found[name] != home[name] for name in home)


def test_tensor_parallel_ranks_share_what_megatron_lets_them_share() -> None:
    """The same default generators; one of its own for the parts that each of them holds."""
    found = []
    for tensor in (0, 1):
        worker(tensor=tensor)
        found.append(numbers())
    for shared in ("cpu", "device"):
        assert found[0][shared] == found[1][shared]
    assert found[0][TRACKED] != found[1][TRACKED]


@pytest.mark.parametrize("fails", [False, True])
def test_own_generators_are_as_they_were(fails: bool) -> None:
    """To the last bit, whatever the forward has drawn and however it has ended."""
    worker(drawn=10)
    before, home = states(), HomeRandom()
    home.begin(0)
    with contextlib.suppress(ZeroDivisionError), home.of(F3, 1):
        draw(torch.default_generator)
        draw()
        for name in random.get_cuda_rng_tracker().get_states():
            with random.get_cuda_rng_tracker().fork(name):
                draw()
        assert not any(a.equal(b) for a, b in zip(states(), before, strict=True))
        if fails:
            raise ZeroDivisionError
    assert all(a.equal(b) for a, b in zip(states(), before, strict=True))


def test_an_iteration_that_is_run_again_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron compares its results; by then the number of the iteration to come is another."""
    worker()
    machine = SimpleNamespace(state=rerun_state_machine.RerunState.INITIAL_RUN)
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    home, found = HomeRandom(), []
    for iteration, state in enumerate(["INITIAL_RUN", "RERUNNING_IN_PLACE", "INITIAL_RUN"]):
        machine.state = rerun_state_machine.RerunState[state]
        home.begin(iteration)
        with home.of(F3, 1):
            found.append(draw())
    assert found[0] == found[1] != found[2]
    assert found[2] == numbers(iteration=1)["device"], "as if none had been run again"


def test_generators_that_are_objects_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, device, tracked = random._get_all_rng_states()
    assert no_states() == ""
    held = {**tracked, TRACKED: torch.Generator()}
    monkeypatch.setattr(home_random.random, "_get_all_rng_states", lambda: (cpu, device, held))
    assert no_states() == "its generators are held by CUDA graphs"


def test_a_module_with_a_generator_of_its_own_is_named() -> None:
    noise = torch.nn.Identity()
    model = torch.nn.Sequential(torch.nn.Dropout(0.1), noise)
    assert own_generator(model) == ""
    noise.generator = torch.Generator()  # type: ignore[assignment]
    assert own_generator(model) == "Identity"
