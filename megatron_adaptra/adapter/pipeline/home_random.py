"""Random states by home: a forward draws the same numbers in every replica that may run it.

Megatron's generators go on from op to op, so what an op draws depends on all that its rank has run
before. While single microbatches move between replicas, each forward gets states of its own
instead: a hash of what is run, and of the seed that Megatron has given the generator. Workers of
one stage have the same seeds, so any of them draws what the home would. Ranks that share a
generator's seed share its states here, too, and no others do: tensor-parallel ranks drop the same
values of what each of them holds whole (the default generator), and different ones of their own
parts (`model-parallel-rng`). After the forward the rank's own generators are as they were; once
all microbatches are at home again, stock's numbers go on.

Keys in place of a stream: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core import rerun_state_machine
from megatron.core.tensor_parallel import random

from megatron_adaptra.adapter.pipeline.job_gather import from_all_ranks
from megatron_adaptra.ir.op import Op

_States = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]  # CPU, device, tracker's


class HomeRandom:
    """A HomeRandom sets random states by iteration, home, microbatch and position in the model.

    It covers torch's default generators of CPU and device, and all of Megatron's tracker.
    """

    def __init__(self) -> None:
        self._iteration = self._again = 0
        self._seeds: tuple[int, int, dict[str, int]] | None = None  # once this iteration needs them

    def begin(self, iteration: int) -> None:
        """Begin an iteration, as for all of the job; `iteration`: how many went before.

        An iteration that Megatron runs again, to see whether its results are the same, draws the
        same numbers, and does not count.
        """
        machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE  # asking for it would make one
        again = rerun_state_machine.RerunState.RERUNNING_IN_PLACE
        self._again += machine is not None and machine.state is again
        self._iteration = iteration - self._again
        self._seeds = None

    @contextlib.contextmanager
    def of(self, op: Op, position: int) -> Iterator[None]:
        """Set states for a forward `op` at a `position` in the model: `chunk * stages + stage`."""
        states = self._states(f"{self._iteration} {op.home} {op.microbatch} {position}")
        with random._fork_rng():
            random._set_all_rng_states(*states)
            yield

    def _states(self, what: str) -> _States:
        if self._seeds is None:
            self._seeds = _seeds()
        cpu, device, tracked = self._seeds
        return (
            _state(f"cpu {cpu} {what}", torch.device("cpu")),
            _state(f"device {device} {what}", _device()),
            {name: _state(f"{name} {seed} {what}", _device()) for name, seed in tracked.items()},
        )


def differing() -> str:
    """Return why random states differ between replicas, or ""; a collective of all ranks."""
    cpu, device, tracked = random._get_all_rng_states()
    digest = hashlib.sha256()
    for state in (cpu, device, *(tracked[name] for name in sorted(tracked))):
        given = state.cpu().numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state)
        digest.update(given if isinstance(given, bytes) else given.encode())
    place = (
        mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank(),
        mpu.get_context_parallel_rank(),
    )  # fmt: skip
    first: dict[Any, str] = {}
    for where, found in from_all_ranks((place, digest.hexdigest())):
        if first.setdefault(where, found) != found:
            return "random states differ between replicas (--data-parallel-random-init)"
    return ""


def _device() -> torch.device:
    """Return the device of the generators in Megatron's tracker."""
    generators: Any = torch.cuda.default_generators
    found: torch.device = generators[torch.cuda.current_device()].device
    return found


def _seeds() -> tuple[int, int, dict[str, int]]:
    """Return the seeds of this rank's generators: CPU's, device's, and by name the tracker's."""
    cpu, device, tracked = random._get_all_rng_states()
    of_device = {name: _seed_of(state, _device()) for name, state in tracked.items()}
    return _seed_of(cpu, torch.device("cpu")), _seed_of(device, _device()), of_device


def _seed_of(state: torch.Tensor, device: torch.device) -> int:
    """Return the seed in the `state` of a generator of that `device`, however much it has drawn."""
    generator = torch.Generator(device)
    generator.set_state(state)
    return int(generator.initial_seed())


def _state(key: str, device: torch.device) -> torch.Tensor:
    """Compute the state of a generator of that `device` from the `key` alone.

    A CPU's generator takes 32 of the 64 bits: among 10,000 forwards two have the same state in one
    of a hundred cases, which does no harm.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big")).get_state()
