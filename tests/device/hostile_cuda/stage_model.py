"""What the ops of a pipeline compute: mixes of words, in which every input and every order shows.

The same arithmetic runs on the hostile device, by kernels, and on the host, one op after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from fakes.hostile_cuda.driver import Driver, mix
from hostile_cuda.collectives import Collectives

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, STEP, BATCH, START = range(6)


def number(what: int, iteration: int, microbatch: int, position: int) -> int:
    """Of one op of a job: another one has another."""
    return ((iteration << 16 | microbatch) << 8 | position) << 3 | what


def label(kind: str, iteration: int, microbatch: int, position: int) -> str:
    """Of the kernel of an op."""
    return f"{kind}{microbatch} at {position} in {iteration}"


@dataclass
class Kept:
    """Of one microbatch at one position, from its forward to the end of its backward."""

    received: torch.Tensor
    saved: torch.Tensor
    gradient: torch.Tensor | None = None  # of the output; between the halves of a backward


@dataclass
class Position:
    """One position of the model on a device: a stage, or a chunk of one.

    `last`: there is no gradient to come. `words`: of a message. Each op allocates and frees memory
    of its own, which the next op may get. `collectives`: that are launched with ops.
    """

    driver: Driver
    at: int
    last: bool
    words: int
    collectives: Collectives
    kept: dict[int, Kept] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weight = self.driver.tensor(self.words, f"the weights of {self.at}")
        self.sum = self.driver.tensor(self.words, f"the gradients' sum of {self.at}")
        self._kernel("starts", START, 0, 0, [], [self.weight, self.sum])

    def batch(self, iteration: int, microbatch: int) -> torch.Tensor:
        """The input of the first position."""
        made = self._new(f"batch {microbatch}")
        self._kernel(f"batch {microbatch}", BATCH, iteration, microbatch, [], [made])
        return made

    def forward(self, iteration: int, microbatch: int, received: torch.Tensor) -> torch.Tensor:
        """The output; what the backward needs is kept."""
        name = label("F", iteration, microbatch, self.at)
        self.collectives.tensor_parallel(name)
        output, saved = self._new(f"the output of {name}"), self._new(f"what {name} keeps")
        self._churn(name, received)
        ins = [received, self.weight]
        self._kernel(name, FORWARD, iteration, microbatch, ins, [output, saved])
        self.kept[microbatch] = Kept(received, saved)
        return output

    def backward_input(
        self, iteration: int, microbatch: int, gradient: torch.Tensor | None
    ) -> torch.Tensor:
        """The gradient of the input; that of the weights is still to come."""
        kept, name = self.kept[microbatch], label("I", iteration, microbatch, self.at)
        self.collectives.tensor_parallel(name)
        kept.gradient = gradient if gradient is not None else kept.saved
        made = self._new(f"the gradient of {name}")
        ins = [kept.gradient, kept.received, kept.saved, self.weight]
        self._kernel(name, INPUT_GRADIENT, iteration, microbatch, ins, [made])
        return made

    def backward_weight(self, iteration: int, microbatch: int) -> None:
        """Add to the gradients of the weights; the order shows."""
        kept, name = self.kept.pop(microbatch), label("W", iteration, microbatch, self.at)
        assert kept.gradient is not None
        self._churn(name, kept.received)
        ins = [self.sum, kept.gradient, kept.received]
        self._kernel(name, WEIGHT_GRADIENT, iteration, microbatch, ins, [self.sum])
        self.collectives.data_parallel(name)

    def step(self, iteration: int) -> None:
        """The optimizer's."""
        ins = [self.weight, self.sum]
        self._kernel(f"step {iteration} of {self.at}", STEP, iteration, 0, ins, [self.weight])

    def _new(self, label: str) -> torch.Tensor:
        return self.driver.tensor(self.words, label)

    def _churn(self, name: str, source: torch.Tensor) -> None:
        scratch = self._new(f"scratch of {name}")
        self.driver.kernel(f"scratch of {name}", 1, [source], [scratch])

    def _kernel(
        self,
        name: str,
        what: int,
        iteration: int,
        microbatch: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        self.driver.kernel(name, number(what, iteration, microbatch, self.at), inputs, outputs)


def reference(
    positions: int, microbatches: int, iterations: int, words: int
) -> list[tuple[list[int], list[int]]]:
    """Per position weights and sum of gradients after all, computed without device or pipeline."""
    state = [mix(number(START, 0, 0, p), [], [words, words]) for p in range(positions)]
    for iteration in range(iterations):
        for microbatch in range(microbatches):
            x = mix(number(BATCH, iteration, microbatch, 0), [], [words])[0]
            inputs, saved = [], []
            for p in range(positions):
                inputs.append(x)
                own = number(FORWARD, iteration, microbatch, p)
                x, keeps = mix(own, [x, state[p][0]], [words, words])
                saved.append(keeps)
            gradient = saved[-1]
            for p in reversed(range(positions)):
                sums = [state[p][1], gradient, inputs[p]]
                own = number(WEIGHT_GRADIENT, iteration, microbatch, p)
                state[p][1] = mix(own, sums, [words])[0]
                own = number(INPUT_GRADIENT, iteration, microbatch, p)
                gradient = mix(own, [gradient, inputs[p], saved[p], state[p][0]], [words])[0]
        for p in range(positions):
            state[p][0] = mix(number(STEP, iteration, 0, p), state[p], [words])[0]
    return [(weight.tolist(), sums.tolist()) for weight, sums in state]
