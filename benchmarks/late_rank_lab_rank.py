"""One rank of late_rank_lab.py: a training with native all-reduces, and the same with `auto`.

Argument: a file with Settings as JSON. Rank 0 writes what all ranks have measured beside it.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from megatron_adaptra import ddp
from megatron_adaptra.config import AdaptraConfig

RESULT, DECISIONS = "result.json", "decisions.jsonl"
TIMEOUT = 60.0
SEED = 1234


@dataclass(frozen=True)
class Settings:
    """What all ranks do.

    `trains`: megatron, sharded (the same with the distributed optimizer) or ddp; of the first two
    also with `overlapped`, where gradients are reduced while others are computed, and of shards
    then with `gathered`, where parameters are gathered in the next forward. `phases`: of a
    first iteration, one after the last, and the rank that is late meanwhile, -1 for none; of
    healthy trainings one per arm, in turns. `compute`: seconds of a rank in time, of which it waits
    what its model does not take. `slowed`: what a late one takes more, as a share. `in_turns`: both
    trainings take turns, a phase each. `hooked`: native of ddp goes through torch's own hook.
    """

    trains: str
    phases: list[tuple[int, int, int]]
    compute: float
    slowed: float
    min_gain: float
    in_turns: bool = False
    hooked: bool = False

    @property
    def backward(self) -> float:
        """Seconds of `compute` in which gradients are reduced."""
        return BACKWARD * self.compute if "overlapped" in self.trains else 0.0

    @property
    def forward(self) -> float:
        """Seconds of `compute` in which parameters are gathered."""
        return FORWARD * self.compute if "gathered" in self.trains else 0.0


class Training(Protocol):
    """A model in training, the same on all ranks of a data-parallel group."""

    def step(self, iteration: int, computed: Callable[[], None]) -> float:
        """Train on one batch; the loss of this rank. `computed` is called before gradients go."""
        ...

    def digest(self) -> str:
        """Of all parameters, bit for bit."""
        ...


class Trainings(Protocol):
    """Makes the two trainings, `native` first."""

    def native(self) -> Training:
        """As the framework reduces gradients."""
        ...

    def auto(self) -> Training:
        """By what is found and voted on."""
        ...

    def close(self) -> None:
        """End the connections."""
        ...


# Megatron's functions in which plans of ours run: each training has those it was made with.
PATCHED = ("gradients", "shards")
HIDDEN = {"megatron": 128, "sharded": 64}  # of a GPT of about 3.3 MB, and of 0.9 MB
BUCKET = {"megatron": 200_000, "sharded": 60_000}  # numbers, of each bucket where there are some
LAYERS = 4
# Shares of what a rank computes, in the last backward and the first forward, where these overlap.
BACKWARD = FORWARD = 0.25


class OfMegatron:
    """GPTs with Megatron's own DistributedDataParallel, and with its distributed optimizer."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        from megatron_adaptra.adapter.baseline import cpu

        cpu.install()
        from megatron_adaptra.adapter.baseline import gpt
        from megatron_adaptra.adapter.compat.patch_attr import find
        from megatron_adaptra.adapter.compat.patches import PATCHES

        self._gpt, self._min_gain, self._log = gpt, settings.min_gain, folder / DECISIONS
        kind, *overlapped = settings.trains.split()
        sharded = kind == "sharded"
        self._shape = gpt.GPTShape(
            stages=1, microbatches=1, layers=LAYERS, hidden=HIDDEN[kind], seq_length=16, seed=SEED,
            distributed_optimizer=sharded, after_backward=sharded and not overlapped,
            overlap_reduce=bool(overlapped) and not sharded, bucket=BUCKET[kind],
            overlap_gather="gathered" in overlapped,
        )  # fmt: skip
        # Before each layer's forward and backward.
        self._waits = settings.forward / LAYERS, settings.backward / LAYERS
        gpt.initialize(self._shape, TIMEOUT)
        prefix = folder / "data" / "text"
        if dist.get_rank() == 0:
            gpt.write_dataset(None, prefix.parent, limit=200_000)
        dist.barrier()
        self._dataset = gpt.build_dataset(prefix, self._shape, 1000)
        targets = [target for name in PATCHED for target in PATCHES[name].targets]
        self._patched = [find(target) for target in targets]

    def native(self) -> Training:
        return self._of_gpt()

    def _of_gpt(self) -> Training:
        return OfGPT(self._gpt, self._shape, self._dataset, self._patched, *self._waits)

    def auto(self) -> Training:
        from megatron_adaptra.adapter.entry.activate import activate

        config = AdaptraConfig(
            allreduce="auto", min_gain=self._min_gain, timeout=TIMEOUT, decision_log=str(self._log)
        )
        self._activation = activate(config)
        self._ours = functions_of(self._patched)
        return self._of_gpt()

    def close(self) -> None:
        put(self._patched, self._ours)
        self._activation.undo()


def functions_of(patched: list[tuple[Any, str]]) -> list[Any]:
    return [vars(owner)[name] for owner, name in patched]


def put(patched: list[tuple[Any, str]], functions: list[Any]) -> None:
    for (owner, name), function in zip(patched, functions, strict=True):
        setattr(owner, name, function)


class OfGPT:
    """One of them. It reduces gradients as Megatron was patched to do when it was made.

    `forward`: seconds before the forward of each layer. `backward`: the same, from which on
    gradients are reduced; 0 where they are when all is computed.
    """

    def __init__(
        self,
        gpt: Any,
        shape: Any,
        dataset: Any,
        patched: list[tuple[Any, str]],
        forward: float,
        backward: float,
    ) -> None:
        self._arm, self._function = gpt.Arm.build(shape, dataset), gpt.forward_backward_function()
        self._patched, self._reduce = patched, functions_of(patched)
        self._finalize = self._arm.config.finalize_model_grads_func
        self._computed: Callable[[], None]
        if not backward:
            self._arm.config.finalize_model_grads_func = self._finish
            return
        layers = self._arm.models[0].module.decoder.layers
        layers[-1].register_full_backward_pre_hook(lambda *_: self._computed())
        for layer in layers:
            layer.register_full_backward_pre_hook(lambda *_: time.sleep(backward))
            if forward:
                layer.register_forward_pre_hook(lambda *_: time.sleep(forward))

    def step(self, iteration: int, computed: Callable[[], None]) -> float:
        self._computed = computed
        put(self._patched, self._reduce)
        self._arm.begin()
        (loss,) = self._arm.forward_backward(self._function)
        self._arm.optimizer.step()
        self._arm.end()
        return float(loss[0] if loss.dim() else loss)

    def digest(self) -> str:
        if self._arm.shape.overlap_gather:  # the last parameters are on their way
            put(self._patched, self._reduce)
            for model in self._arm.models:
                model.disable_forward_pre_hook()
        return str(self._arm.digest())

    def _finish(self, *args: Any, **kwargs: Any) -> Any:
        self._computed()
        return self._finalize(*args, **kwargs)


class OfTorch:
    """Perceptrons of 3.2 MB with torch's DistributedDataParallel, in two buckets."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._min_gain, self._log = settings.min_gain, folder / DECISIONS
        self._native = (dist.group.WORLD, allreduce_hook) if settings.hooked else None

    def native(self) -> Training:
        return OfPerceptron(self._native)

    def auto(self) -> Training:
        return OfPerceptron(
            ddp.all_reduce_hook(
                "auto", min_gain=self._min_gain, timeout=TIMEOUT, decision_log=self._log
            )
        )

    def close(self) -> None:
        """The hook's connections end with the process."""


class OfPerceptron:
    """One of them, with a communication `hook` and its state."""

    WIDTH, LAYERS = 448, 4

    def __init__(self, hook: tuple[Any, Any] | None = None) -> None:
        torch.manual_seed(SEED)
        layers: list[torch.nn.Module] = []
        for _ in range(self.LAYERS):
            layers += [torch.nn.Linear(self.WIDTH, self.WIDTH), torch.nn.Tanh()]
        self._model = DistributedDataParallel(torch.nn.Sequential(*layers))
        if hook is not None:
            self._model.register_comm_hook(*hook)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1.0, momentum=0.9)

    def step(self, iteration: int, computed: Callable[[], None]) -> float:
        seed = torch.Generator().manual_seed(SEED + 1000 * iteration + dist.get_rank())
        batch = torch.randn(8, self.WIDTH, generator=seed)
        self._optimizer.zero_grad()
        loss = (self._model(batch) - batch.roll(1, 1).tanh()).square().mean()
        computed()
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def digest(self) -> str:
        sha = hashlib.sha256()
        for parameter in self._model.parameters():
            sha.update(parameter.detach().numpy().tobytes())
        return sha.hexdigest()


class Arm:
    """A training, and what it has measured."""

    def __init__(self, training: Training, settings: Settings) -> None:
        self._training, self._settings = training, settings
        self._iteration = 0
        self._seconds: list[float] = []
        self._losses: list[float] = []

    def run(self, iterations: int, late: int) -> None:
        """Train so long, while that rank is late."""
        compute = self._settings.compute * (1 + self._settings.slowed * (late == dist.get_rank()))
        for _ in range(iterations):
            began = time.monotonic()
            until = began + compute - self._settings.backward
            # What computes needs a core of this machine: the plugin's threads shall have it before.
            first = self._settings.compute / 2
            if forward := self._settings.forward:  # which gathers make longer
                first, until = until - began - forward, began
            time.sleep(first)
            loss = self._training.step(
                self._iteration, lambda end=until: time.sleep(max(0.0, end - time.monotonic()))
            )
            self._seconds.append(time.monotonic() - began)
            self._losses.append(loss)
            self._iteration += 1

    def found(self) -> dict[str, Any]:
        """By rank, of each iteration; a collective."""
        gathered: list[Any] = [None] * dist.get_world_size()
        mine = {
            "seconds": self._seconds, "losses": self._losses, "digest": self._training.digest()
        }  # fmt: skip
        dist.all_gather_object(gathered, mine)
        return {key: [one[key] for one in gathered] for key in mine}


def main() -> None:
    path = Path(sys.argv[1])
    settings = Settings(**json.loads(path.read_text()))
    dist.init_process_group("gloo")
    make: Trainings = (OfTorch if settings.trains == "ddp" else OfMegatron)(settings, path.parent)
    native = Arm(make.native(), settings)
    if settings.in_turns:
        auto, order = Arm(make.auto(), settings), random.Random(SEED)
        for first, end, late in settings.phases:
            for arm in order.sample([native, auto], 2):
                arm.run(end - first, late)
    else:
        for first, end, late in settings.phases:
            native.run(end - first, late)
        auto = Arm(make.auto(), settings)
        for first, end, late in settings.phases:
            auto.run(end - first, late)
    found = {"native": native.found(), "auto": auto.found()}
    make.close()
    if dist.get_rank() == 0:
        (path.parent / RESULT).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
